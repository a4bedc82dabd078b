"""How far results may lie apart that are equal but for rounding: from type and work alone.

One rounding is off by half of `eps` of its type at most, relative to its result. Sums of n numbers
in two orders differ by the square root of n times that, as roundings go up as often as down; a few
times as much is allowed, because the largest of thousands of differences is looked at. None of this
depends on the processor: another one sums in another order, and no better or worse.
"""

import math

import torch

# the largest of some 10^5 differences is about five standard deviations away
_LARGEST = 6
# roundings of a layer that its output sees: norms, projections, rotation, scores, weights, their
# sum, gate, activation, product and two additions to the residual stream
_ROUNDINGS_OF_A_LAYER = 12


def eps_of(dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number of a type."""
    return torch.finfo(dtype).eps


def of_sums(dtype: torch.dtype, num_terms: int) -> float:
    """Return the tolerance of sums of `num_terms` numbers of size 1, relative to their size."""
    return _LARGEST * eps_of(dtype) * math.sqrt(num_terms)


def of_layers(dtype: torch.dtype, num_layers: int, num_terms: int = 1) -> float:
    """Return how far states, KV or logits may lie apart after layers, relative to their size.

    Args:
        dtype: of what is handed from op to op; sums inside of one are float32.
        num_layers: that numbers go through.
        num_terms: of the longest sum in `dtype`; 1 where sums are of a finer type.
    """
    return of_sums(dtype, num_layers * _ROUNDINGS_OF_A_LAYER * num_terms)


def of_output(dtype: torch.dtype, num_terms: int) -> float:
    """Return how far sums of float32 may lie apart, each rounded to `dtype` once."""
    sums = of_sums(torch.float32, num_terms)
    return sums if dtype == torch.float32 else sums + 2 * eps_of(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compare within a tolerance that is relative to the largest of the expected numbers."""
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * size)
