"""What the groups of a plan cost: token counts per group.

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
