import pytest
import torch

from raybatch.engine.weights.layout import lay_out, view_of


def prepare(name: str, tensor: torch.Tensor, dtype: torch.dtype = torch.float32, **options):
    part = tuple(tensor.shape), dtype, lambda: tensor.to(dtype)
    prepared_name, (shape, kept_dtype, build) = lay_out(name, part, **options)
    prepared = build()
    assert prepared.dtype == kept_dtype == dtype
    assert tuple(prepared.shape) == shape
    assert prepared.is_contiguous()
    return prepared_name, prepared


def test_a_large_gate_up_lies_in_panels_of_consecutive_outputs():
    weight = torch.randn(1024, 256)
    name, prepared = prepare("3.gate_up", weight)
    assert (name, tuple(prepared.shape)) == ("3.gate_up.panels", (8, 256, 128))
    assert torch.equal(prepared[2, :, 5], weight[2 * 128 + 5])


def test_experts_get_narrower_panels():
    weight = torch.randn(2, 384, 512)
    name, prepared = prepare("0.experts_gate_up", weight)
    assert (name, tuple(prepared.shape)) == ("0.experts_gate_up.panels", (2, 8, 512, 48))
    assert torch.equal(prepared[1, 3, :, 7], weight[1, 3 * 48 + 7])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("gate_up", (128, 16)), ("gate_up", (2 * 520, 256)), ("o", (512, 512))],
    ids=["small", "gate-and-up-would-share-a-panel", "not-fed-forward"],
)
def test_other_narrow_linears_lie_across(name, shape):
    prepared_name, prepared = prepare(f"0.{name}", torch.randn(shape))
    assert (prepared_name, tuple(prepared.shape)) == (f"0.{name}.across", shape[::-1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_bytes_lie_in_panels_for_compiled_ops_alone(dtype):
    dense, experts = torch.randn(64, 512).mul(50), torch.randn(2, 384, 512).mul(50)
    name, prepared = prepare("0.down", dense, dtype, panel_width=32)
    assert (name, tuple(prepared.shape)) == ("0.down.panels", (2, 512, 32))
    assert torch.equal(prepared[1, :, 3].float(), dense[35].to(dtype).float())
    name, prepared = prepare("0.experts_gate_up", experts, dtype, panel_width=32)
    assert (name, tuple(prepared.shape)) == ("0.experts_gate_up.panels", (2, 8, 512, 48))
    for field, weight in (("down", dense), ("experts_gate_up", experts)):
        assert prepare(f"0.{field}", weight, dtype)[0] == f"0.{field}.across"


def test_half_precision_has_no_panels():
    name, _ = prepare("0.gate_up", torch.randn(1024, 256), torch.bfloat16)
    assert name == "0.gate_up.across"


@pytest.mark.parametrize("name", ["0.qkv", "0.o", "0.gate_up", "0.down", "head", "table"])
def test_all_dense_linears_lie_in_panels_for_compiled_ops(name):
    weight = torch.randn(64, 5)
    prepared_name, prepared = prepare(name, weight, panel_width=16)
    assert (prepared_name, tuple(prepared.shape)) == (f"{name}.panels", (4, 5, 16))
    assert torch.equal(prepared[2, :, 3], weight[2 * 16 + 3])


def test_the_last_panel_is_filled_up_with_zeros():
    weight = torch.randn(33, 5)
    _, prepared = prepare("head", weight, panel_width=32)
    assert torch.equal(prepared[1, :, 0], weight[32])
    assert torch.equal(prepared[1, :, 1:], torch.zeros(5, 31))


def test_gate_and_up_that_would_share_a_panel_are_laid_out_for_torch():
    name, _ = prepare("0.gate_up", torch.randn(2 * 24, 5), panel_width=16)
    assert name == "0.gate_up.across"


@pytest.mark.parametrize("name", ["embed", "norm", "0.router"])
def test_what_is_no_dense_linear_stays_for_compiled_ops(name):
    weight = torch.randn(64, 5)
    assert prepare(name, weight, panel_width=16) == (name, weight)


def test_a_wide_linear_stays_as_it_is():
    weight = torch.randn(2049, 8)
    assert prepare("0.qkv", weight) == ("0.qkv", weight)


def test_norms_and_embeddings_stay_as_they_are():
    weight = torch.randn(16)
    assert prepare("0.ffn_norm", weight) == ("0.ffn_norm", weight)
    assert prepare("embed", weight) == ("embed", weight)


def test_views_have_the_plain_name_and_the_shape_of_the_decoder():
    weight = torch.randn(6, 4)
    name, view = view_of(*prepare("0.o", weight))
    assert (name, view.shape) == ("0.o", weight.shape)
    assert torch.equal(view, weight)
    name, view = view_of(*prepare("0.gate_up", torch.randn(1024, 256)))
    assert (name, view.dim()) == ("0.gate_up", 3)
