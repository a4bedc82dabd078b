"""Counts of what a pool cannot count: rows that never reach it, and errors found after it."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from raybatch.types import PoolStats


class RowCounts:
    """The counts of one run, which its feeders add to and its driver reads; cheap to pickle.

    They serve the progress display. A feeder whose batches are done again counts their failed
    rows again; what is true at the end is counted from the output.

    Args:
        tally: the actor that holds them.
    """

    def __init__(self, tally: ActorHandle) -> None:
        self._tally = tally

    @classmethod
    def start(cls) -> Self:
        """Make an actor without resources of its own."""
        return cls(ray.remote(_Tally).options(num_cpus=0).remote())

    async def add(self, num_rows: int, errors: Mapping[str, int]) -> None:
        """Note rows that are done, and error classes with their rows."""
        if num_rows or errors:
            with suppress(RayError):  # counts that are lost end no job
                await self._tally.add.remote(num_rows, dict(errors))

    def added_to(self, stats: PoolStats) -> PoolStats:
        """Return the state of the pool with these rows and errors; without them if they are lost.

        Rows that never reached the pool count as handed over and done.
        """
        try:
            num_rows, errors = ray.get(self._tally.read.remote())
        except RayError:
            return stats
        return replace(
            stats,
            rows_received=stats.rows_received + num_rows,
            rows_done=stats.rows_done + num_rows,
            errors=dict(Counter(stats.errors) + Counter(errors)),
        )

    def stop(self) -> None:
        """End the actor."""
        ray.kill(self._tally, no_restart=True)


class _Tally:
    def __init__(self) -> None:
        self._num_rows = 0
        self._errors: Counter[str] = Counter()

    def add(self, num_rows: int, errors: dict[str, int]) -> None:
        self._num_rows += num_rows
        self._errors.update(errors)

    def read(self) -> tuple[int, dict[str, int]]:
        return self._num_rows, dict(self._errors)
