"""The commit protocol with one planted bug each; a simulation that misses one proves nothing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from faultlab.players import REAL, Steps
from raybatch.durable import commit
from raybatch.durable.audit import Audit
from raybatch.durable.joins import PartJoin, join_parts, remove_parts
from raybatch.durable.layout import DATA, FRAGMENTS, PLAN, SUCCESS, part_name, part_unit
from raybatch.durable.parts import Footer
from raybatch.durable.storage import Store
from raybatch.durable.units import CommitUnit, Receipt, UnitCounts, UnitPlan, row_sum


def _commit_unchecked(store: Store, unit: CommitUnit, *args: Any, **options: Any) -> Receipt:  # noqa: ANN401
    """Commit whatever rows have arrived."""
    num_rows = len(options["pos"])
    arrived = CommitUnit(number=unit.number, num_rows=num_rows, row_sum=row_sum(options["row"]))
    return commit.commit_unit(store, arrived, *args, **{**options, "pos": np.arange(num_rows)})


def _commit_by_attempt(
    store: Store,
    unit: CommitUnit,
    table: Any,  # noqa: ANN401
    *,
    count: Callable[[Any], UnitCounts],
    plan_hash: str,
    attempt: str,
    encode: Callable[[Any, str], bytes],
    **checked: Any,  # noqa: ANN401
) -> Receipt:
    """Commit under a name that every attempt has for itself."""
    commit.check_rows(unit, **checked)
    footer = Footer(unit=unit, plan=plan_hash, attempt=attempt, counts=count(table))
    name = part_name(unit.number, f"attempt={attempt}")
    won = store.create(name, encode(table, footer.to_text()))
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=won, counts=footer.counts)


def _committed_by_any_attempt(store: Store, plan: UnitPlan) -> Any:  # noqa: ANN401
    is_done = np.zeros(plan.num_units, bool)
    numbers = [part_unit(name) for name in store.names(DATA)]
    is_done[[n for n in numbers if n is not None and n < plan.num_units]] = True
    return is_done


def _receipt_by_any_attempt(store: Store, unit: CommitUnit, plan_hash: str) -> Receipt | None:
    if any(part_unit(name) == unit.number for name in store.names(DATA)):
        return _receipt(unit)
    return None


class _FilesLater:
    """A store that keeps every part back until the record of its unit is written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, bytes] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._store, name)

    def create(self, name: str, data: bytes) -> bool:
        if part_unit(name) is not None:
            self._waiting[name] = data
            return True
        won = self._store.create(name, data)
        for part in sorted(self._waiting):
            self._store.create(part, self._waiting[part])
        return won


def _commit_record_first(store: Store, *args: Any, **options: Any) -> Receipt:  # noqa: ANN401
    """Say that a unit is complete, then write its files."""
    if "joined_by" in options:  # it has one file and no record
        return commit.commit_unit(store, *args, **options)
    return commit.commit_unit(_FilesLater(store), *args, **options)


def _open_own_plan(store: Store, make: Callable[[], bytes], *, name: str = PLAN) -> bytes:
    """Take the stored plan where there is one, and else the own one, even if another is made."""
    if store.size(name) is not None:
        return store.read(name)
    made = make()
    store.replace(name, made)
    return made


def _committed_after_cleaning(store: Store, plan: UnitPlan) -> Any:  # noqa: ANN401
    """Remove the parts of units that look unfinished, then list."""
    for number in _units_with_fragments(store):
        store.remove(part_name(number))
    return commit.committed(store, plan)


def _committed_or_kept(store: Store, plan: UnitPlan) -> Any:  # noqa: ANN401
    """Take a journal for a commit."""
    is_done = commit.committed(store, plan)
    is_done[_units_with_fragments(store)] = True
    return is_done


def _units_with_fragments(store: Store) -> list[int]:
    return [int(name.split("/")[2]) for name in store.names(FRAGMENTS)]


class _Overwriting:
    """A store whose create replaces existing parts."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._store, name)

    def create(self, name: str, data: bytes) -> bool:
        if part_unit(name) is None:
            return self._store.create(name, data)
        self._store.replace(name, data)
        return True


def _trusting_audit(store: Store, plan: UnitPlan, **options: Any) -> Audit:  # noqa: ANN401
    """Believe the names of parts."""
    missing = np.flatnonzero(~_committed_by_any_attempt(store, plan))
    lost = int(plan.unit_rows[missing].sum())
    return Audit(
        num_units=plan.num_units,
        expected_rows=plan.num_rows,
        written_rows=plan.num_rows - lost,
        lost_rows=lost,
        duplicated_rows=0,
        num_missing=len(missing),
        missing_rows=lost,
        missing=tuple(missing.tolist()),
        num_foreign=0,
        foreign=(),
        counts=UnitCounts(),
    )


def _trusting_receipt(store: Store, unit: CommitUnit, plan_hash: str) -> Receipt | None:
    """Believe the name of a part."""
    return None if store.size(part_name(unit.number)) is None else _receipt(unit)


def _receipt(unit: CommitUnit) -> Receipt:
    counts = UnitCounts(num_rows=unit.num_rows)
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=False, counts=counts)


def _reading_early(store: Store, make: Callable[[], bytes], *, name: str = PLAN) -> bytes:
    """Create the plan as the protocol does, but continue with the own one."""
    try:
        return store.read(name)
    except FileNotFoundError:
        made = make()
        store.create(name, made)
        return made


class _KeepingSuccess:
    """A store that always returns the success record of the first plan."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._store, name)

    def replace(self, name: str, data: bytes) -> None:
        if name != SUCCESS:
            self._store.replace(name, data)


def _finished_once(store: Store, plan: UnitPlan) -> bool:
    """Take an output that was complete for one that is."""
    return store.size(SUCCESS) is not None


class _Held:
    """A store of parts that are in memory and were removed."""

    def __init__(self, store: Store, parts: Mapping[str, bytes]) -> None:
        self._store, self._parts = store, parts

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._store, name)

    def read(self, name: str) -> bytes:
        return self._parts.get(name) or self._store.read(name)


def _join_after_removing(join: PartJoin, *, num_threads: int) -> None:
    """Remove parts once they are in memory, then write the joined part."""
    names = [part_name(unit.number) for unit in join.units]
    if join.has_record():
        return
    parts = {name: join.source.read(name) for name in names}
    remove_parts(join.source, names)
    join_parts(replace(join, source=_Held(join.source, parts)), num_threads=num_threads)


MUTATIONS: Mapping[str, Steps] = MappingProxyType(
    {
        "rows are not checked": replace(REAL, commit_unit=_commit_unchecked),
        "parts are named by attempt": replace(
            REAL,
            commit_unit=_commit_by_attempt,
            committed=_committed_by_any_attempt,
            receipt_of=_receipt_by_any_attempt,
            audit=_trusting_audit,
        ),
        "a record comes before its files": replace(REAL, commit_partitioned=_commit_record_first),
        "the plan is not exclusive": replace(REAL, open_plan=_open_own_plan),
        "the stored plan is not read again": replace(REAL, open_plan=_reading_early),
        "recovery deletes": replace(REAL, committed=_committed_after_cleaning),
        "create overwrites": replace(REAL, wrap_store=_Overwriting),
        "a journal is taken for a commit": replace(REAL, committed=_committed_or_kept),
        "success is said for the first plan alone": replace(REAL, wrap_store=_KeepingSuccess),
        "a plan that came later is taken for finished": replace(REAL, is_finished=_finished_once),
        "parts are removed before they are joined": replace(REAL, join=_join_after_removing),
        "the plan of a part is not checked": replace(
            REAL, audit=_trusting_audit, receipt_of=_trusting_receipt
        ),
    }
)
