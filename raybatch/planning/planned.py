"""Records of planning: a run with its source and plan, and what tasks of a large plan exchange."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.inputs.source import Source
from raybatch.planning.fingerprint import InputFile
from raybatch.planning.stored import PlanSubject, StoredPlan
from raybatch.policy.cost.work import WorkTotals, work_totals
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.order import DEFAULT_CAPACITY, EngineCapacity
from raybatch.prefix.outline import TreeBox
from raybatch.prefix.plan import Arrangement, RowPlan, is_worth_ordering
from raybatch.prefix.profile import InputProfile
from raybatch.records.arrays import Bools, Floats, Ints, Uint64s
from raybatch.records.types import TokenIds
from raybatch.rows.options import StageConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedInput:
    """The rows that engines will see, in input order, and their plan; arrays are read only."""

    keys: BlockKeys
    asked: Ints  # [A], positions of the rows among all rows of the source
    num_rows: int
    max_tokens: Ints  # [A], longest output over all samples
    expected_tokens: Floats  # [A], output to expect over all samples
    # rows that no engine sees: class of their error, or "filtered", to their number
    unasked: Mapping[str, int]
    plan: RowPlan
    whole: RowPlan  # plan of all rows of the source
    arrangement: Arrangement
    prompts: Sequence[TokenIds] | None = None  # their token ids, where they are in memory
    is_probed: bool = False  # `expected_tokens` come from rows that were generated before the plan


class UnitRunner(Protocol):
    """Generates the rows of a run and writes them, unit by unit.

    Rows are tables, one after the other, or a dataset of Ray where the runner is not local.
    """

    @property
    def is_local(self) -> bool:
        """Whether it runs in this process, without Ray."""

    def todo(self, stored: StoredPlan, planned: "PlannedInput | LargePlan | None") -> Bools:
        """Return which units of a plan are to be run, bool [units].

        They are not written yet; `planned` is what is known of the rows, None for nothing.
        """

    def run(self, stored: StoredPlan, rows: Any) -> None:  # noqa: ANN401 - Ray has no types
        """Generate and write rows with the columns of `raybatch.rows.plan_columns`."""

    def collect(self, rows: Sequence[pa.Table]) -> pa.Table:
        """Generate rows before there is a plan; return them as the journal has them."""

    def keep(self, stored: StoredPlan, units: Ints, finished: pa.Table) -> None:
        """Write finished rows, each to its unit, or to the journal where a unit is not complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """What a run and its plan are about."""

    source: Source  # with at least one row
    config: StageConfig  # of the stage, with the id column of the run
    plan: PlanConfig
    sink: str
    row_id_column: str | None  # column to make for ids; None where the user has one
    units: UnitRunner | None = None  # runs the plan; None where it is only made
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[InputFile] = ()
    partition_by: tuple[str, ...] = ()  # columns of the source by which the output is laid out
    number: int = 1  # of the plan among those of the output, from 1
    first_unit: int = 0  # number in the output of the plan's first unit

    @property
    def subject(self) -> PlanSubject:
        return PlanSubject(
            options=asdict(self.plan),
            files=tuple(self.files),
            fingerprint=self.fingerprint,
            source=self.source.root,
            model=self.config.model,
            partition_by=self.partition_by,
            number=self.number,
            first_unit=self.first_unit,
            skipped=self.source.skipped,
            partition_types=tuple(
                str(kind.value_type if pa.types.is_dictionary(kind) else kind)
                for kind in (self.source.schema.field(name).type for name in self.partition_by)
            ),
        )

    @property
    def runner(self) -> UnitRunner:
        assert self.units is not None, "this plan is not to be run"
        return self.units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PieceSummary:
    """What the driver keeps of one piece of the source."""

    num_rows: int
    num_keys: int
    unasked: Counter[str]  # rows that no engine sees, by class of error, or "filtered"
    sample: BlockKeys
    contents: str  # digest of what decides the results of its rows
    # different ones that its rows name, 0 for none; empty where the stage has none
    adapters: Uint64s  # [A]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartSummary:
    """What the driver keeps of one part."""

    num_rows: int
    profile: InputProfile
    work: WorkTotals
    work_alone: WorkTotals  # that its rows make in the order of the input
    boxes: Sequence[TreeBox]
    values: Floats  # [n], some of the values by which entries are ordered
    weights: Ints  # [n], rows that each of them stands for
    probe: Ints  # [m], numbers of the rows to generate first, where lengths are to be probed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArrangedPart:
    """A part in its own order; stays in the object store."""

    row: Ints  # [R], number in the source of each row, by rank inside the part
    group_id: Ints  # [R], numbered inside the part; -1 for a row that is alone
    prefix_len: npt.NDArray[np.int32]  # [R]
    expected: Floats  # [R], output to expect; NaN where nothing is known
    entry_rows: Ints  # [E], rows of each entry
    values: Floats  # [E], rising; entries of different parts are ordered by them
    adapters: Uint64s | None  # [E], None where the stage has none


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangeJob:
    plan: PlanConfig
    dedup: bool
    num_rows: int
    num_parts: int
    capacity: EngineCapacity = DEFAULT_CAPACITY


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbedRows:
    row: Ints  # [n], numbers in the source, rising
    lengths: Floats  # [n], tokens that each generated; NaN after an error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LargePlan:
    """A plan whose rows lie in the object store; what is here does not grow with their number."""

    pieces: Sequence[PieceSummary]
    # references to what is known of the rows of each piece; none after a run, nor of `rows` and
    # `arranged`
    tables: Sequence[Any]
    parts: Sequence[PartSummary]
    rows: Sequence[Sequence[Any]]  # for each part references to its rows, piece by piece
    arranged: Sequence[Any]  # references to the parts in their own order
    probed: ProbedRows  # rows that were generated before the plan

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)

    @property
    def block_size(self) -> int:
        return self.pieces[0].sample.block_size

    @property
    def profile(self) -> InputProfile:
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
        return max(0.0, 1 - self.computed_tokens / max(1, self.logical_tokens))

    def is_reordered(self, plan: PlanConfig) -> bool:
        adapters = np.unique(np.concatenate([piece.adapters for piece in self.pieces]))
        return is_worth_ordering(self.saved_fraction, plan, has_adapters=len(adapters) > 1)

    @property
    def piece_rows(self) -> Ints:
        """Number of the first row of each piece, and of all rows: int64 [T + 1]."""
        return np.cumsum([0, *(piece.num_rows for piece in self.pieces)])


def planned_work(
    keys: BlockKeys,
    expected_tokens: Floats,
    arrangement: Arrangement,
    *,
    is_grouped: bool,
    chosen: Bools | None = None,
) -> WorkTotals:
    """Return the work of rows whose shared prefixes run once each; copies are no work.

    Where rows are not grouped, each computes its whole prompt. `chosen` rows run alone, bool [A].
    """
    groups = arrangement.groups
    is_run = groups.representative == np.arange(keys.num_rows)
    rows = np.flatnonzero(is_run if chosen is None else is_run & chosen)
    num_tokens, outputs = keys.num_tokens[rows], expected_tokens[rows]
    if not is_grouped:
        return work_totals(num_tokens, outputs)
    group = groups.group_id[rows]
    shared = np.minimum(groups.prefix_tokens[rows].astype(np.int64), num_tokens - 1)
    members = np.bincount(group[group >= 0], minlength=groups.num_groups)
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(group, return_index=True)[1]] = True
    num_members = np.ones(len(rows), np.int64)
    num_members[group >= 0] = members[group[group >= 0]]
    return work_totals(
        num_tokens,
        outputs,
        cached_tokens=np.where(is_first | (group < 0), 0, shared),
        shared_tokens=shared,
        num_members=num_members,
    )
