import pytest
import torch
from torch.nn import functional

from raybatch.kernels import dispatch, linear
from raybatch.kernels.byte_numbers import quantise_weight, weight_scales
from raybatch.kernels.linear import Linear, embed_tokens
from raybatch.kernels.native import linears
from raybatch.kernels.native.linears import PANEL_WIDTH, compiled_linears
from tests import tolerances

# of the longest product, or of two of an MLP
TOLERANCE = tolerances.of_sums(torch.float32, 512)

BYTES = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=["torch", "compiled"])
def ops_for(request):
    """Return the three ops of linears in one form, given the dtype of weights that are bytes."""

    def find(byte_dtype=None):
        if request.param == "torch":
            return dispatch.REFERENCE
        found = compiled_linears(byte_dtype)
        if found is None:
            pytest.skip("no C compiler here")
        return found

    return find


@pytest.fixture
def ops(ops_for):
    return ops_for()


def made(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


def in_panels(weight, bias=None, scales=None):
    """Return a weight [out, in] as a linear in panels."""
    num_outputs = len(weight)
    filled = functional.pad(weight, (0, 0, 0, -num_outputs % PANEL_WIDTH))
    panels = filled.view(-1, PANEL_WIDTH, weight.shape[1]).mT.contiguous()
    return Linear(panels, num_outputs, bias, scales)


def as_matrix(weight, bias=None, scales=None):
    return Linear(weight, len(weight), bias, scales)


def assert_close(found, expected):
    tolerances.assert_close(found, expected, TOLERANCE)


# 1 to 8 rows take all ways through the kernel
@pytest.mark.parametrize("form", [as_matrix, in_panels])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 8, 9, 23])
@pytest.mark.parametrize("num_outputs", [1, 31, 32, 33, 96])
def test_a_linear_gives_what_torch_gives(ops, form, num_rows, num_outputs):
    x, weight, bias = made(num_rows, 13), made(num_outputs, 13), made(num_outputs)
    for own in (None, bias):
        found = ops.linear(x, form(weight, own))
        assert_close(found, functional.linear(x, weight, own))


@pytest.mark.parametrize("form", [as_matrix, in_panels])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_linear_is_added_to_what_is_there(ops, form, num_rows):
    x, hidden, weight, bias = made(num_rows, 40), made(num_rows, 6), made(40, 6), made(40)
    expected = x + functional.linear(hidden, weight, bias)
    ops.add_linear_(x, hidden, form(weight, bias))
    assert_close(x, expected)


@pytest.mark.parametrize("form", [as_matrix, in_panels])
def test_rows_may_lie_apart(ops, form):
    wide, weight = made(9, 50), made(40, 13)
    x = wide[:, 20:33]
    assert_close(ops.linear(x, form(weight)), functional.linear(x, weight))
    target = made(9, 60)
    expected = target.clone()
    expected[:, 3:43] += functional.linear(x, weight)
    ops.add_linear_(target[:, 3:43], x, form(weight))
    assert_close(target, expected)


def test_columns_that_lie_apart_go_to_torch(ops):
    x, weight = made(13, 9).t(), made(40, 13)
    assert_close(ops.linear(x, in_panels(weight)), functional.linear(x, weight))


@pytest.mark.parametrize("form", [as_matrix, in_panels])
@pytest.mark.parametrize("max_rows", [2, 1024])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_mlp_adds_its_output_in_chunks_of_rows(ops, form, max_rows, has_bias, monkeypatch):
    for module in (linear, linears):
        monkeypatch.setattr(module, "_MAX_ROWS", max_rows)
    x, hidden = made(5, 6), made(5, 6)
    gate_up, down = made(64, 6), made(6, 32)
    biases = (made(64), made(6)) if has_bias else (None, None)
    gate, up = functional.linear(hidden, gate_up, biases[0]).chunk(2, dim=-1)
    expected = x + functional.linear(functional.silu(gate) * up, down, biases[1])
    ops.add_mlp_(x, hidden, form(gate_up, biases[0]), form(down, biases[1]))
    assert_close(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, *BYTES])
def test_a_row_is_the_same_in_any_company(dtype):
    found = compiled_linears(None if dtype == torch.float32 else dtype)
    if found is None:
        pytest.skip("no C compiler here")
    x, weight = made(23, 130), made(96, 130)
    layer = in_panels(weight)
    if dtype != torch.float32:
        scales = weight_scales(weight, dtype)
        layer = in_panels(quantise_weight(weight, scales, dtype), scales=scales)
    alone = torch.cat([found.linear(row, layer) for row in x.split(1)])
    assert torch.equal(found.linear(x, layer), alone)


@pytest.mark.parametrize("num_rows", [1, 3, 9])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e30])
@pytest.mark.parametrize("dtype", BYTES)
def test_large_rows_stay_finite(ops_for, dtype, size, num_rows):
    weight = made(70, 13)
    weight[:, 4] = 0.0
    scales = weight_scales(weight, dtype)
    values = quantise_weight(weight, scales, dtype)
    x = made(num_rows, 13) * size
    expected = functional.linear(x, values.float() * scales[:, None])
    found = ops_for(dtype).linear(x, in_panels(values, scales=scales))
    tolerances.assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("form", [as_matrix, in_panels])
@pytest.mark.parametrize("outputs", [slice(0, 40), slice(32, 96), slice(64, 70), slice(0, 96)])
def test_some_outputs_of_a_linear_are_those_of_the_whole(ops, form, outputs):
    x, layer = made(5, 13), form(made(96, 13), made(96))
    assert_close(ops.linear(x, layer.take(outputs)), ops.linear(x, layer)[:, outputs])


def test_panels_are_cut_only_where_they_meet():
    layer = in_panels(made(96, 13))
    assert (layer.can_start_at(32), layer.can_start_at(40)) == (True, False)
    with pytest.raises(ValueError, match=r"in panels of 32 .* 40"):
        layer.take(slice(40, 96))
    assert as_matrix(made(96, 13)).can_start_at(40)


def test_tokens_are_embedded_from_rows_and_from_panels():
    table, token_ids = made(70, 6), torch.tensor([0, 31, 32, 69, 0])
    expected = table[token_ids]
    assert torch.equal(embed_tokens(token_ids, table), expected)
    assert torch.equal(embed_tokens(token_ids, in_panels(table).weight), expected)


def test_broken_weights_are_seen(ops):
    gate_up, down = made(64, 6), made(6, 32)
    gate_up[3, 2] = torch.nan
    x = made(2, 6)
    ops.add_mlp_(x, made(2, 6), in_panels(gate_up), in_panels(down))
    assert x.isnan().all()


@pytest.mark.parametrize("form", [as_matrix, in_panels])
@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_weights_that_are_bytes_count_as_their_floats(ops_for, form, dtype, num_rows):
    x, bias = made(num_rows, 13), made(70)
    weight = made(70, 13)
    scales = weight_scales(weight, dtype)
    values = quantise_weight(weight, scales, dtype)
    expected = functional.linear(x, values.float() * scales[:, None], bias)
    assert_close(ops_for(dtype).linear(x, form(values, bias, scales)), expected)
    taken = form(values, bias, scales).take(slice(32, 66))
    assert_close(ops_for(dtype).linear(x, taken), expected[:, 32:66])


@pytest.mark.parametrize("form", [as_matrix, in_panels])
@pytest.mark.parametrize("dtype", BYTES)
def test_an_mlp_of_bytes_counts_as_its_floats(ops_for, form, dtype):
    weights, biases = (made(64, 6), made(6, 32)), (made(64), made(6))
    x, hidden = made(9, 6), made(9, 6)
    layers, floats = [], []
    for weight, bias in zip(weights, biases, strict=True):
        scales = weight_scales(weight, dtype)
        values = quantise_weight(weight, scales, dtype)
        layers.append(form(values, bias, scales))
        floats.append(as_matrix(values.float() * scales[:, None], bias))
    expected = x.clone()
    dispatch.REFERENCE.add_mlp_(expected, hidden, *floats)
    ops_for(dtype).add_mlp_(x, hidden, *layers)
    assert_close(x, expected)


def test_every_number_of_fp8_is_read_as_torch_reads_it(ops_for):
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()]
    layer = in_panels(numbers[:, None], scales=torch.ones(len(numbers)))
    found = ops_for(torch.float8_e4m3fn).linear(torch.ones(1, 1), layer)
    assert torch.equal(found[0], numbers.float())
