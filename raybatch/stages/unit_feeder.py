"""`UnitFeeder`: a stage that answers whole units of a plan and writes each as it completes.

Only receipts travel back through Ray: a lost object or a task that Ray runs again costs no row.
"""

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.config import WaveConfig
from raybatch.durable import journal
from raybatch.durable.fault_points import reach
from raybatch.durable.journal import POS
from raybatch.durable.units import Receipt
from raybatch.stages.batches import to_table
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.plan_columns import RANK, ROW, places, take_groups, with_columns
from raybatch.stages.ray_errors import message_kept
from raybatch.stages.receipts import RECEIPT_SCHEMA, UnitReceipt
from raybatch.stages.tally import row_statuses
from raybatch.stages.unit_writer import UnitWriter

__all__ = ["PlacedFeeder", "UnitFeeder"]

# units whose rows a feeder has handed to the pool
_UNITS_IN_FLIGHT = 16
# rows of a unit that are asked for together: finished ones can be kept before the unit is complete
_ROWS_PER_CALL = 256
_MAX_ROWS_PER_CALL = 512
# an open unit looks so often whether finished rows are to be kept, or the run has to stop
_WAKE_S = 2.0

_T = TypeVar("_T")


class PlacedFeeder(StageFeeder):
    """A stage that says of finished rows where they belong, as the journal does.

    Attributes:
        waves: rules by which rows are asked again, one after the other.
    """

    waves: ClassVar[tuple[WaveConfig, ...]] = ()

    async def __call__(self, batch: Any) -> pa.Table:  # noqa: ANN401 - whatever Ray Data has
        self._no_cpu_hint.stop()
        with message_kept():
            return await self._answer_placed(to_table(batch))

    async def _answer_placed(self, table: pa.Table) -> pa.Table:
        units, positions = places(table)
        columns = {POS: pa.array(positions), journal.ROW: table.column(ROW)}
        # the same for whoever answers these rows after this process died
        name = hashlib.blake2b(units.tobytes() + positions.tobytes(), digest_size=16).hexdigest()
        finished = await self._answer(table, name=name)
        for number, wave in enumerate(self.waves):
            finished = await self._ask_again(table, finished, wave, name=f"{name}-{number}")
        return with_columns(finished, columns)

    async def _ask_again(
        self, table: pa.Table, finished: pa.Table, wave: WaveConfig, *, name: str
    ) -> pa.Table:
        """Return finished rows where those that the rule is for have a new result."""
        statuses = row_statuses(finished, self.config.output)
        chosen = np.array([i for i, status in enumerate(statuses) if status in wave.on], np.int64)
        if not len(chosen):
            return finished
        again = await self._answer(table.take(chosen), changes=wave.sampling, name=name)
        name = self.config.output_prefix + "attempts"
        place = again.column_names.index(name)
        before = finished.column(name).take(chosen)
        attempts = pc.add(again.column(name), before).cast(pa.int32())
        again = again.set_column(place, again.schema.field(name), attempts)
        source = np.arange(finished.num_rows)
        source[chosen] = finished.num_rows + np.arange(len(chosen))
        return pa.concat_tables([finished, again]).take(source)


class UnitFeeder(PlacedFeeder):
    """A stage that writes.

    Attributes:
        writer: of the run.
        flush_every_s: finished rows of a unit that is not complete are kept so often.
        stop_flag: actor that says whether no further unit may start; None where nobody says so.
    """

    writer: ClassVar[UnitWriter]
    flush_every_s: ClassVar[float]
    stop_flag: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self._slots = asyncio.Semaphore(_UNITS_IN_FLIGHT)
        self._is_stopped = False

    async def __call__(self, batch: Any) -> pa.Table:  # noqa: ANN401 - whatever Ray Data has
        """Answer the units of a block, write them, and return a receipt for each.

        Raises:
            ConfigError: the sink cannot be written.
            RowError: a row failed and the stage has on_error="raise".
        """
        self._no_cpu_hint.stop()
        with message_kept():
            table = to_table(batch).sort_by(RANK)
            units, _ = places(table)
            starts = np.flatnonzero(np.diff(units, prepend=-1)).tolist()
            runs = [
                self._run(int(units[start]), table.slice(start, stop - start))
                for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True)
            ]
            receipts = [receipt for receipt in await _all_of(runs) if receipt is not None]
        rows = [receipt.to_row() for receipt in receipts]
        return pa.Table.from_pylist(rows, schema=RECEIPT_SCHEMA)

    async def _run(self, unit: int, rows: pa.Table) -> UnitReceipt | None:
        async with self._slots:
            if await self._has_to_stop():
                return None
            started = time.time()
            receipt = await asyncio.to_thread(self.writer.receipt_of, unit)
            if receipt is None:
                receipt = await self._write(unit, rows)
        if receipt is None:
            return None
        return UnitReceipt.of(receipt, started=started, ended=time.time())

    async def _write(self, unit: int, rows: pa.Table) -> Receipt | None:
        receipt = None
        reach("before_unit", unit=unit)
        self.pool.note_unit(unit, "started", client=self.client)
        try:
            known = await asyncio.to_thread(self.writer.journal_of, unit)
            finished = await self._finish_unit(unit, _without(rows, known), known)
            if finished is None:
                return None
            reach("after_rows", unit=unit)
            receipt = await asyncio.to_thread(self.writer.deliver, unit, finished)
        finally:
            state = "left" if receipt is None else "written"
            self.pool.note_unit(unit, state, client=self.client)
        return receipt

    async def _has_to_stop(self) -> bool:
        if not self._is_stopped and self.stop_flag is not None:
            self._is_stopped = await self.stop_flag.is_set.remote()
        return self._is_stopped

    async def _finish_unit(self, unit: int, rows: pa.Table, known: pa.Table) -> pa.Table | None:
        """Generate the rows of a unit; what is finished is kept from time to time.

        Returns:
            All rows; None where the run stops before, and finished rows are in the journal.
        """
        kept, kept_s = [known], time.monotonic()
        new: list[pa.Table] = []
        pending = {asyncio.ensure_future(self._answer_placed(call)) for call in _calls(rows)}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=_WAKE_S, return_when=asyncio.FIRST_COMPLETED
                )
                new += [call.result() for call in done]
                stops = bool(pending) and await self._has_to_stop()
                is_due = time.monotonic() >= kept_s + self.flush_every_s
                if new and pending and (is_due or stops):
                    await asyncio.to_thread(self.writer.flush, unit, self.writer.joined(new))
                    kept, new, kept_s = kept + new, [], time.monotonic()
                if stops:
                    return None
        finally:
            for call in pending:
                call.cancel()
        return self.writer.joined(kept + new)


async def _all_of(runs: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return all results; the first error cancels the others."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _without(rows: pa.Table, known: pa.Table) -> pa.Table:
    """Return the rows that are not in the journal."""
    if not known.num_rows:
        return rows
    _, positions = places(rows)
    is_known = np.isin(positions, known.column(POS).to_numpy())
    return rows.filter(pa.array(~is_known))


def _calls(rows: pa.Table) -> list[pa.Table]:
    """Cut the rows of a unit into calls, at borders between groups where one is near."""
    groups = take_groups(rows)
    calls, start = [], 0
    while start < rows.num_rows:
        stop = min(start + _ROWS_PER_CALL, rows.num_rows)
        furthest = min(start + _MAX_ROWS_PER_CALL, rows.num_rows)
        while stop < furthest and groups[stop] >= 0 and groups[stop] == groups[stop - 1]:
            stop += 1
        calls.append(rows.slice(start, stop - start))
        start = stop
    return calls
