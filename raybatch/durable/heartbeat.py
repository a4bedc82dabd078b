"""The heartbeat file of a run: it warns people, and decides nothing about units."""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from raybatch.durable.layout import RUNS, heartbeat_name, heartbeat_run
from raybatch.durable.stores.protocols import Store
from raybatch.errors import error_text

logger = logging.getLogger(__name__)

BEAT_EVERY_S = 30.0
# three beats: a slow store and clocks that differ a little are no death
FRESH_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRun:
    """A run whose heartbeat is fresh.

    Args:
        age_s: since its last beat, by the clocks of both hosts.
    """

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


def beat(store: Store, run_id: str, now_s: float) -> None:
    """Write the heartbeat; `now_s` is in seconds since 1970."""
    record = {"ts": round(now_s, 3), "host": socket.gethostname(), "pid": os.getpid()}
    store.replace(heartbeat_name(run_id), json.dumps(record).encode())


def end_beat(store: Store, run_id: str) -> None:
    store.remove(heartbeat_name(run_id))


@contextmanager
def beating(store: Store, run_id: str, clock: Callable[[], float]) -> Iterator[None]:
    """Keep the heartbeat of a run for as long as it lasts; a failure to write ends no run.

    Args:
        clock: seconds since 1970.
    """
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(BEAT_EVERY_S):
            _tried(lambda: beat(store, run_id, clock()))

    _tried(lambda: beat(store, run_id, clock()))
    thread = threading.Thread(target=go_on, name="raybatch-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        _tried(lambda: end_beat(store, run_id))


def live_runs(store: Store, now_s: float) -> list[LiveRun]:
    """Return the runs whose heartbeat is fresh, the last one first."""
    runs = []
    for name in store.names(RUNS):
        run_id = heartbeat_run(name)
        if run_id is None:
            continue
        try:
            record = json.loads(store.read(name))
            age_s, host, pid = now_s - float(record["ts"]), str(record["host"]), int(record["pid"])
        except FileNotFoundError:
            # it has ended since it was listed
            continue
        except (ValueError, KeyError, TypeError):
            logger.warning("%s/%s is no heartbeat", store.uri, name)
            continue
        if abs(age_s) < FRESH_S:
            path = f"{store.uri}/{name}"
            age_s = max(0.0, age_s)
            runs.append(LiveRun(run_id=run_id, age_s=age_s, host=host, pid=pid, path=path))
    return sorted(runs, key=lambda run: run.age_s)


def _tried(write: Callable[[], None]) -> None:
    """Write or remove a heartbeat; nothing depends on it."""
    try:
        write()
    except Exception as error:  # each file system has errors of its own
        logger.info("the heartbeat could not be written: %s", error_text(error))
