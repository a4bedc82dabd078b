"""Polls a pool while a dataset runs, and keeps the moments at which its work began and ended."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from raybatch.errors import error_text
from raybatch.records.types import PoolStats

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[PoolStats, int], None]

_POLL_S = 0.25
_PROGRESS_EVERY_S = 1.0


def is_working(stats: PoolStats, received_before: int = 0) -> bool:
    """Return whether a ready engine has been handed rows."""
    # rows without tokens never reach an engine
    return stats.num_ready > 0 and stats.prompt_tokens_received > received_before


class RunClock:
    """The moments of one run, in seconds since its start.

    Attributes:
        started_s: when the first row was handed to a ready engine; None before.
        ended_s: when the last row came back; None before.
    """

    def __init__(self) -> None:
        self._origin_s = time.monotonic()
        self.started_s: float | None = None
        self.ended_s: float | None = None

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._origin_s


class PoolWatch:
    """Polls a pool in a thread while a dataset runs; use as a context manager.

    Args:
        callback: called about every second, and at the end of a run without an exception.

    Attributes:
        rows_done: of this run, when the pool was last asked.
    """

    def __init__(
        self,
        read_stats: Callable[[], PoolStats],
        num_rows: int,
        callback: ProgressCallback,
        clock: RunClock,
    ) -> None:
        self._read_stats = read_stats
        self._num_rows = num_rows
        self._callback = callback
        self._clock = clock
        self.rows_done = 0
        self._has_failed = False
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="raybatch-progress", daemon=True)

    def __enter__(self) -> Self:
        self._before = self._read_stats()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        if kind is None:
            self._report(self._read_stats())

    def _poll(self) -> None:
        next_callback_s = 0.0
        while not self._is_done.wait(_POLL_S):
            try:
                stats = self._read_stats()
            except Exception:  # the run itself reports what is wrong with the pool
                logger.debug("the pool's state could not be read", exc_info=True)
                continue
            now_s = self._clock.elapsed_s()
            self._note(stats, now_s)
            if now_s >= next_callback_s:
                self._report(stats)
                next_callback_s = now_s + _PROGRESS_EVERY_S

    def _report(self, stats: PoolStats) -> None:
        try:
            self._callback(stats, self._num_rows)
        except Exception as error:  # rows do not depend on who looks on, and limits are still kept
            if not self._has_failed:
                logger.warning("the progress callback failed: %s", error_text(error))
            self._has_failed = True

    def _note(self, stats: PoolStats, now_s: float) -> None:
        self.rows_done = stats.rows_done - self._before.rows_done
        works = is_working(stats, self._before.prompt_tokens_received)
        if works and self._clock.started_s is None:
            self._clock.started_s = now_s
        if stats.rows_done < stats.rows_received:
            self._clock.ended_s = None
        elif works and self._clock.ended_s is None:
            self._clock.ended_s = now_s
