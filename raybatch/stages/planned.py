"""A source and its plan: what `explain` reads and what a run follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.plan import Arrangement, RowPlan
from raybatch.types import TokenIds

__all__ = ["PlannedInput"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedInput:
    """The rows that engines will see, in input order, and their plan; arrays are read only.

    Args:
        keys: block keys.
        asked: int64 [A], positions of the rows among all rows of the source.
        num_rows: of the source.
        max_tokens: int64 [A], longest output over all samples.
        expected_tokens: float64 [A], output to expect over all samples.
        unasked: rows that no engine sees: class of their error, or "filtered", to their number.
        plan: of these rows.
        whole: plan of all rows of the source.
        found: what they share.
        prompts: their token ids, where they are in memory.
    """

    keys: BlockKeys
    asked: npt.NDArray[np.int64]
    num_rows: int
    max_tokens: npt.NDArray[np.int64]
    expected_tokens: npt.NDArray[np.float64]
    unasked: Mapping[str, int]
    plan: RowPlan
    whole: RowPlan
    found: Arrangement
    prompts: Sequence[TokenIds] | None = None
