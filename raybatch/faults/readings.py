"""What the processes of a job take while it runs, and whether that grows with finished rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import psutil

from raybatch.durable.layout import STAGING
from raybatch.durable.protocols import Store
from raybatch.faults.drivers import Driver

__all__ = ["Reading", "bytes_per_row", "longest_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One look at the processes of a run.

    Args:
        run: number of the driver, from 0.
        at_s: since the soak began.
        rows_done: in the output, those of earlier runs among them.
        driver_bytes: resident memory of the driver.
        num_handles: files, sockets and pipes that the driver holds.
        coordinator_bytes: resident memory of the coordinator; None where it does not run.
        num_staged: files in the staging folder of the output.
    """

    run: int
    at_s: float
    rows_done: int
    driver_bytes: int
    num_handles: int
    coordinator_bytes: int | None
    num_staged: int

    @classmethod
    def of(
        cls, driver: Driver, store: Store, *, run: int, at_s: float, rows_done: int
    ) -> Self | None:
        """Look at a driver that may end meanwhile; then there is nothing to tell.

        Args:
            driver: that runs.
            store: of the sink.
            run: number of the driver.
            at_s: since the soak began.
            rows_done: in the output.
        """
        try:
            process = psutil.Process(driver.process.pid)
            coordinators = driver.workers("Coordinator")
            return cls(
                run=run,
                at_s=round(at_s, 1),
                rows_done=rows_done,
                driver_bytes=process.memory_info().rss,
                num_handles=process.num_fds(),
                coordinator_bytes=coordinators[0].memory_info().rss if coordinators else None,
                num_staged=len(store.names(STAGING)),
            )
        except psutil.Error:
            return None


def bytes_per_row(
    readings: Iterable[Reading], bytes_of: Callable[[Reading], int | None]
) -> float | None:
    """Return how fast memory grows with finished rows: one slope, fitted to all runs at once.

    Every run begins anew, so each has a level of its own.

    Args:
        readings: of several runs.
        bytes_of: memory in a reading; readings without it are left out.

    Returns:
        Bytes a row; None where no run has two readings with different rows.
    """
    runs = defaultdict(list)
    for reading in readings:
        num_bytes = bytes_of(reading)
        if num_bytes is not None:
            runs[reading.run].append((reading.rows_done, num_bytes))
    spread = product = 0.0
    for points in runs.values():
        rows, memory = np.array(points, np.float64).T
        rows = rows - rows.mean()
        spread += float(rows @ rows)
        product += float(rows @ memory)
    return product / spread if spread else None


def longest_run(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings of the run that lived longest."""
    runs = defaultdict(list)
    for reading in readings:
        runs[reading.run].append(reading)
    return max(runs.values(), key=lambda run: run[-1].at_s - run[0].at_s, default=[])
