"""What is committed: units of a plan, and what the rows of a unit came to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raybatch.errors import CommitError
from raybatch.hashing import mix64

__all__ = [
    "NUM_ERROR_IDS",
    "PROTOCOL",
    "Receipt",
    "Unit",
    "UnitCounts",
    "UnitPlan",
    "add_row_sums",
    "row_sum",
    "row_sums",
    "sum_counts",
]

Ints = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

# of what lies in the store; another one is refused
PROTOCOL = 1
# rows that are named per class of errors
NUM_ERROR_IDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A fixed set of rows that is one part of the output.

    Args:
        number: of the unit in its plan, from 0.
        num_rows: of the unit.
        row_sum: see the function of this name.
    """

    number: int
    num_rows: int
    row_sum: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitPlan:
    """What a commit must know of a plan.

    Args:
        hash: of the whole plan.
        unit_rows: int64 [U], rows of each unit.
        row_sums: uint64 [U], see `row_sums`.
        is_partitioned: the rows of a unit lie in one file per value of some input columns.
    """

    hash: str
    unit_rows: Ints
    row_sums: Uint64s
    is_partitioned: bool = False

    def __post_init__(self) -> None:
        if len(self.unit_rows) != len(self.row_sums):
            raise CommitError(
                f"plan {self.hash}: {len(self.unit_rows)} counts and {len(self.row_sums)} sums"
            )

    @property
    def num_units(self) -> int:
        """Return the number of units."""
        return len(self.unit_rows)

    @property
    def num_rows(self) -> int:
        """Return the rows of all units."""
        return int(self.unit_rows.sum())

    def unit(self, number: int) -> Unit:
        """Return one unit."""
        return Unit(
            number=number,
            num_rows=int(self.unit_rows[number]),
            row_sum=int(self.row_sums[number]),
        )


def row_sum(row: Ints) -> int:
    """Return the sum, modulo 2**64, of the scrambled row numbers of a unit, in any order.

    Another set of as many rows has the same sum by chance alone: once in 2**64.

    Args:
        row: int64 [R], numbers of the rows in the whole input.
    """
    return int(mix64(row.astype(np.uint64)).sum(dtype=np.uint64))


def row_sums(unit: npt.NDArray[np.integer[Any]], row: Ints, num_units: int) -> Uint64s:
    """Return the `row_sum` of each unit; those of pieces of an input add up, modulo 2**64.

    Args:
        unit: int [R], unit of each row.
        row: int64 [R], numbers of the rows in the whole input.
        num_units: of the plan.
    """
    sums = np.zeros(num_units, np.uint64)
    np.add.at(sums, unit, mix64(row.astype(np.uint64)))
    return sums


def add_row_sums(sums: Iterable[int]) -> int:
    """Return the `row_sum` of the rows of several pieces."""
    return sum(sums) % 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCounts:
    """What the rows of a unit, or of many, came to.

    Args:
        num_rows: of the unit.
        statuses: rows of each status.
        errors: rows of each class of errors, and the ids of up to `NUM_ERROR_IDS` of them.
        prompt_tokens: of all rows.
        cached_tokens: prompt tokens whose KV came from another row.
        generated_tokens: of all rows.
    """

    num_rows: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "num_rows": self.num_rows,
            "statuses": self.statuses,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "UnitCounts":
        """Return the counts of plain values."""
        errors = {
            name: (int(number), tuple(str(row_id) for row_id in row_ids))
            for name, (number, row_ids) in values["errors"].items()
        }
        return cls(**{**values, "errors": errors})


def sum_counts(parts: Iterable[UnitCounts]) -> UnitCounts:
    """Return the counts of all rows of some units."""
    statuses: dict[str, int] = {}
    errors: dict[str, tuple[int, tuple[str, ...]]] = {}
    rows = prompt = cached = generated = 0
    for one in parts:
        rows += one.num_rows
        prompt += one.prompt_tokens
        cached += one.cached_tokens
        generated += one.generated_tokens
        for status, number in one.statuses.items():
            statuses[status] = statuses.get(status, 0) + number
        for name, (number, row_ids) in one.errors.items():
            known, known_ids = errors.get(name, (0, ()))
            errors[name] = (known + number, (known_ids + tuple(row_ids))[:NUM_ERROR_IDS])
    return UnitCounts(
        num_rows=rows,
        statuses=statuses,
        errors=errors,
        prompt_tokens=prompt,
        cached_tokens=cached,
        generated_tokens=generated,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """That a unit is committed; small enough to travel where its rows do not.

    Args:
        unit: number of the unit.
        num_rows: of the unit.
        won: this attempt wrote it; False where another one did, or where the reply was lost.
        counts: of the rows that are in the output.
    """

    unit: int
    num_rows: int
    won: bool
    counts: UnitCounts
