"""`UnitFeeder`: a stage that answers whole units of a plan and writes each as it completes.

Only receipts travel back through Ray: a lost object or a task that Ray runs again costs no row.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.config import WaveConfig
from raybatch.durable import journal
from raybatch.durable.fault_points import reach
from raybatch.durable.journal import POS
from raybatch.durable.units import Receipt
from raybatch.errors import ReplicaError
from raybatch.planning.tally import row_statuses
from raybatch.policy.deadline import Pace, UnitDeadline, is_in_time
from raybatch.records.pool_stats import PoolStats
from raybatch.rows.plan_columns import RANK, ROW, places, take_groups, with_columns
from raybatch.rows.schema import GOOD_STATUSES
from raybatch.stages.feeder import CALL_ROWS, RequestBatch, StageFeeder, end_calls, retry_client
from raybatch.stages.unit_writer import (
    RECEIPT_SCHEMA,
    SPECIAL,
    PlacedWatch,
    UnitReceipt,
    UnitWatch,
    UnitWriter,
)

# units whose rows a feeder has handed to the pool
_UNITS_IN_FLIGHT = 16
# rows of one call of the pool at most: finished ones can be kept before the unit is complete
_MAX_CALL_ROWS = 512
# an open unit looks so often whether finished rows are to be kept, or the run has to stop
_WAKE_S = 1.0
# a unit that waits looks so often whether there is time for it
_LOOK_S = 1.0

_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True, eq=False)
class PlacedRows:
    """Planned rows of one call of the pool, and how far they are.

    Args:
        places: columns of the journal, position in the unit and number in the source.
        name: of the call in the pool, the same for whoever answers these rows after a process died.
        watch: of the rows; None where they are of no unit.
        batch: the rows as the pool has them; None while they are being prepared.
        num_seen: results that `PlacedFeeder` has looked at before the call ends.
    """

    table: pa.Table
    places: Mapping[str, pa.ChunkedArray]
    name: str
    watch: PlacedWatch | None
    batch: RequestBatch | None = None
    num_seen: int = 0

    @classmethod
    def of(cls, table: pa.Table, unit: UnitWatch | None = None, *, name: str = "") -> "PlacedRows":
        """Read the places from the columns of the plan; rows of a named call keep its name."""
        units, positions = places(table)
        place_bytes = units.tobytes() + positions.tobytes()
        name = name or hashlib.blake2b(place_bytes, digest_size=16).hexdigest()
        columns = {POS: pa.chunked_array([positions]), journal.ROW: table.column(ROW)}
        watch = None if unit is None else unit.at(positions)
        return cls(table=table, places=columns, name=name, watch=watch)


class PlacedFeeder(StageFeeder):
    """A stage that adds to finished rows where they belong; `waves` are rules to retry them."""

    waves: ClassVar[tuple[WaveConfig, ...]] = ()

    async def _map(self, table: pa.Table) -> pa.Table:
        rows = PlacedRows.of(table)
        finished = await self._answer_placed(rows)
        self._forget([rows])
        return finished

    async def _answer_placed(self, rows: PlacedRows) -> pa.Table:
        # no wave retries what was too much for engines in earlier runs
        given_up = frozenset() if rows.watch is None else frozenset(rows.watch.given_up())
        rows.batch = batch = await self._prepare(rows.table, watch=rows.watch)
        finished = await self._answer(batch, name=rows.name)
        for number, wave in enumerate(self.waves):
            name = _name_in_wave(rows, number)
            finished = await self._retry(rows.table, finished, wave, name, given_up)
        return with_columns(finished, _journal_columns(rows, batch))

    def _forget(self, calls: Sequence[PlacedRows]) -> None:
        """Let the pool forget rows that no later feeder will ask for."""
        self.pool.forget([rows.name for rows in calls], client=self.client)
        for number in range(len(self.waves)):
            names = [_name_in_wave(rows, number) for rows in calls]
            self.pool.forget(names, client=retry_client(self.client))

    async def _placed_so_far(self, rows: PlacedRows) -> pa.Table | None:
        """Return the finished ones of rows at work, each once, which no wave would retry."""
        batch = rows.batch
        if batch is None or not batch.prepared.rows:
            return None
        results, rows.num_seen = await self.pool.so_far(
            client=self.client, name=rows.name, num_seen=rows.num_seen, watch=batch.watch
        )
        if not results.num_rows:
            return None
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
        """Return rows with new results; a row that has text keeps it where the new one failed."""
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
    """Return the columns that finished rows have in the journal beside those of the output."""
    special = [prompt.num_special for prompt in batch.prepared.prompts]
    return {**rows.places, SPECIAL: pa.array(special, pa.int64())}


class UnitGate:
    """Admits the units of one feeder, one after the other; without a deadline all at once.

    Units that would not be done by the deadline, by the rate of the run so far, are held back.

    Args:
        read_stats: of the pool, counted for this run; it may block.
    """

    def __init__(
        self,
        deadline: UnitDeadline | None,
        read_stats: Callable[[], PoolStats],
        *,
        clock: Callable[[], float] = time.time,
        look_s: float = _LOOK_S,
    ) -> None:
        self._deadline, self._read_stats = deadline, read_stats
        self._clock, self._look_s = clock, look_s
        self._turn = asyncio.Lock()
        self._rows_admitted = 0
        # a warm pool has worked for others before
        self._busy_before: float | None = None

    async def admits(self, num_rows: int, has_to_stop: Callable[[], Awaitable[bool]]) -> bool:
        """Wait while a unit would not be done in time; return whether it may begin.

        It may not once nothing is at work any more that could make time for it.

        Args:
            num_rows: of the unit, without those that earlier runs have done.
        """
        if self._deadline is None or not num_rows:
            return True
        async with self._turn:
            is_admitted = await self._wait(self._deadline, num_rows, has_to_stop)
            self._rows_admitted += num_rows if is_admitted else 0
        return is_admitted

    async def _wait(
        self, deadline: UnitDeadline, num_rows: int, has_to_stop: Callable[[], Awaitable[bool]]
    ) -> bool:
        while not await has_to_stop():
            pace = await self._pace()
            if is_in_time(pace, num_rows, deadline, self._clock()):
                return True
            if not pace.rows_open or self._clock() >= deadline.ends_at:
                return False
            await asyncio.sleep(self._look_s)
        return False

    async def _pace(self) -> Pace:
        stats = await asyncio.to_thread(self._read_stats)
        if self._busy_before is None:
            self._busy_before = stats.busy_s
        # rows of this feeder may still be on their way to the pool
        received = max(self._rows_admitted, stats.rows_received)
        return Pace(
            rows_done=stats.rows_done,
            rows_open=max(0, received - stats.rows_done),
            rows_running=float(sum(replica.num_running for replica in stats.replicas)),
            work_s=max(0.0, stats.busy_s - self._busy_before) / max(1, stats.num_ready),
        )


class UnitFeeder(PlacedFeeder):
    """A stage that writes; finished rows of an open unit are kept every `flush_every_s` seconds.

    With a deadline, units that would not be done in time are not begun.
    """

    writer: ClassVar[UnitWriter]
    flush_every_s: ClassVar[float]
    deadline: ClassVar[UnitDeadline | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._slots = asyncio.Semaphore(_UNITS_IN_FLIGHT)
        self._gate = UnitGate(self.deadline, partial(self.pool.stats, self.client))
        self._is_stopped = False

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
            watch = await asyncio.to_thread(UnitWatch, self.writer, unit)
            calls = await self._open_calls(rows, known, watch)
            finished = await self._finish_unit(watch, calls, known)
            if finished is not None:
                reach("after_rows", unit=unit)
                receipt = await asyncio.to_thread(self.writer.deliver, unit, finished)
        finally:
            state = "left" if receipt is None else "written"
            self.pool.note_unit(number, state, client=self.client)
        # what was not finished is cancelled, and what was is in the journal
        self._forget(calls)
        return receipt

    async def _open_calls(
        self, rows: pa.Table, known: pa.Table, watch: UnitWatch
    ) -> list[PlacedRows]:
        """Return the calls of a unit, without rows that are in the journal."""
        open_calls, known_positions = [], known.column(POS).to_numpy()
        for call in _calls(rows):
            placed = PlacedRows.of(call, watch)
            is_open = ~np.isin(placed.places[POS].to_numpy(), known_positions)
            if not is_open.any():
                continue
            # one that the pool still has from a feeder that died is made again as it was
            has_named = self.pool.has_named
            if not is_open.all() and not await has_named(client=self.client, name=placed.name):
                left = call.filter(pa.array(is_open))
                placed = PlacedRows.of(left, watch, name=placed.name)
            open_calls.append(placed)
        return open_calls

    async def _has_to_stop(self) -> bool:
        if not self._is_stopped:
            self._is_stopped = await self.pool.is_stopped(client=self.client)
        return self._is_stopped

    async def _finish_unit(
        self, watch: UnitWatch, calls: Sequence[PlacedRows], known: pa.Table
    ) -> pa.Table | None:
        """Return the rows of a unit, kept from time to time; None where the run stops before."""
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
            # no engine is left, and what is finished may have cost money
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
        """Write what is finished to the journal, also of open calls; return the new positions."""
        so_far = await asyncio.gather(*(self._placed_so_far(rows) for rows in pending))
        tables = [table for table in (*finished, *so_far) if table is not None]
        new = self.writer.joined([_without(table, kept) for table in tables])
        if new.num_rows:
            await asyncio.to_thread(self.writer.flush, unit, new)
        return set(new.column(POS).to_pylist())


async def _all_of(runs: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return all results; the first error ends the others."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException as error:
        await end_calls(tasks, error)
        raise


def _without(finished: pa.Table, kept: Set[int]) -> pa.Table:
    """Return finished rows that are not in the journal."""
    is_new = [position not in kept for position in finished.column(POS).to_pylist()]
    return finished.filter(pa.array(is_new, pa.bool_()))


def _calls(rows: pa.Table) -> list[pa.Table]:
    """Cut the rows of a unit into calls, at borders between groups where one is near."""
    groups = take_groups(rows)
    calls, start = [], 0
    while start < rows.num_rows:
        stop = min(start + CALL_ROWS, rows.num_rows)
        furthest = min(start + _MAX_CALL_ROWS, rows.num_rows)
        while stop < furthest and groups[stop] >= 0 and groups[stop] == groups[stop - 1]:
            stop += 1
        calls.append(rows.slice(start, stop - start))
        start = stop
    return calls
