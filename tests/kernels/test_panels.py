import pytest
import torch
from torch.nn import functional

from raybatch.kernels.linear import gated_linear, times_weight


def in_panels(weight: torch.Tensor, width: int) -> torch.Tensor:
    return weight.view(-1, width, weight.shape[1]).mT.contiguous()


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_panels_give_what_the_matrix_gives(num_rows):
    torch.manual_seed(0)
    rows, weight = torch.randn(num_rows, 6), torch.randn(12, 6)
    torch.testing.assert_close(
        times_weight(rows, in_panels(weight, 4)), functional.linear(rows, weight)
    )


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_gated_panels_give_what_the_matrix_gives(has_bias):
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 6), torch.randn(16, 6)
    bias = torch.randn(16) if has_bias else None
    gate, up = functional.linear(rows, weight, bias).chunk(2, dim=-1)
    for form in (weight, in_panels(weight, 4)):
        actual = gated_linear(rows, form, bias)
        torch.testing.assert_close(actual, functional.silu(gate) * up)
