"""Stops a run early: no unit starts, and the finished rows of open ones are kept."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Self

from raybatch.config import LimitConfig
from raybatch.policy.limits import Spent, reason_to_stop
from raybatch.records.types import PoolStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WavesSoFar:
    """What retried rows have cost, and how rows ended that no wave retries any more.

    Args:
        again: state of the pool, counted for retried rows.
    """

    again: PoolStats
    rows_written: int
    rows_failed: int


class LimitWatch:
    """Compares what a run has spent with its limits, over all plans that it runs.

    Args:
        ending: called beside the limits; a text that it returns ends the run as a limit does.

    Attributes:
        reason: why the run is being stopped; None while it is not.
    """

    def __init__(
        self,
        limits: LimitConfig,
        before: PoolStats,
        *,
        ending: Callable[[], str | None] | None = None,
    ) -> None:
        self._limits = limits
        self._ending = ending
        self._before = before
        self._began_s = time.monotonic()
        self._earlier = self._spent = Spent()
        self.reason: str | None = None

    @property
    def cost(self) -> float:
        """What answers that have a price have cost so far."""
        return self._spent.cost

    def begin(self) -> None:
        """Begin another plan, whose rows are counted from 0."""
        self._earlier = self._spent

    def observe(self, stats: PoolStats, waves: WavesSoFar | None = None) -> str | None:
        """Take the state of the pool, counted for the plan that runs.

        Args:
            waves: where rows are asked again, what these counts do not hold.

        Returns:
            Why the run has to stop, when this is the first time that it has to.
        """
        earlier = self._earlier
        self._spent = Spent(
            wall_s=time.monotonic() - self._began_s,
            # a pool that has stopped since counts from 0 again
            engine_s=max(0.0, stats.busy_s - self._before.busy_s),
            num_replicas=stats.num_replicas,
            tokens=earlier.tokens + stats.prompt_tokens + stats.generated_tokens,
            cost=earlier.cost + stats.cost,
            rows_done=earlier.rows_done + stats.rows_done,
            rows_failed=earlier.rows_failed + sum(stats.errors.values()),
        )
        if waves is not None:
            again = waves.again.prompt_tokens + waves.again.generated_tokens
            self._spent = replace(
                self._spent,
                tokens=self._spent.tokens + again,
                cost=self._spent.cost + waves.again.cost,
                rows_done=waves.rows_written,
                rows_failed=waves.rows_failed,
            )
        if self.reason is not None:
            return None
        self.reason = reason_to_stop(self._limits, self._spent)
        if self.reason is None and self._ending is not None:
            self.reason = self._ending()
        if self.reason is not None:
            logger.warning(
                "no more units are begun, and the same job started again goes on: %s", self.reason
            )
        return self.reason


class StopSignal:
    """Lets SIGTERM stop a run between units; use as a context manager around the run.

    A second SIGTERM ends the run at once, as Ctrl-C does, and so does the first one while there is
    nothing to keep. In a thread that gets no signals nothing is changed.

    Args:
        stop: lets no further unit start; called in a thread of its own.

    Attributes:
        has_arrived: whether a signal has.
    """

    def __init__(self, stop: Callable[[], None], is_at_work: Callable[[], bool]) -> None:
        self._stop = stop
        self._is_at_work = is_at_work
        self.has_arrived = False
        self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="raybatch-sigterm", daemon=True)
        self._is_handling = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_handling:
            # a handler that was not set from Python is not known: the default one comes back
            self._previous = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_handling:
            signal.signal(signal.SIGTERM, self._previous)
            self._is_over = True
            self._wake.set()
            self._thread.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # the main thread may be anywhere, inside a lock of Ray too: nothing is called from here
        is_first, self.has_arrived = not self.has_arrived, True
        if not is_first or not self._is_at_work():
            raise KeyboardInterrupt
        self._wake.set()

    def _wait(self) -> None:
        self._wake.wait()
        if not self._is_over:
            self._stop()
            logger.warning(
                "SIGTERM: no further unit starts, and the finished rows of open ones are kept; the "
                "same command goes on. Another SIGTERM, or Ctrl-C, ends the run at once"
            )
