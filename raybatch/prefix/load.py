"""What the groups of a plan cost: token counts per group, and a price per token.

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
        num_rows: members, at least 1.
        output_tokens: expected generated tokens of all members, summed; None where nothing is
            known about them.

    Raises:
        ConfigError: arrays differ in length, a count is negative, or a group has no rows.
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
class TokenCost:
    """Price of one token, in any unit; only the ratio matters.

    Args:
        prefill: of one computed prompt token, above 0.
        decode: of one generated token, at least 0.

    Raises:
        ConfigError: a price is outside its range.
    """

    prefill: float = 1.0
    decode: float = 1.0

    def __post_init__(self) -> None:
        if not (self.prefill > 0 and self.decode >= 0):
            raise ConfigError(
                f"prefill={self.prefill} and decode={self.decode}: a prefill token costs more than "
                "0, a decode token at least 0"
            )

    def of_prefixes(self, load: GroupLoad) -> Floats:
        """Return the cost of each group's prefix, paid once per replica that gets a piece."""
        return self.prefill * load.prefix_tokens.astype(float)

    def of_members(self, load: GroupLoad) -> Floats:
        """Return the cost of each group's members without their prefix."""
        cost: Floats = self.prefill * load.distinct_tokens.astype(float)
        return cost if load.output_tokens is None else cost + self.decode * load.output_tokens
