"""What the tasks of a large plan hand to each other and to the driver; all of it is frozen."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from raybatch.config import PlanConfig
from raybatch.policy.cost.work import WorkTotals
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.load import Floats, Ints
from raybatch.prefix.outline import TreeBox
from raybatch.prefix.plan import is_worth_ordering
from raybatch.prefix.profile import InputProfile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PieceSummary:
    """What the driver keeps of one piece of the source.

    Args:
        num_rows: of the piece.
        num_keys: block keys of all of them.
        unasked: rows that no engine sees, by class of error, or "filtered".
        sample: keys of some rows.
        contents: digest of what decides the results of its rows.
        adapters: uint64 [A], different ones that its rows name, 0 for none; empty where the stage
            has none.
    """

    num_rows: int
    num_keys: int
    unasked: Counter[str]
    sample: BlockKeys
    contents: str
    adapters: npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartSummary:
    """What the driver keeps of one part.

    Args:
        num_rows: that are still to be generated.
        profile: of all rows of the part.
        work: that they make in groups.
        work_alone: that they make in the order of the input.
        boxes: their prefix tree, to be drawn.
        values: float64 [n], some of the values by which entries are ordered.
        weights: int64 [n], rows that each of them stands for.
        probe: int64 [m], numbers of the rows to generate first, where lengths are to be probed.
    """

    num_rows: int
    profile: InputProfile
    work: WorkTotals
    work_alone: WorkTotals
    boxes: Sequence[TreeBox]
    values: Floats
    weights: Ints
    probe: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArrangedPart:
    """A part in its own order; stays in the object store.

    Args:
        row: int64 [R], number in the source of each row, by rank inside the part.
        group_id: int64 [R], numbered inside the part; -1 for a row that is alone.
        prefix_len: int32 [R].
        expected: float64 [R], output to expect of each row; NaN where nothing is known.
        entry_rows: int64 [E], rows of each entry.
        values: float64 [E], rising; what entries of different parts are ordered by.
        adapters: uint64 [E], of each entry; None where the stage has none.
    """

    row: Ints
    group_id: Ints
    prefix_len: npt.NDArray[np.int32]
    expected: Floats
    entry_rows: Ints
    values: Floats
    adapters: npt.NDArray[np.uint64] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangeJob:
    """What `arrange` needs beside the rows.

    Args:
        plan: options.
        dedup: identical rows are generated once.
        num_rows: of the whole source.
        num_parts: of the plan.
    """

    plan: PlanConfig
    dedup: bool
    num_rows: int
    num_parts: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbedRows:
    """Rows that were generated before the plan.

    Args:
        row: int64 [n], their numbers in the source, rising.
        lengths: float64 [n], tokens that each generated; NaN after an error.
    """

    row: Ints
    lengths: Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LargePlan:
    """A plan whose rows lie in the object store; what is here does not grow with their number.

    Args:
        pieces: of the source, in order.
        tables: references to what is known of the rows of each piece; none after a run, nor of
            `rows` and `arranged`.
        parts: that were planned apart.
        rows: for each part references to its rows, piece by piece.
        arranged: references to the parts in their own order.
        probed: rows that were generated before the plan.
    """

    pieces: Sequence[PieceSummary]
    tables: Sequence[Any]
    parts: Sequence[PartSummary]
    rows: Sequence[Sequence[Any]]
    arranged: Sequence[Any]
    probed: ProbedRows

    @property
    def num_rows(self) -> int:
        """Rows of the source."""
        return sum(piece.num_rows for piece in self.pieces)

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.pieces[0].sample.block_size

    @property
    def profile(self) -> InputProfile:
        """What the input is made of."""
        unasked = sum((piece.unasked for piece in self.pieces), Counter())
        merged = InputProfile.merge([part.profile for part in self.parts])
        return replace(merged, num_rows=self.num_rows, unasked=dict(unasked))

    @property
    def logical_tokens(self) -> int:
        """Prompt tokens of the rows that engines see."""
        return sum(part.profile.tree.logical_tokens for part in self.parts)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that engines compute when every shared prefix runs once."""
        return sum(part.profile.computed_tokens for part in self.parts)

    @property
    def saved_fraction(self) -> float:
        """Share of the prompt tokens that engines do not compute."""
        return max(0.0, 1 - self.computed_tokens / max(1, self.logical_tokens))

    def is_reordered(self, plan: PlanConfig) -> bool:
        """Return whether rows run in another order than that of the input."""
        adapters = np.unique(np.concatenate([piece.adapters for piece in self.pieces]))
        return is_worth_ordering(self.saved_fraction, plan, has_adapters=len(adapters) > 1)

    @property
    def piece_rows(self) -> Ints:
        """Number of the first row of each piece, and of all rows: int64 [T + 1]."""
        return np.cumsum([0, *(piece.num_rows for piece in self.pieces)])
