"""`UnitFeeder`: a stage that answers whole commit units of a plan and writes each once complete.

Only receipts return through Ray, so a lost object or a retried task loses no row.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.actors.wire.columns import to_numpy
from raybatch.config import WaveConfig
from raybatch.durable import journal
from raybatch.durable.fault_points import reach
from raybatch.durable.journal import POS
from raybatch.durable.units import Receipt
from raybatch.errors import ReplicaError
from raybatch.planning.tally import row_statuses
from raybatch.policy.deadline import RunProgress, UnitDeadline, is_in_time
from raybatch.records.pool_stats import PoolStats
from raybatch.rows.plan_columns import RANK, ROW, places, take_groups, with_columns, with_groups_of
from raybatch.rows.schema import GOOD_STATUSES
from raybatch.stages.feeder import RequestBatch, StageFeeder, end_calls, retry_client
from raybatch.stages.unit_writer import (
    RECEIPT_SCHEMA,
    SPECIAL,
    PlacedWatch,
    UnitReceipt,
    UnitWatch,
    UnitWriter,
)

# open units of a feeder
_UNITS_IN_FLIGHT = 16
# target and maximum rows of one call of the pool, whose cost hardly depends on them
_CALL_ROWS, _MAX_CALL_ROWS = 1024, 2048
# interval at which an open unit checks for rows to store, and for the end of the run
_WAKE_S = 1.0
# interval at which a waiting unit checks the deadline
_POLL_S = 1.0

_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True, eq=False)
class PlacedRows:
    """Planned rows of one call of the pool, and their progress.

    Args:
        places: columns of the journal: position in the unit and number in the source.
        name: name of the call in the pool; a process that takes the rows over uses the same.
        watch: crash counts and saved tokens of the rows; None if they are in no unit.
        batch: the submitted rows; None while they are being prepared.
        num_seen: partial results that `PlacedFeeder` has read.
    """

    table: pa.Table
    places: Mapping[str, pa.ChunkedArray]
    name: str
    watch: PlacedWatch | None
    batch: RequestBatch | None = None
    num_seen: int = 0

    @classmethod
    def of(cls, table: pa.Table, unit: UnitWatch | None = None, *, name: str = "") -> "PlacedRows":
        """Read the places from plan columns; without `name` the call is named after them."""
        units, positions = places(table)
        if not name:
            # rows of a probe have no units yet, and units of two plans may run at once
            plan = b"" if unit is None else unit.writer.stored.hash.encode()
            numbers = np.concatenate([units, positions, to_numpy(table.column(ROW), np.int64)])
            name = hashlib.blake2b(plan + numbers.tobytes(), digest_size=16).hexdigest()
        columns = {POS: pa.chunked_array([positions]), journal.ROW: table.column(ROW)}
        watch = None if unit is None else unit.at(positions)
        return cls(table=table, places=columns, name=name, watch=watch)


class PlacedFeeder(StageFeeder):
    """A stage whose answered rows keep their commit unit and position; `waves` are retry rules."""

    waves: ClassVar[tuple[WaveConfig, ...]] = ()

    async def _map(self, table: pa.Table) -> pa.Table:
        rows = PlacedRows.of(table)
        finished = await self._answer_placed(rows)
        self._forget([rows])
        return finished

    async def _answer_placed(self, rows: PlacedRows) -> pa.Table:
        # no wave retries rows that crashed engines in earlier runs
        given_up = frozenset() if rows.watch is None else frozenset(rows.watch.given_up())
        rows.batch = batch = await self._prepare(rows.table, watch=rows.watch)
        finished = await self._answer(batch, name=rows.name)
        for number, wave in enumerate(self.waves):
            name = _name_in_wave(rows, number)
            finished = await self._retry(rows.table, finished, wave, name, given_up)
        return with_columns(finished, _journal_columns(rows, batch))

    def _forget(self, calls: Sequence[PlacedRows]) -> None:
        """Release rows in the pool that no later feeder needs."""
        self.pool.forget([rows.name for rows in calls], client=self.client)
        for number in range(len(self.waves)):
            names = [_name_in_wave(rows, number) for rows in calls]
            self.pool.forget(names, client=retry_client(self.client))

    async def _placed_so_far(self, calls: Iterable[PlacedRows]) -> list[pa.Table]:
        """Return newly finished rows of pending calls that no wave would retry."""
        known = [(c, c.batch) for c in calls if c.batch is not None and c.batch.prepared.rows]
        if not known:
            return []
        found = await self.pool.partial_results(
            {rows.name: rows.num_seen for rows, _ in known},
            client=self.client,
            watches=[batch.watch for _, batch in known],
        )
        finished = []
        for (rows, batch), (results, num_seen) in zip(known, found, strict=True):
            rows.num_seen = num_seen
            if results.num_rows:
                finished.append(await self._finished_so_far(rows, batch, results))
        return finished

    async def _finished_so_far(
        self, rows: PlacedRows, batch: RequestBatch, results: pa.Table
    ) -> pa.Table:
        positions, prepared, results = batch.prepared.of_results(results)
        finished = await asyncio.to_thread(self._finish, prepared, results)
        statuses = row_statuses(finished, self.config.output)
        again = {status for wave in self.waves for status in wave.on}
        is_final = pa.array([status not in again for status in statuses], pa.bool_())
        columns = _journal_columns(rows, batch)
        chosen = {name: column.take(pa.array(positions)) for name, column in columns.items()}
        return with_columns(finished, chosen).filter(is_final)

    async def _retry(
        self, table: pa.Table, finished: pa.Table, wave: WaveConfig, name: str, given_up: Set[int]
    ) -> pa.Table:
        """Return rows with new results; a row with text keeps it if the retry failed."""
        statuses = row_statuses(finished, self.config.output)
        wanted = [i for i, s in enumerate(statuses) if s in wave.on and i not in given_up]
        chosen = np.array(wanted, np.int64)
        if not len(chosen):
            return finished
        batch = await self._prepare(table.take(chosen), changes=wave.sampling)
        again = await self._answer(batch, name=name)
        column = self.config.output_prefix + "attempts"
        place = again.column_names.index(column)
        before = finished.column(column).take(chosen)
        attempts = pc.add(again.column(column), before).cast(pa.int32())
        again = again.set_column(place, again.schema.field(column), attempts)
        pairs = zip(wanted, row_statuses(again, self.config.output), strict=True)
        is_taken = np.array(
            [new in GOOD_STATUSES or statuses[i] not in GOOD_STATUSES for i, new in pairs]
        )
        source = np.arange(finished.num_rows)
        source[chosen[is_taken]] = finished.num_rows + np.flatnonzero(is_taken)
        return pa.concat_tables([finished, again]).take(source)


def _name_in_wave(rows: PlacedRows, number: int) -> str:
    return f"{rows.name}-{number}"


def _journal_columns(rows: PlacedRows, batch: RequestBatch) -> dict[str, Any]:
    """Return the journal columns of finished rows that are not in the output."""
    special = [prompt.num_special for prompt in batch.prepared.prompts]
    return {**rows.places, SPECIAL: pa.array(special, pa.int64())}


class UnitGate:
    """Admits the units of one feeder by a deadline: call `admits` before each.

    A unit waits if it would miss the deadline at the rate of the run so far. Without a deadline all
    units are admitted.

    Args:
        read_stats: returns the pool counts of this run; it may block.
    """

    def __init__(
        self,
        deadline: UnitDeadline | None,
        read_stats: Callable[[], PoolStats],
        *,
        clock: Callable[[], float] = time.time,
        poll_s: float = _POLL_S,
    ) -> None:
        self._deadline, self._read_stats = deadline, read_stats
        self._clock, self._poll_s = clock, poll_s
        self._turn = asyncio.Lock()
        self._rows_admitted = 0
        # a warm pool has worked for other runs before
        self._busy_before: float | None = None

    async def admits(self, num_rows: int, has_to_stop: Callable[[], Awaitable[bool]]) -> bool:
        """Wait while a unit would miss the deadline; return whether it may start.

        It may not if the run stops, or if it still misses the deadline once no other rows are open.

        Args:
            num_rows: rows of the unit, except those finished by earlier runs.
            has_to_stop: returns whether the run stops.
        """
        if self._deadline is None or not num_rows:
            return True
        async with self._turn:
            while not await has_to_stop():
                progress = await self._progress()
                if is_in_time(progress, num_rows, self._deadline, self._clock()):
                    self._rows_admitted += num_rows
                    return True
                if not progress.rows_open or self._clock() >= self._deadline.ends_at:
                    return False
                await asyncio.sleep(self._poll_s)
        return False

    async def _progress(self) -> RunProgress:
        stats = await asyncio.to_thread(self._read_stats)
        if self._busy_before is None:
            self._busy_before = stats.busy_s
        # rows of this feeder may not have reached the pool yet
        received = max(self._rows_admitted, stats.rows_received)
        return RunProgress(
            rows_done=stats.rows_done,
            rows_open=max(0, received - stats.rows_done),
            rows_running=float(sum(replica.num_running for replica in stats.replicas)),
            work_s=max(0.0, stats.busy_s - self._busy_before) / max(1, stats.num_ready),
        )


class UnitFeeder(PlacedFeeder):
    """A stage that writes commit units; it journals finished rows every `flush_every_s` seconds.

    With a deadline, units that would miss it are not started.
    """

    writer: ClassVar[UnitWriter]
    flush_every_s: ClassVar[float]
    deadline: ClassVar[UnitDeadline | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._slots = asyncio.Semaphore(_UNITS_IN_FLIGHT)
        self._gate = UnitGate(self.deadline, partial(self.pool.stats, self.client))
        self._is_stopped, self._asked_s = False, -math.inf
        self._asking = asyncio.Lock()

    async def _map(self, table: pa.Table) -> pa.Table:
        """Answer the units of a block, write them, and return a receipt for each."""
        table = table.sort_by(RANK)
        units, _ = places(table)
        starts = np.flatnonzero(np.diff(units, prepend=-1)).tolist()
        runs = [
            self._run(int(units[start]), table.slice(start, stop - start))
            for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True)
        ]
        rows = [asdict(receipt) for receipt in await _all_of(runs) if receipt is not None]
        return pa.Table.from_pylist(rows, schema=RECEIPT_SCHEMA)

    async def _run(self, unit: int, rows: pa.Table) -> UnitReceipt | None:
        async with self._slots:
            if await self._has_to_stop():
                return None
            started = time.time()
            written = await asyncio.to_thread(self.writer.receipt_of, unit)
            receipt = written or await self._write(unit, rows)
        return None if receipt is None else UnitReceipt.of(receipt, started=started)

    async def _write(self, unit: int, rows: pa.Table) -> Receipt | None:
        known = await asyncio.to_thread(self.writer.journal_of, unit)
        if not await self._gate.admits(rows.num_rows - known.num_rows, self._has_to_stop):
            return None
        receipt = None
        reach("before_unit", unit=unit)
        number = self.writer.stored.first_unit + unit
        self.pool.note_unit(number, "started", client=self.client)
        try:
            rows = with_groups_of(rows, self.writer.stored.hash)
            watch = await asyncio.to_thread(UnitWatch, self.writer, unit)
            calls = await self._open_calls(rows, known, watch)
            finished = await self._finish_unit(watch, calls, known)
            if finished is not None:
                reach("after_rows", unit=unit)
                receipt = await asyncio.to_thread(self.writer.deliver, unit, finished)
        finally:
            state = "left" if receipt is None else "written"
            self.pool.note_unit(number, state, client=self.client)
        # unfinished rows are cancelled, finished ones are in the journal
        self._forget(calls)
        return receipt

    async def _open_calls(
        self, rows: pa.Table, known: pa.Table, watch: UnitWatch
    ) -> list[PlacedRows]:
        """Return the calls of a unit, without journaled rows."""
        open_calls, known_positions = [], known.column(POS).to_numpy()
        for call in _calls(rows):
            placed = PlacedRows.of(call, watch)
            is_open = ~np.isin(placed.places[POS].to_numpy(), known_positions)
            if not is_open.any():
                continue
            # a call of a dead feeder that the pool still has is taken over unchanged
            has_named = self.pool.has_named
            if not is_open.all() and not await has_named(client=self.client, name=placed.name):
                left = call.filter(pa.array(is_open))
                placed = PlacedRows.of(left, watch, name=placed.name)
            open_calls.append(placed)
        return open_calls

    async def _has_to_stop(self) -> bool:
        """Return whether the run stops; units share a request a second."""
        async with self._asking:
            if not self._is_stopped and time.monotonic() >= self._asked_s + _WAKE_S:
                self._is_stopped = await self.pool.is_stopped(client=self.client)
                self._asked_s = time.monotonic()
        return self._is_stopped

    async def _finish_unit(
        self, watch: UnitWatch, calls: Sequence[PlacedRows], known: pa.Table
    ) -> pa.Table | None:
        """Return the rows of a unit, journaling them regularly; None if the run stops before."""
        before = frozenset(known.column(POS).to_pylist())
        finished, kept, kept_s = [known], set(before), time.monotonic()
        wake_s = min(_WAKE_S, self.flush_every_s)
        pending = {asyncio.ensure_future(self._answer_placed(call)): call for call in calls}
        try:
            while pending:
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait(pending, timeout=wake_s, return_when=first)
                finished += [_without(call.result(), before) for call in done]
                pending = {call: rows for call, rows in pending.items() if call not in done}
                stops = bool(pending) and await self._has_to_stop()
                is_due = time.monotonic() >= kept_s + self.flush_every_s
                if pending and (is_due or stops):
                    kept |= await self._keep(watch.unit, finished, pending.values(), kept)
                    await watch.flush()
                    kept_s = time.monotonic()
                if stops:
                    return None
        except ReplicaError:
            # no engine is left, but finished rows may have cost money
            over = [call for call in pending if call.done() and call.exception() is None]
            finished += [_without(call.result(), before) for call in over]
            left = [rows for call, rows in pending.items() if call not in over]
            await self._keep(watch.unit, finished, left, kept)
            raise
        finally:
            for call in pending:
                call.cancel()
        return self.writer.joined(finished)

    async def _keep(
        self, unit: int, finished: Sequence[pa.Table], pending: Iterable[PlacedRows], kept: Set[int]
    ) -> set[int]:
        """Write finished rows, also of open calls, to the journal; return the new positions."""
        tables = [*finished, *await self._placed_so_far(pending)]
        new = self.writer.joined([_without(table, kept) for table in tables])
        if new.num_rows:
            await asyncio.to_thread(self.writer.flush, unit, new)
        return set(new.column(POS).to_pylist())


async def _all_of(runs: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return all results; the first error cancels the others."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException as error:
        await end_calls(tasks, error)
        raise


def _without(finished: pa.Table, kept: Set[int]) -> pa.Table:
    """Return finished rows that are not journaled."""
    is_new = [position not in kept for position in finished.column(POS).to_pylist()]
    return finished.filter(pa.array(is_new, pa.bool_()))


def _calls(rows: pa.Table) -> list[pa.Table]:
    """Cut the rows of a unit into calls, at a nearby border between groups if possible."""
    groups = take_groups(rows)
    calls, start = [], 0
    while start < rows.num_rows:
        stop = min(start + _CALL_ROWS, rows.num_rows)
        furthest = min(start + _MAX_CALL_ROWS, rows.num_rows)
        while stop < furthest and groups[stop] >= 0 and groups[stop] == groups[stop - 1]:
            stop += 1
        calls.append(rows.slice(start, stop - start))
        start = stop
    return calls
