import math

import pytest
import torch
from torch.nn import functional

from raybatch.kernels.small_ops import interleave_order, rms_norm, rotate_, rotation_table
from tests import tolerances


def test_rms_norm_scales_rows_to_the_weight():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 33), torch.rand(33)
    expected = functional.rms_norm(x, (33,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)


def test_rms_norm_of_a_zero_row_is_zero():
    assert torch.equal(torch.zeros(2, 8), rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6))


def test_rms_norm_computes_half_precision_in_float32():
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(torch.ones_like(x), rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6))


def test_rms_norm_takes_a_weight_per_head():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, 8), torch.rand(3, 8)
    for head in range(3):
        expected = functional.rms_norm(x[:, head], (8,), weight[head], 1e-6)
        torch.testing.assert_close(rms_norm(x, weight, 1e-6)[:, head], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_the_form_with_halves(dtype):
    torch.manual_seed(0)
    head_dim = 10
    x = torch.randn(7, 3, head_dim).to(dtype)
    frequencies = torch.rand(head_dim // 2)
    positions = torch.arange(7) * 13
    angles = (positions[:, None] * frequencies)[:, None]
    first, second = x.float().chunk(2, dim=-1)
    expected = torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    )
    order = interleave_order(head_dim)
    turned = x[..., order]
    rotate_(turned, rotation_table(positions, frequencies, 1.0))
    # angles are up to 80, so their rounding is that of as many numbers of 1
    tolerance = tolerances.of_output(dtype, 80)
    tolerances.assert_close(turned.float(), expected[..., order], tolerance)


def test_rotation_works_in_place_on_a_slice_of_a_wider_tensor():
    fused = torch.ones(2, 5, 4)
    rotate_(fused[:, :3], rotation_table(torch.tensor([0, 1]), torch.ones(2), 1.0))
    assert torch.equal(torch.ones(2, 2, 4), fused[:, 3:])
    assert fused[1, 0, 0].item() == pytest.approx(math.cos(1) - math.sin(1))


def test_the_attention_factor_scales_the_rotation():
    x = torch.ones(1, 1, 2)
    rotate_(x, rotation_table(torch.tensor([0]), torch.ones(1), 0.5))
    assert torch.equal(torch.full((1, 1, 2), 0.5), x)


def test_interleaving_puts_the_halves_side_by_side():
    assert interleave_order(6).tolist() == [0, 3, 1, 4, 2, 5]
