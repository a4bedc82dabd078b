import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from raybatch.engine.weights.layout import map_tensors
from raybatch.kernels import attention, linear, moe, small_ops
from raybatch.kernels.byte_numbers import (
    FP8,
    INT8,
    dequantise,
    quantise,
    quantise_weight,
    weight_scales,
)
from raybatch.kernels.triton import attention as triton_attention
from raybatch.kernels.triton import linear as triton_linear
from raybatch.kernels.triton import moe as triton_moe
from raybatch.kernels.triton import small_ops as triton_small_ops
from tests.kernels.triton.support import DTYPES, assert_close, dtype_name
from tests.tiers import singles

OPS = [
    (small_ops, triton_small_ops, "rms_norm"),
    (linear, triton_linear, "linear"),
    (linear, triton_linear, "add_linear_"),
    (linear, triton_linear, "add_mlp_"),
    (moe, triton_moe, "route"),
    (moe, triton_moe, "moe_ffn"),
    (attention, triton_attention, "prepare_attention"),
    (attention, triton_attention, "finish_heads"),
    (attention, triton_attention, "attend"),
]
# what compiled forms put into a reference, and where a library takes over
PARTS = {"decode", "panelled", "rms_norm", "rotate_", "store_kv"}
PARTS |= {"min_grouped_rows", "pieces_of", "attend_pieces"}


@pytest.mark.parametrize(("module", "kernels", "name"), OPS, ids=[name for *_, name in OPS])
def test_both_forms_of_an_op_have_the_same_arguments(module, kernels, name):
    def arguments(op):
        all_of_them = inspect.signature(op).parameters.values()
        return [(p.name, p.kind, p.default) for p in all_of_them if p.name not in PARTS]

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


class Heads:
    """Heads of a projection, and a pool with a slot for each token."""

    def __init__(self, num_tokens, heads, head_dim, *, dtype=torch.float32, pool_dtype=None):
        torch.manual_seed(0)
        self.num_queries, self.num_kv_heads = heads
        num_heads = self.num_queries + 2 * self.num_kv_heads
        # of a wider tensor, as that of a part of a projection
        wide = torch.randn(num_tokens, num_heads + 1, head_dim)
        self.projected = wide.to(dtype)[:, 1:]
        self.norms = torch.rand(num_heads - self.num_kv_heads, head_dim).to(dtype)
        positions = torch.arange(num_tokens) * 13
        self.turns = small_ops.rotation_table(positions, torch.rand(head_dim // 2), 1.5)
        pool = torch.randn(2, num_tokens + 2, self.num_kv_heads, 4, head_dim).to(dtype)
        self.pools = pool if pool_dtype is None else quantise(pool, pool_dtype)
        self.slots = torch.randperm(4 * (num_tokens + 2))[:num_tokens]

    def run(self, op, device, *, has_norms, stores=True):
        """Return all heads and both pools afterwards."""
        projected, norms, turns, slots = (
            x.to(device) for x in (self.projected, self.norms, self.turns, self.slots)
        )
        projected, pools = projected.clone(), self.pools.to(device, copy=True)
        prepared = SimpleNamespace(
            block_ids=slots // 4, block_offsets=slots % 4, slot_mapping=slots
        )
        heads = op(
            projected,
            self.num_queries,
            norms if has_norms else None,
            1e-6,
            turns,
            *pools,
            prepared if stores else None,
        )
        return torch.cat(heads, dim=1).cpu(), pools.cpu()


@pytest.mark.parametrize(
    ("shape", "dtype", "has_norms"),
    singles([(1, (1, 1), 2), (7, (4, 2), 10), (40, (3, 1), 64), (0, (2, 1), 8)], DTYPES, [0, 1]),
)
def test_heads_are_finished_as_the_reference_does(shape, dtype, has_norms, device):
    heads = Heads(*shape, dtype=dtype)
    expected, pools = heads.run(attention.finish_heads, "cpu", has_norms=has_norms)
    made, stored = heads.run(triton_attention.finish_heads, device, has_norms=has_norms)
    assert_close(made, expected.float())
    assert_close(stored, pools.float())
    if not has_norms:
        # values are put away bit for bit, and no other slot is written
        assert torch.equal(pools[1], stored[1])


@pytest.mark.parametrize("has_norms", [False, True])
def test_queries_alone_are_finished_without_a_pool(has_norms, device):
    heads = Heads(9, (5, 0), 8)
    made, _ = heads.run(triton_attention.finish_heads, device, has_norms=has_norms, stores=False)
    expected, _ = heads.run(attention.finish_heads, "cpu", has_norms=has_norms, stores=False)
    assert_close(made, expected)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_bytes_of_a_pool_are_those_of_the_reference(dtype, device):
    heads = Heads(30, (2, 2), 64, pool_dtype=dtype)
    heads.turns = torch.ones_like(heads.turns)
    # ties, the largest number, the smallest ones, zeros
    heads.projected[0] = torch.arange(64) / 2 - 16
    heads.projected[1] *= 1e30
    heads.projected[2] *= torch.logspace(0, -8, 64)
    heads.projected[3] = 0
    expected, pools = heads.run(attention.finish_heads, "cpu", has_norms=False)
    made, stored = heads.run(triton_attention.finish_heads, device, has_norms=False)
    if dtype is FP8:
        # zeros have no sign
        for pool in (pools, stored):
            pool[..., :64].masked_fill_(pool[..., :64] == 128, 0)
    assert torch.equal(pools, stored)
    assert torch.equal(expected, made)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_a_row_of_bytes_with_a_broken_number_keeps_none(dtype, broken, device):
    heads = Heads(3, (1, 1), 8, pool_dtype=dtype)
    heads.projected[1, 1:, 4] = broken
    made, stored = heads.run(triton_attention.finish_heads, device, has_norms=False)
    block, offset = divmod(int(heads.slots[1]), 4)
    assert not dequantise(stored[:, block, :, offset], 8, torch.float32).isfinite().any()
    assert made[0].isfinite().all()
    assert made[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("kind", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 21])
def test_a_block_of_two_linears_equals_the_reference(num_rows, kind, dtype, device):
    torch.manual_seed(0)
    model_dim, ffn_dim = 40, 34
    x, hidden = torch.randn(2, num_rows, model_dim).to(dtype)
    layers = []
    for shape in ((2 * ffn_dim, model_dim), (model_dim, ffn_dim)):
        weight, bias, scales = torch.randn(shape) * 0.2, torch.randn(shape[0]).to(dtype), None
        if kind is not None:
            scales = weight_scales(weight, kind)
        weight = weight.to(dtype) if scales is None else quantise_weight(weight, scales, kind)
        layers.append(linear.Linear(weight, shape[0], bias, scales))
    expected, made = x.float(), x.to(device, copy=True)
    exact = [replace(layer, bias=layer.bias.float()) for layer in layers]
    if kind is None:
        exact = [replace(layer, weight=layer.weight.float()) for layer in exact]
    linear.add_mlp_(expected, hidden.float(), *exact)
    on_device = map_tensors(layers, lambda tensor: tensor.to(device))
    triton_linear.add_mlp_(made, hidden.to(device), *on_device)
    assert_close(made, expected, factor=4)
