"""Records of planning: a run with its source and plan, the plan index, and summaries of tasks.

The plan index is what planning needs of the rows of a source, without the user's columns.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.actors.pool import row_keys
from raybatch.config import PlanConfig
from raybatch.errors import ConfigError
from raybatch.inputs.source import Source
from raybatch.planning.fingerprint import InputFile
from raybatch.planning.store import PlanSubject, StoredPlan
from raybatch.policy.cost.work import WorkTotals, work_totals
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.order import DEFAULT_CAPACITY, EngineCapacity
from raybatch.prefix.plan import Arrangement, RowSchedule, is_worth_ordering
from raybatch.prefix.profile import InputProfile
from raybatch.prefix.tree import SummaryBox
from raybatch.records.arrays import Bools, Floats, Ints, Uint64s
from raybatch.records.types import Sampling, TokenIds
from raybatch.rows.options import StageConfig
from raybatch.rows.prepare import POOLED, Prepared, is_deterministic, row_seed
from raybatch.rows.schema import error_class

# counted like an error class (which begins with a capital) for rows dropped on purpose
FILTERED = "filtered"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanIndex:
    """Data of rows for planning: prefix keys, output lengths and adapters.

    Rows are in input order; arrays are read only.
    """

    # of requested rows; the digest also depends on options that decide a result, and on the row
    # if its result is random
    keys: BlockKeys
    requested: Ints  # [A], positions of these rows among all rows described
    max_tokens: Ints  # [A], longest output over all samples
    expected_tokens: Floats
    num_rows: int
    adapters: Uint64s  # [A], id of the adapter of each of these rows; 0 for none
    # number of rows without a request, by class of error, or "filtered"
    skipped: Counter[str]

    @classmethod
    def concat(cls, parts: Sequence["PlanIndex"]) -> "PlanIndex":
        """Join the indexes of consecutive parts of the input, at least one."""
        firsts = np.cumsum([0, *(part.num_rows for part in parts)])
        return cls(
            keys=BlockKeys.concat([part.keys for part in parts]),
            requested=np.concatenate([part.requested + firsts[i] for i, part in enumerate(parts)]),
            max_tokens=np.concatenate([part.max_tokens for part in parts]),
            expected_tokens=np.concatenate([part.expected_tokens for part in parts]),
            num_rows=int(firsts[-1]),
            adapters=np.concatenate([part.adapters for part in parts]),
            skipped=sum((part.skipped for part in parts), Counter()),
        )

    @property
    def is_requested(self) -> Bools:
        is_requested = np.zeros(self.num_rows, np.bool_)
        is_requested[self.requested] = True
        return is_requested


def describe_rows(
    table: pa.Table, prepared: Prepared, *, block_size: int, expected_column: str | None
) -> PlanIndex:
    """Return the plan index of one row batch and its prepared requests.

    `prepared` has a request for every requested row, also for duplicates. The expected output
    length of a row is in `expected_column`; without one it is the row's `max_tokens`.

    Raises:
        ConfigError: the column is not numeric, or has a length below 0.
    """
    keys, adapters = row_keys(prepared.requests, block_size)
    requested = np.asarray(prepared.rows, np.int64)
    samplings = prepared.request_samplings
    max_tokens = np.array([s.max_tokens * s.n for s in samplings], np.int64)
    generates = np.array([s is not POOLED for s in samplings], np.int64)
    num_samples = np.array([s.n for s in samplings], np.int64)
    row_ids = [prepared.row_ids[row] for row in prepared.rows]
    reasons = (p.error or FILTERED for p in prepared.prompts if not p.is_requested)
    return PlanIndex(
        keys=replace(keys, digest=_result_keys(keys.digest, samplings, row_ids)),
        requested=requested,
        max_tokens=max_tokens * generates,
        # 1 without generation, so that short prompts come first
        expected_tokens=_expected(table, expected_column, prepared, max_tokens, num_samples),
        num_rows=table.num_rows,
        adapters=adapters,
        skipped=Counter(error_class(reason) for reason in reasons),
    )


def check_expected(schema: pa.Schema, column: str | None) -> None:
    """Raise ConfigError if a column of expected lengths is missing or not numeric."""
    if column is None:
        return
    if column not in schema.names:
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} is not in the source, whose columns are "
            f"{schema.names}"
        )
    kind = schema.field(column).type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not is_number and not pa.types.is_null(kind):
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} has type {kind}; it must have numbers of "
            "tokens, and null if unknown"
        )


def _result_keys(digest: Uint64s, samplings: Sequence[Sampling], row_ids: Sequence[str]) -> Uint64s:
    """Mix the other inputs of a result into the digest of each prompt."""
    texts = {sampling: repr(dataclasses.astuple(sampling)) for sampling in set(samplings)}
    known = {
        sampling: int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        for sampling, text in texts.items()
    }
    salts = [
        known[one] ^ (0 if is_deterministic(one) else row_seed(one.seed, row_id))
        for one, row_id in zip(samplings, row_ids, strict=True)
    ]
    return digest ^ np.array(salts, np.uint64)


def _expected(
    table: pa.Table, column: str | None, prepared: Prepared, max_tokens: Ints, num_samples: Ints
) -> Floats:
    """Return the expected output length of each row, at least 1 and at most its `max_tokens`."""
    limit = max_tokens.astype(float)
    if column is None:
        return limit
    check_expected(table.schema, column)
    values = pc.cast(table.column(column), pa.float64()).to_numpy()[list(prepared.rows)]
    is_wrong = (values < 0) | np.isinf(values)
    if is_wrong.any():
        row = prepared.rows[int(np.argmax(is_wrong))]
        row_id, value = prepared.row_ids[row], table.column(column)[row].as_py()
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} is {value} in row {row_id!r}; it must be a "
            "number of tokens, or null if unknown"
        )
    return np.clip(np.where(np.isnan(values), limit, values * num_samples), 1, limit)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedInput:
    """The requested rows of a source, in input order, and their plan; arrays are read only."""

    keys: BlockKeys
    requested: Ints  # [A], positions of the rows among all rows of the source
    num_rows: int
    max_tokens: Ints  # [A], longest output over all samples
    expected_tokens: Floats  # [A], expected output over all samples
    # number of rows without a request, by class of error, or "filtered"
    skipped: Mapping[str, int]
    plan: RowSchedule
    whole: RowSchedule  # plan of all rows of the source
    arrangement: Arrangement
    prompts: Sequence[TokenIds] | None = None  # their token ids, if in memory
    is_probed: bool = False  # `expected_tokens` come from a probe


class UnitRunner(Protocol):
    """Generates the rows of a run and writes them, unit by unit.

    The rows that `run` gets are an iterable of tables, or a Ray dataset if the runner is not local.
    """

    @property
    def is_local(self) -> bool:
        """Whether rows are generated in this process, without Ray."""

    def todo(self, stored: StoredPlan, planned: "PlannedInput | LargePlan | None") -> Bools:
        """Return for each unit of a plan whether to run it, bool [units]; False if it is written.

        `planned` is None if this run has read the plan from the sink instead of making it.
        """

    def run(self, stored: StoredPlan, rows: Any) -> None:  # noqa: ANN401 - Ray has no types
        """Generate and write answers for rows with the columns of `raybatch.rows.plan_columns`."""

    def collect(self, rows: Sequence[pa.Table]) -> pa.Table:
        """Generate answers before a plan is stored; return them in the schema of the journal."""

    def keep(self, stored: StoredPlan, units: Ints, finished: pa.Table) -> None:
        """Write finished rows to their units, or to the journal of a unit that is incomplete.

        `units` is the unit of each row, int64 [rows].
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """The input of planning and running: source, stage options, plan options, sink."""

    source: Source  # with at least one row
    config: StageConfig  # with the id column of the run
    plan: PlanConfig
    sink: str
    row_id_column: str | None  # column to create for ids; None if the user has one
    units: UnitRunner | None = None  # runs the plan; None for planning alone
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[InputFile] = ()
    partition_by: tuple[str, ...] = ()  # source columns that partition the output
    number: int = 1  # of the plan in the output, from 1
    first_unit: int = 0  # number in the output of the plan's first unit
    files_left: tuple[InputFile, ...] = ()  # that the next plan will have, see `PlanSubject`
    on_stored: Callable[[StoredPlan], None] = lambda _: None  # called before the plan's rows run

    @property
    def subject(self) -> PlanSubject:
        return PlanSubject(
            options={name: value for name, value in asdict(self.plan).items() if name != "shards"},
            files=tuple(self.files),
            fingerprint=self.fingerprint,
            source=self.source.root,
            model=self.config.model,
            partition_by=self.partition_by,
            number=self.number,
            first_unit=self.first_unit,
            files_left=self.files_left,
            skipped=self.source.skipped,
            partition_types=tuple(
                str(kind.value_type if pa.types.is_dictionary(kind) else kind)
                for kind in (self.source.schema.field(name).type for name in self.partition_by)
            ),
        )

    @property
    def runner(self) -> UnitRunner:
        assert self.units is not None, "this spec is for planning only"
        return self.units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PieceSummary:
    """Summary, for the driver, of one piece of the source: rows that one task describes."""

    num_rows: int
    num_keys: int
    skipped: Counter[str]  # rows without a request, by class of error, or "filtered"
    sample: BlockKeys
    contents: str  # digest of what decides the results of its rows
    # distinct adapters of its rows, 0 for none; empty if the stage has none
    adapters: Uint64s  # [A]
    has_prompts: bool = False  # the task returned its prompts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartSummary:
    """Summary, for the driver, of one part: rows of all pieces that one task plans."""

    num_rows: int
    profile: InputProfile
    work: WorkTotals
    work_alone: WorkTotals  # of its rows without sharing, in input order
    boxes: Sequence[SummaryBox]
    values: Floats  # [n], sampled values by which scheduling groups are ordered
    weights: Ints  # [n], rows that each of them represents
    probe: Ints  # [m], numbers of the rows to generate first if lengths are probed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArrangedPart:
    """The rows of one part in the order of its plan; stays in Ray's object store."""

    row: Ints  # [R], number in the source of each row, by rank inside the part
    group_id: Ints  # [R], numbered inside the part; -1 for a row in no group
    prefix_len: npt.NDArray[np.int32]  # [R]
    expected: Floats  # [R], expected output tokens; NaN if unknown
    sched_rows: Ints  # [E], rows of each scheduling group
    values: Floats  # [E], ascending; they order scheduling groups of different parts
    adapters: Uint64s | None  # [E], None if the stage has none


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangeJob:
    plan: PlanConfig
    dedup: bool
    num_rows: int
    num_parts: int
    capacity: EngineCapacity = DEFAULT_CAPACITY


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbedRows:
    row: Ints  # [n], numbers in the source, ascending
    lengths: Floats  # [n], tokens that each generated; NaN after an error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LargePlan:
    """A plan whose rows are in Ray's object store; driver memory is O(1) in rows."""

    pieces: Sequence[PieceSummary]
    # references to the described rows of each piece; emptied, like `rows` and `arranged`, after a
    # run
    tables: Sequence[Any]
    parts: Sequence[PartSummary]
    rows: Sequence[Sequence[Any]]  # references to the rows of each part, by piece
    arranged: Sequence[Any]  # references to the parts in their own order
    probed: ProbedRows  # rows that were generated before the plan
    # references to the prompts of each piece, as plan columns, by its first row
    prompts: Mapping[int, Any] = field(default_factory=dict)
    seconds: float = 0.0  # that it took to make it, until it is stored

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)

    @property
    def block_size(self) -> int:
        return self.pieces[0].sample.block_size

    @property
    def profile(self) -> InputProfile:
        skipped = sum((piece.skipped for piece in self.pieces), Counter())
        merged = InputProfile.merge([part.profile for part in self.parts])
        return replace(merged, num_rows=self.num_rows, skipped=dict(skipped))

    @property
    def saved_fraction(self) -> float:
        profile = self.profile
        return max(0.0, 1 - profile.computed_tokens / max(1, profile.tree.logical_tokens))

    def is_reordered(self, plan: PlanConfig) -> bool:
        adapters = np.unique(np.concatenate([piece.adapters for piece in self.pieces]))
        return is_worth_ordering(self.saved_fraction, plan, has_adapters=len(adapters) > 1)

    @property
    def piece_rows(self) -> Ints:
        """Number of the first row of each piece, then that of all rows: int64 [pieces + 1]."""
        return np.cumsum([0, *(piece.num_rows for piece in self.pieces)])


def planned_work(
    keys: BlockKeys,
    expected_tokens: Floats,
    arrangement: Arrangement,
    *,
    is_grouped: bool,
    chosen: Bools | None = None,
) -> WorkTotals:
    """Return the work of rows if each shared prefix is computed once; duplicates cost nothing.

    Unless `is_grouped`, each row computes its whole prompt. `chosen`, bool [A], are the rows to
    count; None counts all.
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
