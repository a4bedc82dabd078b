"""Commit units of a plan, and the counts of their rows."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from raybatch.errors import CommitError
from raybatch.records.arrays import Ints, Uint64s, mix64
from raybatch.records.types import TOKEN_COUNTS, TokenCounts

# protocol version of files in the store; others are refused
PROTOCOL = 1
# row ids listed per class of errors
NUM_ERROR_IDS = 3
_SUMMED = ("num_rows", *TOKEN_COUNTS, "num_asked", "num_copies", "special_rows", "special_tokens")
_BINNED = ("prompt_lengths", "output_lengths")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitUnit:
    """A commit unit: a fixed set of rows that is one part of the output."""

    number: int
    num_rows: int
    row_sum: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitPlan:
    """The units of a plan, for commits.

    Args:
        unit_rows: int64 [U], number of rows of each unit.
        row_sums: uint64 [U], `row_sum` of each unit.
        is_partitioned: the rows of a unit are in one file per value of some input columns.
        first_unit: number in the output of the first unit; 0 for its first plan.
        hashes: (first unit, hash) of each plan, if this joins several plans.
        rows_left: rows of the input that are in no plan yet.
    """

    hash: str
    unit_rows: Ints
    row_sums: Uint64s
    is_partitioned: bool = False
    first_unit: int = 0
    hashes: tuple[tuple[int, str], ...] = ()
    rows_left: int = 0

    def __post_init__(self) -> None:
        if len(self.unit_rows) != len(self.row_sums):
            raise CommitError(
                f"plan {self.hash} is damaged: it has {len(self.unit_rows)} unit sizes, but "
                f"{len(self.row_sums)} checksums of units; choose another folder"
            )

    @property
    def num_units(self) -> int:
        return len(self.unit_rows)

    @property
    def num_rows(self) -> int:
        return int(self.unit_rows.sum())

    def hash_of(self, number: int) -> str:
        if not self.hashes:
            return self.hash
        return self.hashes[bisect_right(self.hashes, number, key=lambda one: one[0]) - 1][1]

    def extends(self, other: object) -> bool:
        """Return whether this joins the plan with hash `other` and plans made after it."""
        return self.hash.startswith(f"{other}+")

    def unit(self, number: int) -> CommitUnit:
        """Return one unit of this plan; `number` counts from 0 in this plan."""
        return CommitUnit(
            number=self.first_unit + number,
            num_rows=int(self.unit_rows[number]),
            row_sum=int(self.row_sums[number]),
        )


def join_plans(plans: Sequence[UnitPlan]) -> UnitPlan:
    """Join the plans of an output, in the order of their creation."""
    if len(plans) == 1:
        return plans[0]
    starts = np.cumsum([0, *(plan.num_units for plan in plans)]).tolist()
    if [plan.first_unit for plan in plans] != starts[:-1]:
        raise CommitError(
            f"the plans {[plan.hash for plan in plans]} of this output do not number its units "
            "consecutively; choose another folder"
        )
    return UnitPlan(
        hash="+".join(plan.hash for plan in plans),
        unit_rows=np.concatenate([plan.unit_rows for plan in plans]),
        row_sums=np.concatenate([plan.row_sums for plan in plans]),
        is_partitioned=plans[0].is_partitioned,
        hashes=tuple((plan.first_unit, plan.hash) for plan in plans),
        rows_left=plans[-1].rows_left,
    )


def row_sum(row: Ints) -> int:
    """Return a checksum of the rows of a unit: the sum of the hashes of their row numbers.

    It is modulo 2**64 and does not depend on the order. Another set of rows has the same sum with a
    probability of 2**-64.
    """
    return int(mix64(row.astype(np.uint64)).sum(dtype=np.uint64))


def row_sums(unit: npt.NDArray[np.integer[Any]], row: Ints, num_units: int) -> Uint64s:
    """Return the `row_sum` of each of `num_units` units, from unit and number of each row.

    Sums of pieces of an input add up, modulo 2**64.
    """
    sums = np.zeros(num_units, np.uint64)
    np.add.at(sums, unit, mix64(row.astype(np.uint64)))
    return sums


def add_row_sums(sums: Iterable[int]) -> int:
    """Return the `row_sum` of all rows of several pieces, from that of each piece."""
    return sum(sums) % 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorTally:
    """Number of rows with one class of error."""

    num_rows: int
    # first ids, up to `NUM_ERROR_IDS`
    row_ids: tuple[str, ...]
    message: str

    def __add__(self, other: "ErrorTally") -> "ErrorTally":
        return ErrorTally(
            num_rows=self.num_rows + other.num_rows,
            row_ids=(self.row_ids + other.row_ids)[:NUM_ERROR_IDS],
            message=self.message,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCounts(TokenCounts):
    """Counts of the rows of one or many units.

    Args:
        num_asked: rows requested from engines (name as stored).
        num_copies: requested rows that reused the result of an identical row.
        prompt_lengths: requested rows per bin of prompt tokens; bins are the same everywhere, so
            counts of units add up.
        output_lengths: samples per bin of generated tokens.
    """

    num_rows: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, ErrorTally] = field(default_factory=dict)
    num_asked: int = 0
    num_copies: int = 0
    special_rows: int = 0
    special_tokens: int = 0
    prompt_lengths: tuple[int, ...] = ()
    output_lengths: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "UnitCounts":
        errors = {
            name: ErrorTally(**{**one, "row_ids": tuple(one["row_ids"])})
            for name, one in values["errors"].items()
        }
        bins = {name: tuple(values.get(name, ())) for name in _BINNED}
        return cls(**{**values, "errors": errors, **bins})


def sum_counts(parts: Iterable[UnitCounts]) -> UnitCounts:
    """Return the sum of the counts of several units."""
    statuses: dict[str, int] = {}
    errors: dict[str, ErrorTally] = {}
    totals: dict[str, Any] = dict.fromkeys(_SUMMED, 0) | dict.fromkeys(_BINNED, ())
    for one in parts:
        for name in _BINNED:
            pairs = zip_longest(totals[name], getattr(one, name), fillvalue=0)
            totals[name] = tuple(first + second for first, second in pairs)
        for name in _SUMMED:
            totals[name] += getattr(one, name)
        for status, number in one.statuses.items():
            statuses[status] = statuses.get(status, 0) + number
        for kind, error in one.errors.items():
            errors[kind] = errors[kind] + error if kind in errors else error
    return UnitCounts(statuses=statuses, errors=errors, **totals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Confirmation that a unit is committed, small enough to send to other processes.

    `won`: this attempt wrote the unit; if False, another attempt did, or this one did but the reply
    of the store was lost.
    """

    unit: int
    num_rows: int
    won: bool
    counts: UnitCounts
