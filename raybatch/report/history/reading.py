"""Reads the logs of all runs of a job; memory does not grow with their length."""

import heapq
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from raybatch.durable.run_log import read_events, run_ids
from raybatch.durable.stores import Store
from raybatch.report.history.records import History, RunRecord, Sample, UnitTime, merged

_MAX_SAMPLES = 240
_NUM_SLOWEST = 5
# more cannot be told apart in a drawing
_MAX_UNITS = 300

Event = Mapping[str, Any]

# of the first line
_TEXTS = ("host", "source", "model", "backend", "backend_reason", "executor")


def read_history(store: Store) -> History:
    """Return what the logs below a sink say; one that cannot be understood is left out."""
    runs = (run_of(read_events(store, run_id)) for run_id in run_ids(store))
    records = [run for run in runs if run is not None]
    return History(runs=tuple(sorted(records, key=lambda run: (run.started, run.run_id))))


def with_unlogged(history: History, *, num_units: int, num_rows: int) -> History:
    """Return the runs with what those that were killed have written and could not log."""
    runs = []
    after = [(run.units_resumed, run.rows_resumed) for run in history.runs[1:]]
    for run, (units, rows) in zip(history.runs, [*after, (num_units, num_rows)], strict=False):
        units, rows = units - run.units_resumed, rows - run.rows_resumed
        if not run.end and units > run.units_written:
            run = replace(run, units_written=units, rows_written=max(rows, run.rows_written))
        runs.append(run)
    return History(runs=tuple(runs))


def run_of(events: Iterable[Event]) -> RunRecord | None:
    """Return what the lines of one log say; None where it has no beginning."""
    started: Event | None = None
    last_ts, values = 0.0, dict[str, Any]()
    samples, units = _Samples(), _Units()
    for event in events:
        try:
            last_ts = max(last_ts, float(event["ts"]))
            if event["event"] == "run_started":
                started = started or event
            elif event["event"] == "planned":
                values["units_resumed"] = int(event["units_resumed"])
            elif event["event"] == "unit_done":
                units.add(event)
            elif event["event"] == "sample":
                samples.add(event)
            elif event["event"] == "run_ended":
                values["end"] = str(event["reason"])
        except (KeyError, TypeError, ValueError):
            # a line of another version
            continue
    if started is None:
        return None
    values |= {name: str(started.get(name, "")) for name in _TEXTS}
    return RunRecord(
        run_id=str(started.get("run", "")),
        started=float(started["ts"]),
        seconds=max(0.0, last_ts - float(started["ts"])),
        versions={str(k): str(v) for k, v in dict(started.get("versions") or {}).items()},
        rows_resumed=int(started.get("rows_resumed") or 0),
        samples=tuple(samples.kept),
        **values,
        **units.values(),
    )


class _Samples:
    """Keeps a bounded number of samples: neighbours become one where there are too many."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []
        self._num_each = 1
        self._num_in_last = 0

    def add(self, event: Event) -> None:
        values = {name: event[name] for name in Sample.__dataclass_fields__ if name in event}
        engines = tuple((int(r), float(b), float(s)) for r, b, s in values.pop("engines", ()))
        sample = Sample(**values, engines=engines)
        if 0 < self._num_in_last < self._num_each:
            self.kept[-1] = merged(self.kept[-1], sample)
            self._num_in_last += 1
            return
        if len(self.kept) >= 2 * _MAX_SAMPLES:
            pairs = zip(self.kept[::2], self.kept[1::2], strict=True)
            self.kept = [merged(*pair) for pair in pairs]
            self._num_each *= 2
        self.kept.append(sample)
        self._num_in_last = 1


class _Units:
    def __init__(self) -> None:
        self._seconds = array("d")
        self._few: list[UnitTime] = []
        self._slowest: list[tuple[float, int, UnitTime]] = []
        self._num_written = self._num_rows = self._num_found = 0

    def add(self, event: Event) -> None:
        unit = UnitTime(
            unit=int(event["unit"]),
            start_s=float(event["start_s"]),
            seconds=float(event["seconds"]),
            rows=int(event["rows"]),
            host=str(event["host"]),
            pid=int(event["pid"]),
        )
        if not event["won"]:
            self._num_found += 1
            return
        self._num_written += 1
        self._num_rows += unit.rows
        self._seconds.append(unit.seconds)
        if len(self._few) <= _MAX_UNITS:
            self._few.append(unit)
        keep = heapq.heappushpop if len(self._slowest) >= _NUM_SLOWEST else heapq.heappush
        keep(self._slowest, (unit.seconds, self._num_written, unit))

    def values(self) -> dict[str, Any]:
        """Return fields of a `RunRecord`."""
        slowest = sorted(self._slowest, key=lambda one: -one[0])
        median, p95 = np.quantile(self._seconds, (0.5, 0.95)) if self._seconds else (0.0, 0.0)
        return {
            "units_written": self._num_written,
            "rows_written": self._num_rows,
            "units_found": self._num_found,
            "median_unit_s": float(median),
            "p95_unit_s": float(p95),
            "slowest": tuple(unit for _, _, unit in slowest),
            "units": tuple(self._few) if len(self._few) <= _MAX_UNITS else (),
        }
