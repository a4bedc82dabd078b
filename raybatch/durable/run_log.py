"""The log and the heartbeat of a run below the sink, for people and reports.

Neither decides anything about units. The log has JSON lines in segments, and one writer. Segments
are created whole, because object stores cannot append, so a killed run loses the unwritten lines:
those of a twentieth of its run time, at most five minutes.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raybatch.durable.layout import RUNS, heartbeat_name, heartbeat_run, run_log_name, run_log_run
from raybatch.durable.storage import Store
from raybatch.errors import error_text
from raybatch.redaction import redacted

logger = logging.getLogger(__name__)

_MIN_WAIT_S, _MAX_WAIT_S = 2.0, 300.0
_SHARE = 20
_TICK_S = 1.0
_MAX_LINES = 10_000

BEAT_EVERY_S = 30.0
# three heartbeats, to tolerate slow stores and clock skew
FRESH_S = 90.0


class RunLog:
    """Writes the log of one run, from any thread; errors of the store are logged, never raised.

    Secrets are redacted. Do not log prompts or outputs. `clock` returns seconds since 1970.
    """

    def __init__(self, store: Store, run_id: str, clock: Callable[[], float]) -> None:
        self.run_id = run_id
        self._store = store
        self._clock = clock
        self._lines: list[str] = []
        self._segment = 0
        self._began_s = self._written_s = clock()
        self._is_broken = False
        self._lock = threading.Lock()
        # serializes writing of segments, while further lines are added
        self._writing = threading.Lock()

    def write(self, event: str, *, level: str = "info", **values: Any) -> None:  # noqa: ANN401
        """Add a line; it stays in memory until the next `flush`."""
        line = {"ts": round(self._clock(), 3), "level": level, "event": event, "run": self.run_id}
        text = json.dumps(line | {name: _clean(value) for name, value in values.items()})
        with self._lock:
            self._lines.append(text)

    def flush_if_due(self) -> None:
        """Write the pending lines as a segment if the last one is old, or if there are many."""
        now_s = self._clock()
        wait_s = min(_MAX_WAIT_S, max(_MIN_WAIT_S, (now_s - self._began_s) / _SHARE))
        if now_s - self._written_s >= wait_s or len(self._lines) >= _MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the pending lines as the next segment."""
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, []
            self._written_s = self._clock()
            if not lines or self._is_broken:
                return
            data = "".join(line + "\n" for line in lines).encode()
            try:
                self._store.create(run_log_name(self.run_id, self._segment), data)
            except Exception as error:  # the run continues without its log
                self._is_broken = True
                logger.warning("stopped writing the log of this run: %s", error_text(error))
            self._segment += 1


def run_ids(store: Store) -> list[str]:
    """Return the ids of runs that have a log, not ordered by time."""
    runs = (run_log_run(name) for name in store.names(RUNS))
    return sorted({run for run in runs if run is not None})


def read_events(store: Store, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's log in order; unreadable ones are skipped with a warning.

    Memory holds one segment at a time.
    """
    for name in store.names(f"{RUNS}/{run_id}"):
        if run_log_run(name) != run_id:
            continue
        try:
            lines = store.read(name).splitlines()
        except Exception as error:  # a report without the log is better than none
            logger.warning("cannot read %s/%s: %s", store.uri, name, error_text(error))
            continue
        for line in lines:
            try:
                values = json.loads(line)
            except ValueError:
                logger.warning("skipping a line of %s/%s that is not JSON", store.uri, name)
                continue
            if isinstance(values, dict) and isinstance(values.get("event"), str):
                yield values


def _clean(value: Any) -> Any:  # noqa: ANN401 - whatever JSON takes
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {str(name): _clean(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run with a fresh heartbeat; `age_s` is the age of that, by the clocks of two hosts."""

    run_id: str
    age_s: float
    host: str
    pid: int
    path: str

    def __str__(self) -> str:
        return (
            f"run {self.run_id} (process {self.pid} on {self.host}) was alive {self.age_s:.0f} s "
            "ago"
        )

    @property
    def seems_dead(self) -> bool:
        """Whether its process is not on this host; another container may have the same name."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def beat(store: Store, run_id: str, now_s: float) -> None:
    """Write the heartbeat file of a run; `now_s` is in seconds since 1970."""
    record = {"ts": round(now_s, 3), "host": socket.gethostname(), "pid": os.getpid()}
    store.replace(heartbeat_name(run_id), json.dumps(record).encode())


@contextmanager
def beating(
    store: Store, run_id: str, clock: Callable[[], float], log: RunLog | None = None
) -> Iterator[None]:
    """Write heartbeats of a run until the context ends; write errors are logged, never raised.

    Also flushes `log` when due.
    """
    is_over = threading.Event()

    def tried(write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # each file system raises its own errors
            logger.info("could not write the heartbeat of this run: %s", error_text(error))

    def go_on() -> None:
        next_beat_s = clock() + BEAT_EVERY_S
        while not is_over.wait(_TICK_S):
            if log is not None:
                log.flush_if_due()
            if clock() >= next_beat_s:
                next_beat_s = clock() + BEAT_EVERY_S
                tried(lambda: beat(store, run_id, clock()))

    tried(lambda: beat(store, run_id, clock()))
    thread = threading.Thread(target=go_on, name="raybatch-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        tried(lambda: store.remove(heartbeat_name(run_id)))


def live_runs(store: Store, now_s: float) -> list[LiveRun]:
    """Return the runs whose heartbeat is fresh at `now_s`, seconds since 1970, latest first."""
    runs = []
    for name in store.names(RUNS):
        run_id = heartbeat_run(name)
        if run_id is None:
            continue
        try:
            record = json.loads(store.read(name))
            age_s, host, pid = now_s - float(record["ts"]), str(record["host"]), int(record["pid"])
        except FileNotFoundError:  # it has ended since it was listed
            continue
        except (ValueError, KeyError, TypeError):
            logger.warning("ignoring the invalid heartbeat file %s/%s", store.uri, name)
            continue
        if abs(age_s) < FRESH_S:
            runs.append(LiveRun(run_id, max(0.0, age_s), host, pid, f"{store.uri}/{name}"))
    return sorted(runs, key=lambda run: run.age_s)
