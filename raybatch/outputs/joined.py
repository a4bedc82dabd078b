"""Joins the parts of an output into files of a size that readers like, in another output.

The plan of the other output is the plan of the first one with fewer, larger units: each is a
stretch of units of the first, chosen by the size of their parts, and its shards place every row.
So the joined output is verified, sorted and retried like any other.
"""

import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from threading import Event, Thread
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from raybatch.actors.ray_errors import own_cause
from raybatch.durable.audit import Audit, is_finished
from raybatch.durable.commit import committed, files_of, joined_ranges, stored_footer, strange_files
from raybatch.durable.joins import PartJoin, drop_if_lost, join_parts, remove_parts, reopen_lost
from raybatch.durable.layout import DATA, SUCCESS, part_folder, part_name, part_unit, plan_name
from raybatch.durable.storage import Store, store_of
from raybatch.durable.units import UnitPlan
from raybatch.errors import CommitError, ConfigError, error_text
from raybatch.outputs.ordered import finish_copy, prepare_copy, read_finished
from raybatch.planning.store import (
    StoredPlan,
    read_all_units,
    read_plan,
    read_plans,
    read_shards,
    read_units,
    write_plan,
    write_shard,
)
from raybatch.records.arrays import Floats, Ints

logger = logging.getLogger(__name__)

# size of joined files if a job does not set one
FILE_BYTES = 256 << 20
# outputs with at most this many units are not joined unless a job sets a size
FEW_UNITS = 64
# parts whose sizes stand for those of all units
_SAMPLED_UNITS = 16
# most files of the wanted size in a joined part of a partitioned output, which memory holds
_FILES_PER_PART = 4
_JOINS_AT_ONCE = 4
# in one process, so that memory is bounded
_COPIES_AT_ONCE = 2
_LOG_EVERY_S = 10.0
# seconds between looks for parts to join; they double up to the second value if joins fail
_LOOK_EVERY_S, _FAILED_EVERY_S = 10.0, 600.0
# seconds between looks at a running task
_WATCH_S = 1.0
# requests for the size of a file
_SIZES_AT_ONCE = 16


def file_starts(unit_bytes: Floats, file_bytes: int) -> Ints:
    """Return the first unit of each file, so that files have about equal sizes near `file_bytes`.

    Args:
        unit_bytes: float64 [U], size of the part of each unit.

    Example:
        >>> file_starts(np.array([40.0, 40.0, 40.0, 40.0]), 100).tolist()
        [0, 2]
    """
    ends = np.cumsum(unit_bytes)
    num_files = max(1, int(np.ceil(ends[-1] / file_bytes)))
    middles = ends - unit_bytes / 2
    file = np.minimum((middles * num_files / max(1.0, ends[-1])).astype(np.int64), num_files - 1)
    return np.flatnonzero(np.diff(file, prepend=-1))


def write_joined_plan(source: str, stored: StoredPlan, sink: str, starts: Ints) -> StoredPlan:
    """Write the plan of an output whose units are stretches of units of another one's plan.

    Args:
        source: folder of the other output.
        starts: int64 [F], first of the units, counted within the plan, of each stretch.

    Returns:
        The plan in effect; that of another run if it was faster.
    """
    units, name = read_units(source, stored), _hash_of(stored, starts)
    file_of = np.searchsorted(starts, np.arange(units.num_units), side="right") - 1
    first_pos = np.cumsum(units.unit_rows) - units.unit_rows
    first_pos -= first_pos[starts][file_of]
    earlier = read_plans(sink)[: stored.number - 1]
    if len(earlier) < stored.number - 1:
        raise CommitError(f"plan {stored.number} of {source} is joined after the plans before it")
    # none if units are stretches of the input
    firsts = [first for _, first in stored.shards]
    shards = []
    for first, stop in zip(firsts, [*firsts, stored.num_rows][1:], strict=True):
        shard = read_shards(source, stored, first, stop)
        unit = shard.column("unit").to_numpy()
        pos = shard.column("pos").to_numpy() + first_pos[unit]
        for column, values in (("unit", file_of[unit]), ("pos", pos)):
            place = shard.schema.get_field_index(column)
            shard = shard.set_column(place, shard.field(place), pa.array(values.astype(np.int32)))
        shards.append((write_shard(sink, name, first, shard), first))
    first_unit = sum(one.num_units for one in earlier)
    joined = UnitPlan(
        hash=name,
        unit_rows=np.add.reduceat(units.unit_rows, starts),
        row_sums=np.add.reduceat(units.row_sums, starts),
        first_unit=first_unit,
    )
    target = replace(
        stored, hash=name, first_unit=first_unit, num_units=joined.num_units, shards=tuple(shards)
    )
    return write_plan(sink, target, joined)


def _hash_of(stored: StoredPlan, starts: Ints) -> str:
    about = json.dumps([stored.hash, starts.tolist()]).encode()
    return hashlib.blake2b(about, digest_size=8, person=b"joined parts").hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedPlan:
    """A plan of an output, its joined plan, and the stretch of units of each joined unit."""

    source: str
    sink: str
    units: UnitPlan
    joined: UnitPlan
    stretches: tuple[range, ...]
    by: tuple[str, ...]

    @classmethod
    def of(cls, source: str, sink: str, stored: StoredPlan, target: StoredPlan) -> Self:
        """Return the joined plan `target` of `stored`; ConfigError: it is of another plan."""
        units, joined = read_units(source, stored), read_units(sink, target)
        stops = np.searchsorted(np.cumsum(units.unit_rows), np.cumsum(joined.unit_rows)) + 1
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])
        if target.hash != _hash_of(stored, starts):
            raise ConfigError(
                f"{sink} has rows of another output than {source}; choose another folder"
            )
        first = stored.first_unit
        stretches = tuple(map(range, (first + starts).tolist(), (first + stops).tolist()))
        return cls(
            source=source,
            sink=sink,
            units=units,
            joined=joined,
            stretches=stretches,
            by=target.partition_by,
        )

    def join(self, number: int, *, removes_parts: bool) -> PartJoin:
        first = self.units.first_unit
        return PartJoin(
            source=store_of(self.source),
            units=tuple(self.units.unit(unit - first) for unit in self.stretches[number]),
            source_hash=self.units.hash,
            target=store_of(self.sink),
            unit=self.joined.unit(number),
            plan_hash=self.joined.hash,
            by=self.by,
            attempt="joined",
            removes_parts=removes_parts,
        )


@cache
def _task() -> Any:  # noqa: ANN401 - Ray has no types
    import ray  # slow to load, and jobs without Ray do not need it

    return ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(join_parts)


def _has_ray() -> bool:
    """Return whether Ray runs; jobs start it after they have read their sink."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class PartJoiner:
    """Joins the parts of a job's units in a thread, from now until `finish` or `close`.

    Call `finish` once all units are committed, and `close` at the end. If a join fails, that is
    logged, and it is tried again; `finish` raises the error.

    Args:
        source: output folder of the job, with a part per unit.
        sink: output folder of the joined parts.
        file_bytes: size of a joined part.
        is_local: parts are joined in this process; False: by Ray tasks, once Ray runs.
    """

    def __init__(self, source: str, sink: str, *, file_bytes: int, is_local: bool) -> None:
        self._source, self._sink = source, sink
        self._file_bytes = file_bytes
        self._is_local = is_local
        # no join begins from then on, and those of Ray tasks are cancelled
        self._is_ending, self._is_closed = Event(), Event()
        self._thread = Thread(target=self._follow, name="raybatch-joiner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Begin no more joins, cancel Ray tasks, and wait for joins in this process."""
        self._is_ending.set()
        self._is_closed.set()
        self._thread.join()

    def finish(self, num_rows: int) -> None:
        """Join the parts that are left, and mark the joined output as complete.

        If another run is adding a plan, the output is left to that run, which completes it.

        Args:
            num_rows: rows of the plans that are complete.

        Raises:
            CommitError: a part cannot be joined, or the joined output lacks rows.
        """
        self._is_ending.set()
        self._thread.join()
        self._is_ending.clear()
        stops = np.cumsum([stored.num_rows for stored in read_plans(self._source)])
        num_plans = int(np.searchsorted(stops, num_rows, side="right"))
        if self._join_committed() < num_plans:
            raise CommitError(f"units of {self._source} were removed; run the job again")
        try:
            finish_copy(self._sink)
        except CommitError:
            if len(read_plans(self._sink)) <= num_plans:
                raise
            logger.info("another run is adding rows to %s, and completes it", self._sink)
            return
        _remove_joined(store_of(self._source))

    def _follow(self) -> None:
        wait_s, known = _LOOK_EVERY_S, set[str]()
        while not self._is_ending.wait(wait_s):
            began_s, is_failing = time.monotonic(), False
            try:
                if self._is_local or _has_ray():
                    self._join_committed()
            except Exception as error:  # raised by `finish` if it persists
                is_failing, text = True, error_text(error)
                if text not in known:
                    logger.warning("could not join parts: %s; trying again later", text)
                known.add(text)
            wait_s = min(2 * wait_s, _FAILED_EVERY_S) if is_failing else _LOOK_EVERY_S
            # pauses between looks at a slow store, but not as long as joins of large files take
            wait_s = max(wait_s, min(time.monotonic() - began_s, 4 * _LOOK_EVERY_S))

    def _join_committed(self) -> int:
        """Join the stretches whose units are all committed; return how many plans are complete.

        Another run may be adding a plan, whose parts it joins too. It returns early at the end.

        Raises:
            Exception: the error of the first join that failed, once all others have ended.
        """
        source, sink = store_of(self._source), store_of(self._sink)
        plans, num_complete = read_plans(self._source), 0
        if not plans:
            return 0
        is_done = committed(source, read_all_units(self._source, plans))
        for stored in plans:
            of_plan = is_done[stored.first_unit :][: stored.num_units]
            plan = self._plan_of(stored, np.flatnonzero(of_plan))
            if plan is None or self._is_ending.is_set():
                break
            self._join_all(
                [
                    plan.join(number, removes_parts=True)
                    for number in _left(plan, source, sink)
                    if is_done[plan.stretches[number].start : plan.stretches[number].stop].all()
                ]
            )
            if not of_plan.all():
                break
            num_complete += 1
        return num_complete

    def _join_all(self, joins: Sequence[PartJoin]) -> None:
        # those of a partitioned output take the memory of several files
        is_one = self._is_local or any(join.by for join in joins)
        with ThreadPoolExecutor(1 if is_one else _JOINS_AT_ONCE) as threads:
            running = [threads.submit(self._join, join) for join in joins]
            try:
                wait(running)
            except BaseException:  # Ctrl-C, while threads wait for tasks
                self._is_ending.set()
                self._is_closed.set()
                raise
        for future in running:
            future.result()

    def _join(self, join: PartJoin) -> None:
        if self._is_ending.is_set():
            return
        if self._is_local:
            join_parts(join)
            return
        import ray

        task = _task().remote(join)
        while not ray.wait([task], timeout=_WATCH_S)[0]:
            if self._is_closed.is_set():
                ray.cancel(task)
                return
        try:
            ray.get(task)
        except Exception as error:
            raise own_cause(error) or error from None

    def _plan_of(self, stored: StoredPlan, done: Ints) -> JoinedPlan | None:
        """Return the joined plan; make it by the sizes of some parts, None if `done` are too few.

        `done` are the committed units of the plan, counted within it.
        """

        def sizes() -> _Sizes:
            some = np.unique(np.linspace(0, len(done) - 1, _SAMPLED_UNITS).astype(np.int64))
            return _sizes_of(self._source, stored, done[some])

        has_plan = store_of(self._sink).size(plan_name(stored.number)) is not None
        if not has_plan and len(done) < min(_SAMPLED_UNITS, stored.num_units):
            return None
        return _open_plan(self._source, self._sink, stored, sizes, self._file_bytes)


class _Sizes(NamedTuple):
    """Bytes of units and of folders; "" is the folder of an output without partitions."""

    of_unit: Floats
    """float64 [U], the files of each unit, about."""
    of_folder: Mapping[str, float]

    def files_at_once(self) -> int:
        """Return how many files of the largest folder's size a joined part has, within memory."""
        largest = max(self.of_folder.values(), default=0.0)
        return int(min(_FILES_PER_PART, max(1.0, sum(self.of_folder.values()) / max(1.0, largest))))


def _sizes_of(source: str, stored: StoredPlan, some: Ints) -> _Sizes:
    """Return the sizes of all units of a plan by those of `some`, counted within the plan."""
    units, store = read_units(source, stored), store_of(source)

    def of_unit(unit: int) -> dict[str, float]:
        number = stored.first_unit + unit
        names = files_of(store, number, is_partitioned=units.is_partitioned)
        sizes = {part_folder(name): float(store.size(name) or 0) for name in names}
        if stored.partition_by and not units.is_partitioned:
            rows = stored_footer(store, number, part_name(number)).folders
            share = sum(sizes.values()) / max(1, units.unit_rows[unit])
            sizes = {folder: share * one.unit.num_rows for folder, one in rows.items()}
        return sizes

    with ThreadPoolExecutor(_SIZES_AT_ONCE) as threads:
        found = list(threads.map(of_unit, some.tolist()))
    of_folder: Counter[str] = Counter()
    for sizes in found:
        of_folder.update(sizes)
    if len(some) == units.num_units:
        return _Sizes(np.array([sum(sizes.values()) for sizes in found]), of_folder)
    per_row = of_folder.total() / max(1, int(units.unit_rows[some].sum()))
    return _Sizes(np.asarray(units.unit_rows * per_row, np.float64), of_folder)


def _open_plan(
    source: str, sink: str, stored: StoredPlan, sizes: Callable[[], _Sizes], file_bytes: int
) -> JoinedPlan:
    """Return the joined plan of `stored`; write it if there is none, for files of `file_bytes`.

    A joined part of a partitioned output has a file per folder, so it is as large as some files.
    """
    if store_of(sink).size(plan_name(stored.number)) is not None:
        target = read_plan(sink, stored.number)
    else:
        found = sizes()
        starts = file_starts(found.of_unit, file_bytes * found.files_at_once())
        target = write_joined_plan(source, stored, sink, starts)
        num_files = target.num_units * max(1, len(found.of_folder))
        logger.info(
            "joining %d units of %s into about %d files of about %.2f MB below %s",
            stored.num_units,
            source,
            num_files,
            found.of_unit.sum() / num_files / 1e6,
            sink,
        )
    return JoinedPlan.of(source, sink, stored, target)


def _left(plan: JoinedPlan, source: Store, sink: Store) -> list[int]:
    """Return the joined units that lack their part or their record."""
    recorded = set(joined_ranges(source))
    is_there = committed(sink, read_all_units(plan.sink, read_plans(plan.sink)))
    return [
        number
        for number, units in enumerate(plan.stretches)
        if units not in recorded or not is_there[plan.joined.first_unit + number]
    ]


def _remove_joined(source: Store) -> None:
    """Remove parts that late attempts have created after they were joined."""
    recorded = joined_ranges(source)
    names = source.names(DATA)
    remove_parts(source, [n for n in names if any(part_unit(n) in units for units in recorded)])


def reopen_lost_parts(source: str, sink: str) -> None:
    """Let units run again whose rows are gone, and log how many.

    A part, or the plan that it belonged to, was removed by something else, or by an overwrite that
    did not end.

    Raises:
        CommitError: the sink has files that are no joined parts, which would fail its end.
    """
    units, target = store_of(source), store_of(sink)
    # before the joined parts: a part and its plan are created before its record
    records, joined = joined_ranges(units), set[range]()
    names = set(target.names(DATA))
    # after the listings: a plan is created before its records and parts
    plans, joined_plans = read_plans(source), read_plans(sink)
    strange = list(names)
    if joined_plans:
        strange = strange_files(read_all_units(sink, joined_plans), names)
    if strange:
        raise CommitError(
            f"{sink} has {len(strange)} files that are in no plan of it, such as {min(strange)}; "
            "move them away, or choose another folder"
        )
    for stored, joined_plan in zip(plans, joined_plans, strict=False):
        plan = JoinedPlan.of(source, sink, stored, joined_plan)
        first, is_partitioned = plan.joined.first_unit, plan.joined.is_partitioned
        joined |= {
            of_part
            for number, of_part in enumerate(plan.stretches, first)
            if of_part in records
            and not drop_if_lost(target, number, names, is_partitioned=is_partitioned)
        }
    if lost := reopen_lost(units, records, joined):
        logger.warning("files of %s are missing; generating the rows of %d units again", sink, lost)
    if (
        plans
        # parts of files that were added are yet to come
        and is_finished(units, all_units := read_all_units(source, plans))
        and (num_lost := np.count_nonzero(~committed(units, all_units)))
    ):
        units.remove(SUCCESS)
        logger.warning("%d parts of %s are missing; generating them again", num_lost, source)


def compact(sink: str, into: str, *, file_bytes: int | None = None) -> Audit:
    """Copy a finished output into another folder with fewer, larger files of the same rows.

    A second call resumes the first.

    Args:
        file_bytes: size of a file of the copy; None: 256 MiB.

    Raises:
        ConfigError: the output is not finished, or the folder cannot be used.
        CommitError: a part of the output is damaged.
    """
    plans, _ = read_finished(sink)
    prepare_copy(sink, into, "compact")
    size = FILE_BYTES if file_bytes is None else file_bytes
    plan_of = [_compact_plan(sink, into, stored, size) for stored in plans]
    target = store_of(into)
    units = read_all_units(into, read_plans(into))
    todo = ~committed(target, units)
    joins = [
        plan.join(number, removes_parts=False)
        for plan in plan_of
        for number in range(len(plan.stretches))
        if todo[plan.joined.first_unit + number]
    ]
    logged_s = time.monotonic()
    with ThreadPoolExecutor(1 if plans[0].partition_by else _COPIES_AT_ONCE) as threads:
        for done, _ in enumerate(threads.map(join_parts, joins), units.num_units - len(joins) + 1):
            if time.monotonic() - logged_s >= _LOG_EVERY_S:
                logged_s = time.monotonic()
                logger.info("joined %d of %d files", done, units.num_units)
    return finish_copy(into)


def _compact_plan(sink: str, into: str, stored: StoredPlan, file_bytes: int) -> JoinedPlan:
    def sizes() -> _Sizes:
        # a partitioned output may have very many files
        step = stored.num_units // _SAMPLED_UNITS + 1 if stored.partition_by else 1
        return _sizes_of(sink, stored, np.arange(0, stored.num_units, step))

    return _open_plan(sink, into, stored, sizes, file_bytes)
