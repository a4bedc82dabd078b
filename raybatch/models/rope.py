"""Rotary position embedding of a model: its options in config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raybatch.errors import ConfigError
from raybatch.models.json_files import SAME_MODEL, JsonValues

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Options of rotary position embedding; those after `factor` are read by one kind each.

    Args:
        factor: how much longer than the original context the model runs.
        original_max_positions: context of the first training (llama3, yarn).
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


def read_rope(config: JsonValues, *, max_positions: int) -> tuple[RopeSpec, int]:
    """Return the options in a parsed config.json and the longest context they allow.

    Both the keys of transformers 5 (`rope_parameters`) and the older `rope_theta` and
    `rope_scaling` are read.

    Raises:
        ConfigError: a kind of scaling that the engine does not have, or no number where one is
            needed.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"{config.where}: the options of RoPE must be an object, got {scaling!r}")
    # a value that is null is one that is left out
    set_options = {key: value for key, value in scaling.items() if value is not None}
    options = JsonValues(set_options, config.where)
    kind: Any = options.get("rope_type", options.get("type", "default"))
    if kind not in get_args(RopeType):
        raise ConfigError(
            f"{config.where}: rope type {kind!r} is not supported by the native engine, "
            f"only {', '.join(get_args(RopeType))}; {SAME_MODEL}"
        )
    if any(values.get("partial_rotary_factor") not in (None, 1) for values in (config, options)):
        raise ConfigError(
            f"{config.where}: partial_rotary_factor other than 1 is not supported by the native "
            f"engine; {SAME_MODEL}"
        )
    # the top-level key wins in transformers, for checkpoints that carry it beside the options
    key = "original_max_position_embeddings"
    has_own = config.get(key) is not None
    original = (config if has_own else options).size(key, max_positions)
    factor = options.number("factor", max_positions / original if kind == "yarn" else 1.0)
    has_theta = "rope_theta" in set_options or config.get("rope_theta") is None
    theta = (options if has_theta else config).number("rope_theta", 10000.0)
    spec = RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=options.number("low_freq_factor", 1.0),
        high_freq_factor=options.number("high_freq_factor", 4.0),
        beta_fast=options.number("beta_fast", 32.0),
        beta_slow=options.number("beta_slow", 1.0),
        truncate=bool(options.get("truncate", True)),
        attention_factor=_attention_factor(options, factor) if kind == "yarn" else 1.0,
    )
    longest = int(original * factor) if kind == "yarn" else max_positions
    return spec, max(max_positions, longest)


def _attention_factor(options: JsonValues, factor: float) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if options.get("attention_factor") is not None:
        return options.number("attention_factor", 1.0)
    mscale, mscale_all = (
        options.number(key, 0.0, may_be_zero=True) for key in ("mscale", "mscale_all_dim")
    )
    if mscale and mscale_all:
        return scale(mscale) / scale(mscale_all)
    return scale(1.0)
