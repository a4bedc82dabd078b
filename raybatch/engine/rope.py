"""Rotary position embedding of a model: its options in config.json and its frequencies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from raybatch.errors import ConfigError

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Options of rotary position embedding; those after `factor` are read by one kind each.

    Args:
        kind: how frequencies are changed for long contexts.
        theta: base of the frequencies.
        factor: how much longer than the original context the model runs.
        original_max_positions: context of the first training (llama3, yarn).
        low_freq_factor: llama3.
        high_freq_factor: llama3.
        beta_fast: yarn.
        beta_slow: yarn.
        truncate: yarn rounds the bounds of its ramp to whole dimensions.
        attention_factor: cos and sin are scaled by it (yarn).
    """

    kind: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(config: Mapping[str, Any], *, max_positions: int) -> tuple[RopeSpec, int]:
    """Return the options in a parsed config.json and the longest context they allow.

    Both the keys of transformers 5 (`rope_parameters`) and the older `rope_theta` and
    `rope_scaling` are read.

    Raises:
        ConfigError: a kind of scaling that the engine does not have.
    """
    options = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind: Any = options.get("rope_type", options.get("type", "default"))
    if kind not in get_args(RopeType):
        raise ConfigError(
            f"config.json: rope type {kind!r} is not supported, "
            f"only {', '.join(get_args(RopeType))}"
        )
    if options.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported")
    # the top-level key wins in transformers, for checkpoints that carry it beside the options
    key = "original_max_position_embeddings"
    original = config.get(key) or options.get(key) or max_positions
    factor = options.get("factor")
    if factor is None:
        factor = max_positions / original if kind == "yarn" else 1.0
    theta = options.get("rope_theta") or config.get("rope_theta") or 10000.0
    spec = RopeSpec(
        kind=kind,
        theta=float(theta),
        factor=float(factor),
        original_max_positions=int(original),
        low_freq_factor=float(options.get("low_freq_factor", 1.0)),
        high_freq_factor=float(options.get("high_freq_factor", 4.0)),
        beta_fast=float(options.get("beta_fast") or 32),
        beta_slow=float(options.get("beta_slow") or 1),
        truncate=bool(options.get("truncate", True)),
        attention_factor=_attention_factor(options, float(factor)) if kind == "yarn" else 1.0,
    )
    if kind == "yarn":
        return spec, max(max_positions, int(original * factor))
    return spec, max_positions


def _attention_factor(options: Mapping[str, Any], factor: float) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    explicit = options.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, mscale_all = options.get("mscale"), options.get("mscale_all_dim")
    if mscale and mscale_all:
        return scale(mscale) / scale(mscale_all)
    return scale(1.0)


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
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        ramp = _yarn_ramp(spec, head_dim)
        return 1.0 / (spec.factor * periods) * ramp + plain * (1 - ramp)
    return plain


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    turns = spec.original_max_positions * plain / (2 * math.pi)
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / spec.factor + smooth * plain


def _yarn_ramp(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return for each pair how much it is interpolated: 0 for fast turning ones, 1 for slow."""

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
