"""Stops a run early: no unit starts, and the finished rows of open ones are kept."""

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from raybatch.config import LimitConfig
from raybatch.policy.limits import Spent, reason_to_stop
from raybatch.types import PoolStats

__all__ = ["LimitWatch", "StopFlag"]

logger = logging.getLogger(__name__)


class StopFlag:
    """An actor that feeders ask before they start a unit."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Let no further unit start."""
        self._is_set = True

    def is_set(self) -> bool:
        """Return whether no further unit may start."""
        return self._is_set


class LimitWatch:
    """Compares the state of a pool with the limits of a run.

    Args:
        limits: of the run.
        before: state of the pool when the run began.
        callback: is told what this is told.
        on_stop: is told once why the run is being stopped.

    Attributes:
        flag: to be asked by feeders; None where there are no limits.
        reason: why the run is being stopped; None while it is not.
    """

    def __init__(
        self,
        limits: LimitConfig,
        before: PoolStats,
        callback: Callable[[PoolStats, int], None],
        on_stop: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._before = before
        self._callback = callback
        self._on_stop = on_stop
        self._began_s = time.monotonic()
        self.flag: Any = None
        self.reason: str | None = None
        if limits != LimitConfig():
            self.flag = ray.remote(num_cpus=0)(StopFlag).remote()

    def __call__(self, stats: PoolStats, num_rows: int) -> None:
        """Take the state of the pool, stop the run if it has to be, and pass it on."""
        if self.flag is not None and self.reason is None:
            self.reason = reason_to_stop(self._limits, self._spent(stats))
            if self.reason is not None:
                self.flag.set.remote()
                logger.warning("the run stops, start it again to go on: %s", self.reason)
                self._on_stop(self.reason)
        self._callback(stats, num_rows)

    def _spent(self, stats: PoolStats) -> Spent:
        return Spent(
            wall_s=time.monotonic() - self._began_s,
            # a pool that has stopped since counts from 0 again
            engine_s=max(0.0, stats.busy_s - self._before.busy_s),
            num_replicas=stats.num_replicas,
            tokens=stats.prompt_tokens_done + stats.generated_tokens,
            rows_done=stats.rows_done,
            rows_failed=sum(stats.errors.values()),
        )
