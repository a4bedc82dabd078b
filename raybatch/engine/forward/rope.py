"""Frequencies of rotary embeddings (RoPE), by scaling method."""

import math

import torch

from raybatch.models.config import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32 [D / 2].

    Source: the definitions of YaRN (arXiv:2309.00071) and of Llama 3.1, with the constants that
    transformers uses.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = spec.theta**exponents
    plain = 1.0 / periods
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        turns = spec.original_max_positions * plain / (2 * math.pi)
        smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * plain / spec.factor + smooth * plain
    if spec.kind == "yarn":
        ramp = _yarn_ramp(spec, head_dim)
        return 1.0 / (spec.factor * periods) * ramp + plain * (1 - ramp)
    return plain


def _yarn_ramp(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the interpolation weight of each pair: 0 for high frequencies, 1 for low ones."""

    def dimension_of(turns: float) -> float:
        ratio = spec.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return ramp.clamp(0, 1)
