"""Warnings that a feeder logs once; Ray forwards its log to the driver's terminal."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from raybatch.actors.replicas.placement import connected_ray

logger = logging.getLogger(__name__)

# a feeder that never held more rows than this, over the first calls, starves an engine
_FEW_ROWS = 256
_CALLS_BEFORE_HINT = 4

# read tasks may hold the CPUs for a moment, so the first check comes after some seconds
_WAITS_FOR_ROWS_S = (5.0, 10.0, 20.0)

_ROWS_BEFORE_ALARM = 20
_MAX_ERROR_LENGTH = 300


class FewRowsHint:
    """Warns once if Ray passes a feeder too few rows at once to fill the engines."""

    def __init__(self, calls_per_feeder: int) -> None:
        self._calls_per_feeder = calls_per_feeder
        self._num_calls = self._num_rows = self._most_rows = 0

    @contextmanager
    def holding(self, num_rows: int) -> Iterator[None]:
        """Count the rows that a call holds until it ends."""
        self._num_rows += num_rows
        self._most_rows = max(self._most_rows, self._num_rows)
        try:
            yield
        finally:
            self._num_rows -= num_rows
            self._num_calls += 1
            if self._num_calls == _CALLS_BEFORE_HINT and self._most_rows < _FEW_ROWS:
                logger.warning(
                    "Ray passes at most %d rows at once, too few to fill the engines; use "
                    "stage.apply(ds) instead of ds.map_batches(stage) to keep %d row batches in "
                    "flight",
                    self._most_rows,
                    self._calls_per_feeder,
                )


def free_cpus() -> float:
    """Return the free CPUs of the cluster."""
    import ray  # slow to import, and only used in an actor

    return float(ray.available_resources().get("CPU", 0))


class NoCpuHint:
    """Warns once if no rows arrive and feeders may hold the CPUs of the read tasks.

    Ray Data gives every actor of a plain `map_batches` one CPU: with two CPUs, two such stages
    leave none for reading, and the job deadlocks. It checks after `waits_s` seconds without rows.
    """

    def __init__(
        self,
        free_cpus: Callable[[], float] = free_cpus,
        waits_s: Sequence[float] = _WAITS_FOR_ROWS_S,
    ) -> None:
        self._free_cpus = free_cpus
        self._waits_s = waits_s
        self._has_rows = threading.Event()

    def start(self) -> None:
        """Start a thread that checks, if this actor holds a CPU."""
        if own_cpus() >= 1:
            threading.Thread(target=self.poll, name="raybatch-no-cpu-hint", daemon=True).start()

    def stop(self) -> None:
        """Stop checking, since rows have arrived."""
        self._has_rows.set()

    def poll(self) -> None:
        """Wait for rows, and warn if none arrive and no CPU is free."""
        for wait_s in self._waits_s:
            if self._has_rows.wait(wait_s):
                return
            if self._free_cpus() < 1:
                logger.warning(
                    "no rows received yet, and less than one CPU of the cluster is free: every "
                    "plain ds.map_batches(LLMStage(...)) holds one CPU or more, which can starve "
                    "the read tasks and deadlock the job. If no rows follow, use "
                    "LLMStage(...).apply(ds), or ds.map_batches(LLMStage(...), num_cpus=0), for "
                    "every stage; one of two stages also needs output_prefix"
                )
                return


class AllFailedAlarm:
    """Warns once if every row so far has failed, as with a wrong template or function."""

    def __init__(self) -> None:
        self._is_settled, self._num_failed, self._first_error = False, 0, ""

    def see(self, errors: Sequence[str]) -> None:
        """Note the errors of the rows of one call, "" for a good row."""
        self._is_settled = self._is_settled or not all(errors)
        if self._is_settled or not errors:
            return
        self._first_error = self._first_error or errors[0]
        self._num_failed += len(errors)
        self._is_settled = self._num_failed >= _ROWS_BEFORE_ALARM
        if self._is_settled:
            # ASCII: data of the user may contain control codes of terminals
            logger.warning(
                "EVERY ONE of the first %d rows failed, and the job continues; the first error: "
                "%a. If the prompt's template, column or function is wrong, stop the job and fix "
                "it; on_error='raise' ends a job at its first error row",
                self._num_failed,
                self._first_error[:_MAX_ERROR_LENGTH],
            )


def own_cpus() -> float:
    """Return the CPUs that Ray holds for this actor; 0 outside an actor."""
    ray = connected_ray()
    if ray is None:
        return 0.0
    context = ray.get_runtime_context()
    held = {} if context.get_actor_id() is None else context.get_assigned_resources()
    return float(held.get("CPU", 0))
