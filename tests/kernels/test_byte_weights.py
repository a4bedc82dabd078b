import pytest
import torch

from raybatch.kernels.byte_numbers import (
    BYTE_DTYPES,
    dequantise_weight,
    quantise_weight,
    weight_scales,
)


@pytest.fixture(params=list(BYTE_DTYPES))
def dtype(request):
    return BYTE_DTYPES[request.param]


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def back(weight, dtype):
    scales = weight_scales(weight, dtype)
    return dequantise_weight(quantise_weight(weight, scales, dtype), scales, torch.float32)


def test_the_largest_weight_of_each_output_is_kept(dtype):
    weight = made(5, 40) * torch.tensor([1e-3, 1.0, 7.0, 1e4, 0.3])[:, None]
    rows = torch.arange(5)
    largest = weight.abs().argmax(dim=1)
    torch.testing.assert_close(back(weight, dtype)[rows, largest], weight[rows, largest])


def test_weights_have_an_error_of_half_a_step_at_most(dtype):
    weight = made(6, 200)
    largest = weight.abs().amax(dim=1, keepdim=True)
    # int8 has 127 equal steps; e4m3 has three mantissa bits, and is subnormal below 2^-6
    step = torch.full_like(weight, 1 / 127) * largest
    if dtype == torch.float8_e4m3fn:
        step = torch.maximum(weight.abs() / 8, largest / 448 * 2.0**-9)
    assert ((back(weight, dtype) - weight).abs() <= step / 2 * 1.001).all()


def test_an_output_of_zeros_stays_one(dtype):
    weight = torch.zeros(2, 8)
    assert torch.equal(back(weight, dtype), weight)
    assert torch.equal(weight_scales(weight, dtype), torch.ones(2))


def test_experts_have_separate_scales(dtype):
    experts = made(3, 5, 40)
    scales = weight_scales(experts, dtype)
    values = quantise_weight(experts, scales, dtype)
    assert scales.shape == (3, 5)
    for e in range(3):
        assert torch.equal(
            dequantise_weight(values[e], scales[e], torch.float32), back(experts[e], dtype)
        )


def test_broken_weights_stay_broken(dtype):
    weight = made(2, 8)
    weight[1, 3] = torch.nan
    assert back(weight, dtype)[1].isnan().all()
    assert not back(weight, dtype)[0].isnan().any()


def test_panels_may_be_larger_than_the_number_of_outputs(dtype):
    weight = made(5, 6)
    scales = weight_scales(weight, dtype)
    values = quantise_weight(weight, scales, dtype)
    filled = torch.cat([values.float(), torch.zeros(3, 6)]).to(dtype)
    panels = filled.view(2, 4, 6).mT.contiguous()
    floats = dequantise_weight(panels, scales, torch.float32).mT.flatten(0, 1)
    assert torch.equal(floats[:5], back(weight, dtype))
    assert torch.equal(floats[5:], torch.zeros(3, 6))
