import logging
import math
from types import SimpleNamespace

import pytest
import torch

from raybatch.kernels import attention, dispatch, moe
from raybatch.kernels import small_ops as reference
from raybatch.kernels.attention_plan import DecodePart
from raybatch.kernels.byte_numbers import quantise_weight, weight_scales
from raybatch.kernels.dispatch import REFERENCE, compiled_ops
from raybatch.kernels.native import compiler, decode_attention, linears, small_ops
from raybatch.kernels.native.compiler import compile_library
from raybatch.kernels.native.decode_attention import decode_form
from raybatch.kernels.native.linears import panelled_experts
from tests import tolerances
from tests.oracles import moe_loop

# of two products with a gate between them
TOLERANCE = tolerances.of_sums(torch.float32, 512)

SHAPE = {"head_dim": 16, "num_grouped": 2, "block_size": 8, "kv_dtype": torch.float32}


@pytest.fixture
def form():
    """The compiled form for `SHAPE`."""
    found = decode_form(**SHAPE)
    if found is None:
        pytest.skip("no C compiler here")
    return found


@pytest.fixture
def fresh():
    """Forget what this process has compiled."""
    kept = (
        decode_attention.decode_form,
        linears.compiled_linears,
        linears.panelled_experts,
        small_ops.compiled_small_ops,
        compiler._warn_of_no_compiler,
    )
    for cache in kept:
        cache.cache_clear()
    yield
    for cache in kept:
        cache.cache_clear()


def one_sequence(num_tokens, scale=1.0):
    """Return q, keys and values of one sequence of two KV heads, and its plan."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = -(-num_tokens // 8)
    q = torch.randn(1, 4, 16, generator=generator) * scale
    keys, values = torch.randn(2, num_blocks, 2, 8, 16, generator=generator)
    part = DecodePart(
        block_ids=torch.arange(num_blocks),
        owners=torch.zeros(num_blocks, dtype=torch.int64),
        num_valid=torch.full((num_blocks,), 8).index_fill(
            0, torch.tensor([num_blocks - 1]), num_tokens - 8 * (num_blocks - 1)
        ),
        is_contiguous=True,
    )
    return q, keys, values, part


def attend(form, q, keys, values, part):
    positions = torch.tensor([int(part.num_valid.sum()) - 1])
    lists = form.plan(part, positions=positions, pool=keys, windows=(None,))
    return form.attend(q, keys, values, lists, None)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 3000.0])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 100])
def test_small_and_huge_scores_are_those_of_torch(form, num_tokens, scale):
    q, keys, values, part = one_sequence(num_tokens, scale)
    output, lse = attend(form, q, keys, values, part)
    for head in range(4):
        key, value = (
            pool[:, head // 2].reshape(-1, 16)[:num_tokens].double() for pool in (keys, values)
        )
        scores = key @ q[0, head].double() / math.sqrt(16)
        expected = scores.softmax(dim=0) @ value
        torch.testing.assert_close(output[0, head].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            lse[0, head].double(), scores.logsumexp(dim=0), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize(
    ("place", "bad"),
    [("q", math.nan), ("keys", math.nan), ("values", math.nan), ("values", math.inf)],
)
def test_what_is_not_a_number_is_seen(form, place, bad):
    tensors = dict(zip(("q", "keys", "values", "part"), one_sequence(20), strict=True))
    tensors[place].view(-1)[3] = bad
    output, _ = attend(form, **tensors)
    assert not output[0, :2].isfinite().all()


@pytest.mark.parametrize(
    "pool", [torch.zeros(2, 2, 4, 16), torch.zeros(2, 2, 8, 16, dtype=torch.float16)]
)
def test_a_pool_of_another_form_is_refused(form, pool):
    *_, part = one_sequence(9)
    with pytest.raises(ValueError, match="another pool than one of shape"):
        form.plan(part, positions=torch.tensor([8]), pool=pool, windows=(None,))


def test_rows_of_a_wider_projection_are_read_in_place(form):
    q, keys, values, part = one_sequence(20)
    wide = torch.cat((q, torch.full((1, 3, 16), math.nan)), dim=1)
    expected, _ = attend(form, q, keys, values, part)
    assert torch.equal(expected, attend(form, wide[:, :4], keys, values, part)[0])


def test_a_loaded_kernel_leaves_small_numbers_of_the_process_alone(form):
    assert float(torch.tensor(1e-40) * 0.5) != 0.0


class SparseLayer:
    """Six experts of 96 and 64 columns, as matrices and in panels.

    Args:
        widths: of the panels of gate and up, and of down.
    """

    def __init__(self, *widths):
        generator = torch.Generator().manual_seed(0)
        self.router = torch.randn(6, 64, generator=generator)
        self.gate_up = torch.randn(6, 192, 64, generator=generator) * 0.3
        self.down = torch.randn(6, 64, 96, generator=generator) * 0.3
        self.panels = [
            weight.view(6, -1, width, weight.shape[2]).mT.contiguous()
            for weight, width in zip((self.gate_up, self.down), widths, strict=True)
        ]
        self.experts = panelled_experts(*widths)
        if self.experts is None:
            pytest.skip("no C compiler here")

    def compute(self, x):
        options = {"top_k": 2, "norm_topk_prob": True, "panelled": self.experts}
        return moe.moe_ffn(x, self.router, *self.panels, **options)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("form", ["compiled", "panels", "matrices"])
@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_experts_that_are_bytes_count_as_their_floats(num_tokens, size, form, dtype):
    layer = SparseLayer(48, 32)
    scales = [weight_scales(weight, dtype) for weight in (layer.gate_up, layer.down)]
    weights = zip((layer.gate_up, layer.down), scales, strict=True)
    values = [quantise_weight(weight, own, dtype) for weight, own in weights]
    x = size * torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1))
    floats = [v.float() * s.unsqueeze(-1) for v, s in zip(values, scales, strict=True)]
    expected = moe_loop(x, layer.router, *floats, 2, True)
    if form != "matrices":
        values = [
            weight.view(6, -1, width, weight.shape[2]).mT.contiguous()
            for weight, width in zip(values, (48, 32), strict=True)
        ]
    found = moe.moe_ffn(
        x,
        layer.router,
        *values,
        top_k=2,
        norm_topk_prob=True,
        gate_up_scales=scales[0],
        down_scales=scales[1],
        panelled=panelled_experts(48, 32, dtype) if form == "compiled" else None,
    )
    tolerances.assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("widths", [(48, 32), (32, 16), (96, 64)], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 13, 40, 300])
def test_experts_give_what_one_token_at_a_time_gives(num_tokens, widths):
    layer = SparseLayer(*widths)
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1))
    expected = moe_loop(x, layer.router, layer.gate_up, layer.down, 2, True)
    tolerances.assert_close(layer.compute(x), expected, TOLERANCE)


def test_experts_read_rows_of_a_wider_tensor_in_place():
    layer = SparseLayer(48, 32)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    wide = torch.cat((x, torch.full((7, 9), math.nan)), dim=1)
    across = x.t().contiguous().t()
    for form in (wide[:, :64], across):
        tolerances.assert_close(layer.compute(form), layer.compute(x), TOLERANCE)


def test_a_token_that_is_not_a_number_spoils_itself_alone():
    layer = SparseLayer(48, 32)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    clean = layer.compute(x)
    x[3, 5] = math.nan
    found = layer.compute(x)
    assert found[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(found[others], clean[others])


@pytest.mark.parametrize("scale", [1e-3, 100.0, 1e4])
def test_small_and_huge_gates_are_those_of_torch(scale):
    layer = SparseLayer(48, 32)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)) * scale
    expected = moe_loop(x, layer.router, layer.gate_up, layer.down, 2, True)
    # a probability of the router is off by the rounding of its exponent
    exponent = float((x @ layer.router.T).abs().max())
    tolerance = TOLERANCE + exponent * tolerances.eps_of(torch.float32)
    tolerances.assert_close(layer.compute(x), expected, tolerance)


@pytest.fixture
def small():
    """Normalisation, rotation and the KV store in C."""
    found = small_ops.compiled_small_ops()
    if found is None:
        pytest.skip("no C compiler here")
    return found


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_small_ops_give_what_torch_gives_in_slices_of_a_wider_tensor(small, num_tokens):
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(num_tokens, 9, 10, generator=generator)
    weight = torch.rand(5, 10, generator=generator)
    heads = fused[:, 2:7]
    normed = small.rms_norm(heads, weight, 1e-5)
    torch.testing.assert_close(normed, reference.rms_norm(heads, weight, 1e-5))
    rows = fused.view(num_tokens, 90)
    torch.testing.assert_close(
        small.rms_norm(rows, torch.ones(90), 1e-5), reference.rms_norm(rows, torch.ones(90), 1e-5)
    )
    table = reference.rotation_table(torch.arange(num_tokens), torch.rand(5), 0.5)
    expected = fused.clone()
    reference.rotate_(expected[:, 2:7], table)
    small.rotate_(heads, table)
    torch.testing.assert_close(fused, expected)


def test_keys_and_values_go_to_their_slots_and_nowhere_else(small):
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(4, 6, 10, generator=generator)
    prepared = SimpleNamespace(
        block_ids=torch.tensor([2, 0, 2, 4]), block_offsets=torch.tensor([1, 7, 0, 3])
    )
    pools, expected = torch.zeros(2, 5, 2, 8, 10), torch.zeros(2, 5, 2, 8, 10)
    small.store_kv(fused[:, 2:4], fused[:, 4:], *pools, prepared)
    attention.store_kv(fused[:, 2:4], fused[:, 4:], *expected, prepared)
    assert torch.equal(pools, expected)


def test_small_ops_leave_other_dtypes_to_torch(small):
    x, weight = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((3, 2, 8), 8))
    assert torch.equal(small.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("widths", [(8, 32), (48, 20), (112, 32)], ids=str)
def test_panels_that_do_not_fit_the_registers_are_left_to_torch(widths):
    assert panelled_experts(*widths) is None


@pytest.mark.usefixtures("fresh")
def test_a_host_without_a_compiler_runs_the_references(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "none-such")
    with caplog.at_level(logging.INFO):
        assert compiled_ops(**SHAPE, panel_widths=(48, 32)) is REFERENCE
    assert "no C compiler on this host (CC, cc, gcc or clang)" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_compiler_is_taken_with_its_arguments(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "cached"
    compiler.write_text('#!/bin/sh\necho "$1" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} 'the real one'")
    assert compiled_ops(**SHAPE) is REFERENCE
    assert "the real one" in caplog.text


@pytest.mark.usefixtures("form", "fresh")
def test_a_host_without_room_for_a_library_runs_the_references(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    assert compiled_ops(**SHAPE) is REFERENCE
    assert "could not compile" in caplog.text


@pytest.mark.usefixtures("form")
def test_blocks_too_large_for_the_stack_are_left_to_torch():
    assert decode_form(**{**SHAPE, "num_grouped": 8, "block_size": 1 << 16}) is None


def test_another_default_dtype_of_the_process_changes_nothing(form, small):
    layer, x = SparseLayer(48, 32), torch.randn(7, 64)
    tensors, weight = one_sequence(20), torch.ones(64)
    expected = (attend(form, *tensors)[0], layer.compute(x), small.rms_norm(x, weight, 1e-6))
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = (attend(form, *tensors)[0], layer.compute(x), small.rms_norm(x, weight, 1e-6))
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_told_with_its_words(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'no space left on device \\377' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert compiled_ops(**SHAPE) is REFERENCE
    assert "could not compile decode_attention.c" in caplog.text
    assert "no space left on device" in caplog.text


@pytest.mark.usefixtures("form", "fresh")
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch, caplog):
    def other(source, names):
        changed = {
            "decode_attention.c": {"BLOCK_SIZE": 7},
            "moe_experts.c": {"DOWN_WIDTH": 16},
            "small_ops.c": {"sqrtf": "fabsf"},
            "linears.c": {"WIDTH": 16},
        }
        return compile_library(source, {**names, **changed[source]})

    for module in (decode_attention, linears, small_ops):
        monkeypatch.setattr(module, "compile_library", other)
    assert dispatch.compiled_ops(**SHAPE, panel_widths=(48, 32)) is REFERENCE
    assert "attention kernel gives wrong results on this host" in caplog.text
    assert "experts give wrong results on this host" in caplog.text
    assert "small ops give wrong results on this host" in caplog.text
    assert "linears give wrong results on this host" in caplog.text


def test_experts_without_panels_are_left_to_torch(form):
    ops = compiled_ops(**SHAPE)
    assert ops.prepare_attention.keywords == {"decode": form}
    assert ops.moe_ffn is REFERENCE.moe_ffn
    assert compiled_ops(**SHAPE, panel_widths=(48, 32)).moe_ffn.keywords["panelled"] is not None
