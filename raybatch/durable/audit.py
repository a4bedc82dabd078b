"""The audit of an output, and the file `_SUCCESS`, which marks it as complete."""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raybatch.durable.commit import listed_units, read_files, read_record, strange_files
from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA, SUCCESS, done_name, part_name, part_unit
from raybatch.durable.parts import PARQUET, PartFormat, read_footer
from raybatch.durable.storage import Store
from raybatch.durable.units import PROTOCOL, UnitCounts, UnitPlan, sum_counts
from raybatch.errors import CommitError
from raybatch.records.arrays import Ints

# units that one thread takes at a time: their counts are added up before they are kept
_UNITS_PER_SHARE = 256
_NUM_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What is in an output, compared with its plan.

    Args:
        written_rows: in parts of the plan, by their footers.
        lost_rows: of the plan, in no part of it; those of missing units among them.
        duplicated_rows: in parts beyond the rows that the plan gives to their units.
        num_missing: units without a part.
        missing: numbers of the first of them.
        foreign: what is wrong with the first of them.
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
        """Return what the parts of both contain."""
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
        """Return the lost rows of units that have a part; missing units may still be written."""
        return self.lost_rows - self.missing_rows

    @property
    def gone_message(self) -> str:
        units = ", ".join(str(unit) for unit in self.missing)
        return (
            f"it was complete and {self.num_missing} parts are gone, such as those of units "
            f"{units}; bring them back from a copy, or remove {SUCCESS} and run the job again"
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
    """The files in folders below `data/` by unit; 8 bytes for each and its name."""

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
    store: Store, plan: UnitPlan, *, num_threads: int = 16, part_format: PartFormat = PARQUET
) -> Audit:
    """Compare an output with its plan, from one listing and the footers of all parts.

    Nothing is raised for what is wrong with the output, and memory holds only the names of its
    files. With `num_threads` 1 no thread is started.
    """
    reach("before_audit")
    is_done, unknown = listed_units(store, plan)
    names = store.names(DATA) if plan.is_partitioned else []
    unknown += strange_files(plan, names)
    files = _FolderFiles(names)
    present, missing = np.flatnonzero(is_done), np.flatnonzero(~is_done)
    starts = range(0, len(present), _UNITS_PER_SHARE)

    def read(start: int) -> Audit:
        units = present[start : start + _UNITS_PER_SHARE]
        return _read_share(store, plan, units, files, part_format)

    if num_threads == 1:
        total = sum(map(read, starts), Audit())
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            total = sum(threads.map(read, starts), Audit())
    missing_rows = int(plan.unit_rows[missing].sum())
    strangers = tuple(_stranger_message(store, name) for name in unknown)
    return replace(
        total,
        num_units=plan.num_units,
        expected_rows=plan.num_rows,
        lost_rows=total.lost_rows + missing_rows,
        num_missing=len(missing),
        missing_rows=missing_rows,
        missing=tuple(int(unit) for unit in missing[:_NUM_EXAMPLES]),
        num_foreign=total.num_foreign + len(unknown),
        foreign=(strangers + total.foreign)[:_NUM_EXAMPLES],
    )


def finish(store: Store, plan: UnitPlan, result: Audit) -> None:
    """Create `_SUCCESS`, unless it is there; CommitError where the audit is not clean."""
    if not result.is_clean:
        raise CommitError(f"the output {store.uri} is not complete: {result}")
    record = {
        "protocol": PROTOCOL,
        "plan": plan.hash,
        "units": plan.num_units,
        "rows": plan.num_rows,
        "counts": result.counts.to_json(),
    }
    if not plan.is_partitioned:
        record["files"] = [part_name(number) for number in range(plan.num_units)]
    data = json.dumps(record, sort_keys=True).encode()
    reach("before_success")
    # what is there is true, of the input before it grew
    if not store.create(SUCCESS, data) and not is_finished(store, plan):
        store.replace(SUCCESS, data)
    reach("after_success")


def is_finished(store: Store, plan: UnitPlan) -> bool:
    """Return whether the output is complete, with all input that was added to it.

    Raises:
        CommitError: `_SUCCESS` belongs to another plan, or cannot be read.
    """
    record = read_success(store)
    if record is None:
        return False
    if "plan" not in record:
        raise CommitError(
            f"{store.uri}/{SUCCESS} is not what a run writes; remove it and run the job again, "
            "which counts the parts anew"
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
    """Return the content of `_SUCCESS`, {} where it is damaged, None where there is none."""
    try:
        record = json.loads(store.read(SUCCESS))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _read_share(
    store: Store, plan: UnitPlan, units: Ints, files: _FolderFiles, part_format: PartFormat
) -> Audit:
    written = lost = duplicated = 0
    foreign: list[str] = []
    counts = []
    for number in units.tolist():
        unit = plan.unit(number)
        name = done_name(number) if plan.is_partitioned else part_name(number)
        where = f"{store.uri}/{name}"
        try:
            if plan.is_partitioned:
                record = read_record(store, number)
                # files of a unit without a record count as a missing unit
                unknown = sorted(files.of(number) - set(record[1]))
                foreign += [_stranger_message(store, one) for one in unknown]
                footer = read_files(store, plan.hash_of(number), unit, record, part_format)
            else:
                footer = read_footer(store, name, part_format)
                footer.check_plan(unit, plan.hash_of(number), where)
        except (CommitError, FileNotFoundError) as error:
            text = str(error)
            if isinstance(error, FileNotFoundError):  # it is listed, and gone
                also = f" and {SUCCESS}" if store.size(SUCCESS) is not None else ""
                text = (
                    f"{where} stands for a file that is gone ({error}); bring it back from a copy, "
                    f"or remove {name}{also} and run the job again"
                )
            foreign.append(text)
            lost += unit.num_rows
            continue
        held = footer.unit
        written += held.num_rows
        lost += max(0, unit.num_rows - held.num_rows)
        duplicated += max(0, held.num_rows - unit.num_rows)
        if held.num_rows == unit.num_rows and held.row_sum != unit.row_sum:
            foreign.append(f"{where} holds other rows than the plan says")
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
    return f"{store.uri}/{name} is no part of the plan; move it away"
