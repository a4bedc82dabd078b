import inspect
from types import SimpleNamespace

import pytest
import torch

from raybatch.kernels import attention, context_attention, decode_attention, moe, small_ops
from raybatch.kernels.triton import attention as triton_attention
from raybatch.kernels.triton import decode_attention as triton_decode_attention
from raybatch.kernels.triton import moe as triton_moe
from raybatch.kernels.triton import ragged as triton_ragged
from raybatch.kernels.triton import small_ops as triton_small_ops
from tests.kernels.triton.support import DTYPES, assert_close, dtype_name

OPS = [
    (small_ops, triton_small_ops, "rms_norm"),
    (small_ops, triton_small_ops, "rotate_"),
    (moe, triton_moe, "moe_ffn"),
    (attention, triton_attention, "prepare_attention"),
    (attention, triton_attention, "prepare_fixed"),
    (attention, triton_attention, "store_kv"),
    (attention, triton_attention, "attend"),
    (decode_attention, triton_decode_attention, "plan_walk"),
    (decode_attention, triton_decode_attention, "fixed_walk"),
    (context_attention, triton_ragged, "prepare_contexts"),
    (context_attention, triton_ragged, "merge_contexts_"),
]


@pytest.mark.parametrize(("module", "kernels", "name"), OPS, ids=[name for *_, name in OPS])
def test_both_forms_of_an_op_have_the_same_arguments(module, kernels, name):
    def arguments(op):
        # of a reference, the compiled form of a part; the decoder passes neither
        all_of_them = inspect.signature(op).parameters.values()
        return [
            (p.name, p.kind, p.default) for p in all_of_them if p.name not in ("decode", "panelled")
        ]

    assert arguments(getattr(module, name)) == arguments(getattr(kernels, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 2, 10), (70, 3, 64), (2, 5000), (0, 8)])
def test_rms_norm_equals_the_reference(shape, dtype, device):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    actual = triton_small_ops.rms_norm(x.to(device), weight.to(device), 1e-6)
    assert (shape, dtype) == (tuple(actual.shape), actual.dtype)
    assert_close(actual, small_ops.rms_norm(x, weight, 1e-6).float())


def test_rms_norm_reads_heads_of_a_wider_tensor_with_a_weight_per_head(device):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 5, 8)[:, 1:4], torch.rand(7, 8)[2:5]
    actual = triton_small_ops.rms_norm(x.to(device), weight.to(device), 1e-6)
    assert_close(actual, small_ops.rms_norm(x, weight, 1e-6))


def test_rms_norm_computes_half_precision_in_float32(device):
    x = torch.full((1, 64), 300.0, dtype=torch.float16, device=device)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    assert torch.equal(torch.ones_like(x), triton_small_ops.rms_norm(x, weight, 1e-6))


def test_rms_norm_of_a_zero_row_is_zero(device):
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    assert torch.equal(x, triton_small_ops.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 10), (70, 2, 64), (0, 3, 8)])
def test_rotation_equals_the_reference_and_touches_no_other_head(shape, dtype, device):
    torch.manual_seed(0)
    num_tokens, num_heads, head_dim = shape
    wide = torch.randn(num_tokens, num_heads + 2, head_dim).to(dtype)
    positions = torch.arange(num_tokens) * 13
    table = small_ops.rotation_table(positions, torch.rand(head_dim // 2), 1.5)
    actual = wide.to(device, copy=True)
    triton_small_ops.rotate_(actual[:, :num_heads], table.to(device))
    small_ops.rotate_(wide[:, :num_heads], table)
    assert_close(actual, wide.float())
    assert torch.equal(wide[:, num_heads:], actual[:, num_heads:].cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("num_tokens", "num_kv_heads"), [(0, 2), (1, 1), (9, 3)])
def test_keys_and_values_are_stored_bit_for_bit(num_tokens, num_kv_heads, dtype, device):
    torch.manual_seed(0)
    num_blocks, block_size, head_dim = 6, 5, 10
    pools = [torch.randn(num_blocks, num_kv_heads, block_size, head_dim).to(dtype) for _ in "kv"]
    projected = torch.randn(num_tokens, 3 * num_kv_heads, head_dim).to(dtype)
    _, k, v = projected.split(num_kv_heads, dim=1)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]

    def stored(op, device):
        k_pool, v_pool = (pool.to(device, copy=True) for pool in pools)
        places = slots.to(device)
        prepared = SimpleNamespace(
            block_ids=places // block_size, block_offsets=places % block_size
        )
        op(k.to(device), v.to(device), k_pool, v_pool, prepared)
        return k_pool.cpu(), v_pool.cpu()

    expected = stored(attention.store_kv, "cpu")
    for made, wanted in zip(stored(triton_attention.store_kv, device), expected, strict=True):
        assert torch.equal(wanted, made)
