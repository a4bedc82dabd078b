"""Runs planned rows through feeders, and collects receipts or rows."""

import asyncio
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.executors.calls import LocalLoop
from raybatch.config import WaveConfig
from raybatch.durable.commit import committed
from raybatch.durable.fault_points import reach
from raybatch.durable.storage import error_context, store_of
from raybatch.planning.planned import LargePlan, PlannedInput
from raybatch.planning.store import StoredPlan, read_all_units, read_plans
from raybatch.policy.deadline import UnitDeadline
from raybatch.stages.feeder import CALLS_PER_FEEDER, StageFeeder, end_calls
from raybatch.stages.unit_feeder import PlacedFeeder, UnitFeeder
from raybatch.stages.unit_writer import UnitReceipt, UnitWriter


class RunObserver(Protocol):
    """Observes the commit units of a run."""

    def planned(self, stored: StoredPlan, is_done: npt.NDArray[np.bool_]) -> None:
        """Note the plan that runs next, and which units of the whole output are written."""

    def unit_done(self, receipt: UnitReceipt) -> None:
        """Note the receipt of a written unit."""


class UnitChoice(Protocol):
    """Chooses the units of a plan that meet a deadline."""

    def offered(
        self,
        stored: StoredPlan,
        planned: PlannedInput | LargePlan | None,
        todo: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Return which of the units to do, `todo`, can meet the deadline, bool [units].

        Raises:
            ConfigError: none can.
        """

    def of_units(self) -> UnitDeadline:
        """Return the deadline against which a feeder checks each unit before it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederRunner:
    """Runs planned rows through the feeders of a stage, local ones or Ray actors."""

    stage: type[StageFeeder]
    sink: str
    schema: pa.Schema
    attempt: str
    flush_every_s: float
    observer: RunObserver
    waves: tuple[WaveConfig, ...] = ()
    is_local: bool = False
    deadline: UnitChoice | None = None

    def todo(
        self, stored: StoredPlan, planned: PlannedInput | LargePlan | None
    ) -> npt.NDArray[np.bool_]:
        with error_context(f"sink {self.sink!r} cannot be read"):
            units = read_all_units(self.sink, read_plans(self.sink))
            done = committed(store_of(self.sink), units)
        reach("after_list")
        self.observer.planned(stored, done)
        todo: npt.NDArray[np.bool_] = ~done[stored.first_unit :][: stored.num_units]
        return todo if self.deadline is None else self.deadline.offered(stored, planned, todo)

    def run(self, stored: StoredPlan, rows: Any) -> None:  # noqa: ANN401 - Ray has no types
        writer = self._writer(stored)
        deadline = None if self.deadline is None else self.deadline.of_units()
        of_run = {"writer": writer, "flush_every_s": self.flush_every_s, "deadline": deadline}
        feeder = _feeder(UnitFeeder, self.stage, self.waves, **of_run)
        # an error of the observer cancels the calls in flight
        with closing(_results(rows, feeder, is_local=self.is_local)) as results:
            for receipts in results:
                for row in receipts.to_pylist():
                    self.observer.unit_done(UnitReceipt(**row))

    def collect(self, rows: Sequence[pa.Table]) -> pa.Table:
        return collect_rows(rows, self.stage, waves=self.waves, is_local=self.is_local)

    def keep(self, stored: StoredPlan, units: npt.NDArray[np.int64], finished: pa.Table) -> None:
        writer = self._writer(stored)
        for unit in np.unique(units).tolist():
            if writer.receipt_of(unit) is not None:
                continue
            started = time.time()
            rows = writer.joined([finished.filter(pa.array(units == unit))])
            receipt = writer.deliver(unit, rows)
            if receipt is not None:
                self.observer.unit_done(UnitReceipt.of(receipt, started=started))

    def write_nothing(self, stored: StoredPlan) -> None:
        """Write the one part of an empty input, so that readers find the columns."""
        writer = self._writer(stored)
        writer.deliver(0, writer.journal_of(0))

    def _writer(self, stored: StoredPlan) -> UnitWriter:
        return UnitWriter(
            sink=self.sink,
            store=store_of(self.sink),
            stored=stored,
            schema=self.schema,
            output=self.stage.config.output,
            attempt=self.attempt,
        )


def collect_rows(
    rows: Sequence[pa.Table],
    stage: type[StageFeeder],
    *,
    waves: tuple[WaveConfig, ...],
    is_local: bool,
) -> pa.Table:
    """Generate planned rows; return them with their places (journal schema), in any order."""
    feeder = _feeder(PlacedFeeder, stage, waves)
    return pa.concat_tables(list(_results(rows, feeder, is_local=is_local)))


def _feeder(
    base: type[StageFeeder],
    stage: type[StageFeeder],
    waves: tuple[WaveConfig, ...],
    **more: Any,  # noqa: ANN401
) -> type[StageFeeder]:
    of_stage = {name: getattr(stage, name) for name in ("config", "pool", "client")}
    return type(base.__name__, (base,), {**of_stage, "waves": waves, **more})


def _results(
    rows: Any,  # noqa: ANN401 - Ray has no types
    feeder: type[StageFeeder],
    *,
    is_local: bool,
) -> Generator[pa.Table, None, None]:
    if is_local:
        return local_results(rows, feeder)
    from raybatch.stages.ray_context import ray_results  # slow to load

    return ray_results(rows, feeder)


def local_results(
    tables: Iterable[pa.Table], feeder: type[StageFeeder]
) -> Generator[pa.Table, None, None]:
    """Yield results of a feeder as they complete; the first error cancels the others."""
    left, answer = iter(tables), feeder()
    pending: set[asyncio.Task[pa.Table]] = set()

    async def turn() -> tuple[list[pa.Table], BaseException | None]:
        """Start calls, and wait for some: return (results, first error); no results at the end."""
        try:
            for table in islice(left, CALLS_PER_FEEDER - len(pending)):
                pending.add(asyncio.ensure_future(answer(table)))
            if not pending:
                return [], None
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        except BaseException as broken:
            await end_calls(pending, broken)
            raise
        pending.difference_update(done)
        errors = [call.exception() for call in done if call.exception() is not None]
        error = next(iter(errors), None)
        if error is not None:
            await end_calls(pending, error)
        return [call.result() for call in done if call.exception() is None], error

    # the caller's thread may run an event loop, as in a notebook, and must get Ctrl-C
    with closing(LocalLoop("raybatch-feeder")) as loop:
        while True:
            results, error = loop.begin(turn()).result()
            yield from results
            if error is not None:
                raise error
            if not results:
                return
