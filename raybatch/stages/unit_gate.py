"""Holds units back that would not be done by a deadline, by the rate of the run so far."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from raybatch.policy.deadline import Pace, UnitDeadline, is_in_time
from raybatch.records.pool_stats import PoolStats

# a unit that waits looks so often whether there is time for it
_LOOK_S = 1.0


class UnitGate:
    """Admits the units of one feeder, one after the other; without a deadline all at once.

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
