"""What the groups of a plan cost: token counts per group, and compute per byte of KV that is read.

A row that shares nothing is a group of one. Nothing here knows which rows a group holds.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLoad:
    """Token counts of all groups; arrays are int64 or float64 [G], read only.

    Args:
        prefix_tokens: length of the prefix that the group's rows share, computed once.
        distinct_tokens: prompt tokens of all members beyond the prefix, summed.
        output_tokens: expected generated tokens of all members, summed; None where nothing is
            known about them.
    """

    prefix_tokens: Ints
    distinct_tokens: Ints
    num_rows: Ints
    output_tokens: Floats | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if values is None:
                continue
            if values.shape != self.num_rows.shape or values.ndim != 1:
                raise ConfigError(
                    f"{field.name} has shape {values.shape}, num_rows {self.num_rows.shape}; "
                    "both need one entry per group"
                )
            is_wrong = ~(values >= (1 if field.name == "num_rows" else 0))
            if is_wrong.any():
                group = int(np.argmax(is_wrong))
                raise ConfigError(f"{field.name} of group {group} is {values[group]}")

    def __len__(self) -> int:
        return len(self.num_rows)

    @property
    def prefill_tokens(self) -> Ints:
        """Prompt tokens that an engine computes per group when the prefix runs once."""
        return self.prefix_tokens + self.distinct_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class DensityModel:
    """The part of a model and its device that decides what a token costs.

    Args:
        flops_per_s: achieved, not peak.
        bytes_per_s: achieved memory bandwidth.

    Source: BlendServe, arXiv:2411.16102, section 4. A shared prefix is counted once here, with its
    attention, where the paper scales the whole compute time by the share of saved tokens.
    """

    active_params: float
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: float
    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}={value} of the density model is not above 0")

    def compute_s(self, load: GroupLoad) -> Floats:
        """Return seconds of arithmetic per group, its prefix computed once."""
        per_row = load.distinct_tokens / load.num_rows
        prefix_squared = load.prefix_tokens.astype(float) ** 2
        prompt_squared = (load.prefix_tokens + per_row) ** 2
        pairs = prefix_squared + load.num_rows * (prompt_squared - prefix_squared)
        tokens = load.prefill_tokens + _outputs(load)
        attention = 4.0 * self.hidden_size * self.num_layers * pairs
        flops: Floats = 2.0 * self.active_params * tokens + attention
        return flops / self.flops_per_s

    def memory_s(self, load: GroupLoad) -> Floats:
        """Return seconds of reading the KV cache per group; every member reads its own prefix."""
        outputs = _outputs(load) / load.num_rows
        prompts = load.prefix_tokens + load.distinct_tokens / load.num_rows
        reads: Floats = load.num_rows * (prompts * outputs + outputs**2 / 2)
        return reads * (self.kv_bytes_per_token / self.bytes_per_s)


def _outputs(load: GroupLoad) -> Floats:
    # a row generates at least one token; without estimates all rows count as equal
    known = load.num_rows.astype(float)
    return known if load.output_tokens is None else load.output_tokens.clip(min=known)


REFERENCE_ROOFLINE = DensityModel(
    active_params=8e9,
    num_layers=32,
    hidden_size=4096,
    kv_bytes_per_token=131_072,
    flops_per_s=2.2e14,
    bytes_per_s=1.6e12,
)
