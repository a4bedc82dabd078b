"""What the processes of a job take while it runs, and whether that grows with finished rows."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import psutil

from faultlab.drivers import Driver
from raybatch.durable.layout import STAGING
from raybatch.durable.storage import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One look at the processes of a run.

    Args:
        run: number of the driver, from 0.
        at_s: since the soak began.
        rows_done: in the output, those of earlier runs among them.
        driver_bytes: memory of the driver's own, without pages of the object store.
        num_handles: files, sockets and pipes that the driver holds.
        num_staged: files in the staging folder of the output.
    """

    run: int
    at_s: float
    rows_done: int
    driver_bytes: int
    num_handles: int
    coordinator_bytes: int
    num_staged: int

    @classmethod
    def of(
        cls, driver: Driver, store: Store, *, run: int, at_s: float, rows_done: int
    ) -> Self | None:
        """Look at a driver; one whose coordinator is gone is about to end, and tells nothing.

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
            if not coordinators:
                return None
            return cls(
                run=run,
                at_s=round(at_s, 1),
                rows_done=rows_done,
                driver_bytes=process.memory_full_info().uss,
                num_handles=process.num_fds(),
                coordinator_bytes=coordinators[0].memory_full_info().uss,
                num_staged=len(store.names(STAGING)),
            )
        except psutil.Error:
            return None


def bytes_per_row(readings: Sequence[Reading], bytes_of: Callable[[Reading], int]) -> float | None:
    """Return how fast memory grows with finished rows: the median of many slopes.

    Any two readings of one run make a slope (Theil and Sen), so that neither the level at which a
    run begins nor memory that is given back at once decides.

    Returns:
        Bytes a row; None where no run has two readings with different rows.
    """
    slopes = [np.empty(0)]
    for run in _by_run(readings):
        rows, memory = np.array([(each.rows_done, bytes_of(each)) for each in run], np.float64).T
        one, other = np.triu_indices(len(run), 1)
        apart = rows[other] - rows[one]
        is_apart = apart > 0
        slopes.append((memory[other] - memory[one])[is_apart] / apart[is_apart])
    every = np.concatenate(slopes)
    return float(np.median(every)) if len(every) else None


def longest_run(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings of the run that lived longest."""
    return max(_by_run(readings), key=lambda run: run[-1].at_s - run[0].at_s, default=[])


def _by_run(readings: Sequence[Reading]) -> list[list[Reading]]:
    runs = defaultdict(list)
    for reading in readings:
        runs[reading.run].append(reading)
    return list(runs.values())
