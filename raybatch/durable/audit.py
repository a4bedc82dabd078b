"""The audit of an output, and the file `_SUCCESS`, which marks it as complete."""

import json
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from raybatch.durable.commit import (
    joined_ranges,
    listed_units,
    read_files,
    read_joined,
    read_record,
    stored_footer,
    strange_files,
)
from raybatch.durable.fault_points import reach
from raybatch.durable.layout import (
    DATA,
    DONE,
    SUCCESS,
    UNITS,
    done_name,
    joined_name,
    part_name,
    part_unit,
)
from raybatch.durable.parts import Footer
from raybatch.durable.storage import Store, store_of
from raybatch.durable.units import PROTOCOL, CommitUnit, UnitCounts, UnitPlan, sum_counts
from raybatch.errors import CommitError

# units that one thread reads at a time: their counts are summed before they are stored
_UNITS_PER_SHARE = 256
_NUM_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The content of an output compared with its plan.

    Args:
        written_rows: rows in parts of the plan, by their footers.
        lost_rows: rows in no part, including those of missing units, and those in no plan yet.
        duplicated_rows: rows in parts beyond the planned rows of their units.
        num_missing: units without a part.
        missing: numbers of the first missing units.
        foreign: messages about the first foreign files.
    """

    num_units: int = 0
    expected_rows: int = 0
    written_rows: int = 0
    lost_rows: int = 0
    duplicated_rows: int = 0
    num_missing: int = 0
    missing_rows: int = 0
    missing: tuple[int, ...] = ()
    num_foreign: int = 0
    foreign: tuple[str, ...] = ()
    counts: UnitCounts = field(default_factory=UnitCounts)

    def __add__(self, other: "Audit") -> "Audit":
        """Return the audit of both sets of parts."""
        return replace(
            self,
            written_rows=self.written_rows + other.written_rows,
            lost_rows=self.lost_rows + other.lost_rows,
            duplicated_rows=self.duplicated_rows + other.duplicated_rows,
            num_foreign=self.num_foreign + other.num_foreign,
            foreign=(self.foreign + other.foreign)[:_NUM_EXAMPLES],
            counts=sum_counts((self.counts, other.counts)),
        )

    @property
    def is_clean(self) -> bool:
        """Return whether every row of the plan is in the output exactly once."""
        wrong = self.lost_rows or self.duplicated_rows or self.num_missing or self.num_foreign
        return not wrong and self.written_rows == self.expected_rows

    @property
    def unreadable_rows(self) -> int:
        """Return the lost rows of units with a part; rows of missing units can still be written."""
        return self.lost_rows - self.missing_rows

    def gone_message(self, resume: str) -> str:
        """Return what to do about missing parts; `resume` is how their rows are written again."""
        units = ", ".join(str(unit) for unit in self.missing)
        return (
            f"{self.num_missing} parts of a complete output are missing, such as those of units "
            f"{units}; restore them from a copy, or remove {SUCCESS} and {resume}"
        )

    def __str__(self) -> str:
        text = (
            f"expected {self.expected_rows}, written {self.written_rows}, lost {self.lost_rows}, "
            f"duplicated {self.duplicated_rows}"
        )
        if self.num_missing:
            units = ", ".join(str(unit) for unit in self.missing)
            text += f"; {self.num_missing} units are missing, such as {units}"
        if self.num_foreign:
            text += f"; {self.num_foreign} foreign files: {'; '.join(self.foreign)}"
        return text


class _FolderFiles:
    """The files in folders below `data/` by unit; uses 8 bytes per file and its name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: list[str] = []
        units = []
        for name in names:
            unit = part_unit(name)
            if unit is not None and name != part_name(unit):
                self._names.append(name)
                units.append(unit)
        of_unit = np.array(units, np.int64)
        self._order = np.argsort(of_unit, kind="stable")
        self._units = of_unit[self._order]

    def of(self, unit: int) -> set[str]:
        first, stop = np.searchsorted(self._units, (unit, unit + 1))
        return {self._names[place] for place in self._order[first:stop]}


def audit(
    store: Store, plan: UnitPlan, *, num_threads: int = 16, joined_in: Store | None = None
) -> Audit:
    """Compare an output with its plan, from one listing and the footers of all parts.

    Problems of the output are in the result, never raised. Memory holds the names of all files, but
    no rows. With `num_threads` 1 no thread is started. `joined_in` has the joined parts, if parts
    of this output are joined; None: the folder above it.
    """
    reach("before_audit")
    is_done, unknown = listed_units(store, plan)
    names = store.names(DATA) if plan.is_partitioned else []
    unknown += strange_files(plan, names)
    files = _FolderFiles(names)
    # a later listing than that of the parts; joined parts were created before their records
    joined = [units for units in joined_ranges(store) if units.stop <= plan.num_units]
    held = set[str]()
    if joined:
        target = joined_in or store_of(store.uri.removesuffix(f"/{UNITS}"))
        held.update(target.names(DATA), target.names(DONE))
    for units in joined:
        is_done[units.start : units.stop] = False
    present = np.flatnonzero(is_done)
    # units of a partitioned output may have many files
    size = _UNITS_PER_SHARE // (64 if plan.is_partitioned else 1)
    starts = range(0, len(present), size)

    def read(share: int | range) -> Audit:
        if isinstance(share, range):
            result = _read_joined_share(store, plan, share, held)
            is_done[share.start : share.stop] = result is not None
            return result or Audit()
        units = present[share : share + size].tolist()
        return _read_share(store, plan, units, partial(_footer_of, store, plan, files))

    shares = [*starts, *joined]
    if num_threads == 1:
        total = sum(map(read, shares), Audit())
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            total = sum(threads.map(read, shares), Audit())
    missing = np.flatnonzero(~is_done)
    missing_rows = int(plan.unit_rows[missing].sum()) + plan.rows_left
    strangers = tuple(_stranger_message(store, name) for name in unknown)
    return replace(
        total,
        num_units=plan.num_units,
        expected_rows=plan.num_rows + plan.rows_left,
        lost_rows=total.lost_rows + missing_rows,
        num_missing=len(missing),
        missing_rows=missing_rows,
        missing=tuple(int(unit) for unit in missing[:_NUM_EXAMPLES]),
        num_foreign=total.num_foreign + len(unknown),
        foreign=(strangers + total.foreign)[:_NUM_EXAMPLES],
    )


def finish(store: Store, plan: UnitPlan, result: Audit) -> None:
    """Create `_SUCCESS` if it does not exist; CommitError: the audit is not clean."""
    if not result.is_clean:
        raise CommitError(f"the output {store.uri} is not complete: {result}")
    record = {
        "protocol": PROTOCOL,
        "plan": plan.hash,
        "units": plan.num_units,
        "rows": plan.num_rows,
        "counts": asdict(result.counts),
    }
    if not plan.is_partitioned:
        record["files"] = [part_name(number) for number in range(plan.num_units)]
    data = json.dumps(record, sort_keys=True).encode()
    reach("before_success")
    # an existing file is valid for the input before it grew
    if not store.create(SUCCESS, data) and not is_finished(store, plan):
        store.replace(SUCCESS, data)
    reach("after_success")


def is_finished(store: Store, plan: UnitPlan) -> bool:
    """Return whether the output is complete, including all input added later.

    Raises:
        CommitError: `_SUCCESS` belongs to another plan, or cannot be read.
    """
    record = read_success(store)
    if record is None:
        return False
    if "plan" not in record:
        raise CommitError(
            f"{store.uri}/{SUCCESS} was not written by a run; remove it and run the job again, "
            "which recounts the parts"
        )
    if plan.extends(record["plan"]):
        return False
    if record["plan"] != plan.hash:
        raise CommitError(
            f"{store.uri}/{SUCCESS} belongs to plan {record['plan']}, not to {plan.hash}; choose "
            "another folder"
        )
    return True


def read_success(store: Store) -> Mapping[str, Any] | None:
    """Return the content of `_SUCCESS`, {} if it is corrupt, None if it does not exist."""
    try:
        record = json.loads(store.read(SUCCESS))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _read_joined_share(
    store: Store, plan: UnitPlan, units: range, held: Container[str]
) -> Audit | None:
    """Audit units whose parts were joined, by the footers in their record.

    Returns None if their joined part is missing, so that their rows are generated again. `held` are
    the joined parts that exist, and the records of those in folders.
    """
    footers: dict[int, Footer] = {}
    problem: CommitError | FileNotFoundError | None = None
    try:
        part, footers = read_joined(store, units)
        if part not in held:
            return None
    except (CommitError, FileNotFoundError) as error:
        problem = error

    def footer_of(unit: CommitUnit, _: list[str]) -> Footer:
        if problem is not None:
            raise problem
        name = joined_name(units.start, units.stop)
        footers[unit.number].check_plan(unit, plan.hash_of(unit.number), f"{store.uri}/{name}")
        return footers[unit.number]

    return _read_share(store, plan, units, footer_of)


def _footer_of(
    store: Store, plan: UnitPlan, files: _FolderFiles, unit: CommitUnit, foreign: list[str]
) -> Footer:
    """Return the footer of a unit; append messages about files that look like its own.

    Raises:
        FileNotFoundError: a file was removed after it was listed.
        CommitError: a file belongs to another unit or plan.
    """
    if plan.is_partitioned:
        record = read_record(store, unit.number)
        # files of a unit without a record count as a missing unit
        unknown = sorted(files.of(unit.number) - set(record[1]))
        foreign += [_stranger_message(store, one) for one in unknown]
        return read_files(store, plan.hash_of(unit.number), unit, record)
    name = part_name(unit.number)
    footer = stored_footer(store, unit.number, name)
    footer.check_plan(unit, plan.hash_of(unit.number), f"{store.uri}/{name}")
    return footer


def _read_share(
    store: Store,
    plan: UnitPlan,
    units: Iterable[int],
    footer_of: Callable[[CommitUnit, list[str]], Footer],
) -> Audit:
    written = lost = duplicated = 0
    foreign: list[str] = []
    counts = []
    for number in units:
        unit = plan.unit(number)
        name = done_name(number) if plan.is_partitioned else part_name(number)
        where = f"{store.uri}/{name}"
        try:
            footer = footer_of(unit, foreign)
        except (CommitError, FileNotFoundError) as error:
            text = str(error)
            if isinstance(error, FileNotFoundError):  # removed after the listing
                also = f" and {SUCCESS}" if store.size(SUCCESS) is not None else ""
                text = (
                    f"{where} refers to a missing file ({error}); restore it from a copy, or "
                    f"remove {name}{also} and run the job again"
                )
            foreign.append(text)
            lost += unit.num_rows
            continue
        held = footer.unit
        written += held.num_rows
        lost += max(0, unit.num_rows - held.num_rows)
        duplicated += max(0, held.num_rows - unit.num_rows)
        if held.num_rows == unit.num_rows and held.row_sum != unit.row_sum:
            foreign.append(f"{where} has other rows than planned")
        counts.append(footer.counts)
    return Audit(
        written_rows=written,
        lost_rows=lost,
        duplicated_rows=duplicated,
        num_foreign=len(foreign),
        foreign=tuple(foreign[:_NUM_EXAMPLES]),
        counts=sum_counts(counts),
    )


def _stranger_message(store: Store, name: str) -> str:
    return f"{store.uri}/{name} is not a part of the plan; move it away"
