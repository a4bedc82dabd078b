"""The log of a run below the sink: JSON lines in segments, one writer, for people and reports.

Nothing is decided by it. A segment is created whole, because object stores cannot append, so a run
that is killed loses what it had not written yet: a twentieth of its time so far, and at most five
minutes.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from raybatch.durable.layout import RUNS, run_log_name, run_log_run
from raybatch.durable.stores.protocols import Store
from raybatch.errors import error_text
from raybatch.redaction import redacted

logger = logging.getLogger(__name__)

_MIN_WAIT_S, _MAX_WAIT_S = 2.0, 300.0
_SHARE = 20
_MAX_LINES = 10_000


class RunLog:
    """Writes the log of one run; any thread may call it, and it never raises for the store.

    Texts are written without secrets. Prompts and outputs do not belong into it.

    Args:
        clock: seconds since 1970.
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
        # segments are written one after the other, while lines go on coming in
        self._writing = threading.Lock()

    def write(self, event: str, *, level: str = "info", **values: Any) -> None:  # noqa: ANN401
        """Add a line; it is kept in memory until the next `flush`."""
        line = {"ts": round(self._clock(), 3), "level": level, "event": event, "run": self.run_id}
        text = json.dumps(line | {name: _clean(value) for name, value in values.items()})
        with self._lock:
            self._lines.append(text)

    def flush_if_due(self) -> None:
        """Write a segment where the last one is long enough ago, or many lines wait."""
        now_s = self._clock()
        wait_s = min(_MAX_WAIT_S, max(_MIN_WAIT_S, (now_s - self._began_s) / _SHARE))
        if now_s - self._written_s >= wait_s or len(self._lines) >= _MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait as the next segment."""
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, []
            self._written_s = self._clock()
            if not lines or self._is_broken:
                return
            data = "".join(line + "\n" for line in lines).encode()
            try:
                self._store.create(run_log_name(self.run_id, self._segment), data)
            except Exception as error:  # the run goes on without its log
                self._is_broken = True
                logger.warning("the log of this run ends here: %s", error_text(error))
            self._segment += 1


def run_ids(store: Store) -> list[str]:
    """Return the runs that have left a log, in no order of time."""
    runs = (run_log_run(name) for name in store.names(RUNS))
    return sorted({run for run in runs if run is not None})


def read_events(store: Store, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log in order, one segment in memory; what cannot be read is left out."""
    for name in store.names(f"{RUNS}/{run_id}"):
        if run_log_run(name) != run_id:
            continue
        try:
            lines = store.read(name).splitlines()
        except Exception as error:  # a report without it is better than none
            logger.warning("%s/%s cannot be read: %s", store.uri, name, error_text(error))
            continue
        for line in lines:
            try:
                values = json.loads(line)
            except ValueError:
                logger.warning("%s/%s holds a line that is no JSON", store.uri, name)
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
