"""Files of runs next to the parts, and cleaning them up; none of them counts as data.

A journal stores finished rows of incomplete commit units, and checkpointed tokens of unfinished
rows, for the next attempt. It has each row at least once and never counts as a commit; unreadable
fragments are generated again. Markers store how often engines crashed with which rows of a unit.
Each has all counts that its writer knew, so markers are merged by the largest count. Unreadable
markers are skipped: a bad row then costs a few more crashes.

The log and the heartbeat of a run are for people and reports. The log has JSON lines in segments,
and one writer. Segments are created whole, because object stores cannot append, so a killed run
loses the unwritten lines: those of a twentieth of its run time, at most five minutes.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import (
    ATTEMPTS,
    FRAGMENTS,
    PLANS,
    RUNS,
    STAGING,
    attempt_folder,
    attempt_name,
    attempt_unit,
    fragment_folder,
    fragment_name,
    fragment_unit,
    heartbeat_name,
    heartbeat_run,
    plan_of_shard,
    probe_token,
    run_log_name,
    run_log_run,
    token_checkpoint_name,
    token_checkpoint_unit,
)
from raybatch.durable.parts import empty_table
from raybatch.durable.storage import Store
from raybatch.durable.units import CommitUnit
from raybatch.errors import CommitError, error_text, redacted

logger = logging.getLogger(__name__)

POS = "__rb_pos"
ROW = "__rb_row"
# position in its unit of an unfinished row
PLACE = "row"
_KEY = b"raybatch"

_MIN_WAIT_S, _MAX_WAIT_S = 2.0, 300.0
_SHARE = 20
_TICK_S = 1.0
_MAX_LINES = 10_000

BEAT_EVERY_S = 30.0
# three heartbeats, to tolerate slow stores and clock skew
FRESH_S = 90.0


def journal_schema(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with two more columns: a row's position in its unit, and in the input."""
    for name in (POS, ROW):
        schema = schema.append(pa.field(name, pa.int64(), nullable=False))
    return schema


def write_fragment(
    store: Store, unit: CommitUnit, table: pa.Table, *, plan_hash: str, attempt: str
) -> None:
    """Write finished rows of a unit to the journal; rows that it has already are fine.

    Args:
        table: one or more rows in the schema of the journal.
        attempt: name of the writer, unique among the attempts at the unit.

    Raises:
        CommitError: there are no rows, or a position is outside of the unit.
    """
    pos = table.column(POS).to_numpy()
    if not len(pos) or pos.min() < 0 or pos.max() >= unit.num_rows:
        raise CommitError(
            f"cannot write to the journal: unit {unit.number} has {unit.num_rows} rows, got the "
            f"positions {pos[:3]}"
        )
    name = fragment_name(unit.number, int(pos.min()), len(pos), attempt)
    reach("before_fragment", unit=unit.number)
    store.create(name, _encoded(table, unit, plan_hash))
    reach("after_fragment", unit=unit.number)


def write_token_checkpoint(
    store: Store, unit: CommitUnit, tokens: pa.RecordBatch, *, plan_hash: str, attempt: str
) -> None:
    """Store the tokens of unfinished rows of a unit; column `PLACE` has their positions in it."""
    data = _encoded(pa.Table.from_batches([tokens]), unit, plan_hash)
    store.create(token_checkpoint_name(unit.number, attempt), data)


def read_token_checkpoints(
    store: Store, unit: CommitUnit, schema: pa.Schema, *, plan_hash: str
) -> Iterator[pa.RecordBatch]:
    """Yield the tokens of unfinished rows that earlier attempts at a unit stored, in any order.

    Files with another schema are skipped.
    """
    for table in _fragments(store, unit, schema, plan_hash, PLACE):
        yield from table.combine_chunks().to_batches()


def read_fragments(
    store: Store, unit: CommitUnit, schema: pa.Schema, *, plan_hash: str
) -> pa.Table:
    """Return the rows of a unit that earlier attempts have finished, each once, by position.

    A fragment is skipped and logged if it is damaged, or if its schema, unit or plan is another.

    Returns:
        A table in `journal_schema(schema)`; of a row in several fragments, the first by name.
    """
    wanted = journal_schema(schema)
    fragments = _fragments(store, unit, wanted, plan_hash, POS)
    table = pa.concat_tables([empty_table(wanted), *fragments])
    _, firsts = np.unique(table.column(POS).to_numpy(), return_index=True)
    return table.take(firsts)


def _fragments(
    store: Store, unit: CommitUnit, wanted: pa.Schema, plan_hash: str, place: str
) -> Iterator[pa.Table]:
    """Yield fragments of one kind, by the column `place` of the position in the unit.

    Invalid fragments are skipped.
    """
    for name in store.names(fragment_folder(unit.number)):
        if (token_checkpoint_unit(name) is not None) != (place == PLACE):
            continue
        try:
            data = store.read(name)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        try:
            table = _decoded(data, unit, wanted, plan_hash)
            _check_places(table, place, unit)
        except (ValueError, KeyError, OSError) as error:
            logger.warning("skipped %s/%s: %s", store.uri, name, error_text(error))
            continue
        yield table


def _encoded(table: pa.Table, unit: CommitUnit, plan_hash: str) -> bytes:
    owner = json.dumps({"plan": plan_hash, "unit": unit.number}).encode()
    marked = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: owner})
    buffer = pa.BufferOutputStream()
    # rows read separately have different dictionaries, but a file has one per column
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.ipc.new_file(buffer, marked.schema, options=options) as out:
        out.write_table(marked)
    return bytes(buffer.getvalue())


def _decoded(data: bytes, unit: CommitUnit, wanted: pa.Schema, plan_hash: str) -> pa.Table:
    reader = pa.ipc.open_file(pa.BufferReader(data))
    owner = json.loads((reader.schema.metadata or {})[_KEY])
    if owner != {"plan": plan_hash, "unit": unit.number}:
        raise ValueError(f"the file belongs to {owner}")
    # types first: values of an unknown type are never touched
    if not reader.schema.equals(wanted):
        raise ValueError("it has another schema")
    table = reader.read_all()
    table.validate(full=True)
    return table.replace_schema_metadata(wanted.metadata)


def _check_places(table: pa.Table, column: str, unit: CommitUnit) -> None:
    pos = table.column(column).to_numpy()
    if len(pos) and (pos.min() < 0 or pos.max() >= unit.num_rows):
        raise ValueError(f"it has a position outside of the {unit.num_rows} rows of the unit")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashCounts:
    """How often an engine crashed while it ran each row of a unit, by position in the unit."""

    crashes: Mapping[int, int] = field(default_factory=dict)
    # rows that ran alone when the last engine crashed; they are error rows
    given_up: Set[int] = frozenset()

    def __or__(self, other: "CrashCounts") -> "CrashCounts":
        """Return the union; both may have counted the same crashes."""
        more = {pos: max(n, self.crashes.get(pos, 0)) for pos, n in other.crashes.items()}
        return CrashCounts(
            crashes={**self.crashes, **more}, given_up=self.given_up | other.given_up
        )


def write_crash_counts(
    store: Store, unit: CommitUnit, crash_counts: CrashCounts, *, plan_hash: str
) -> None:
    """Store crash counts of a unit as one more file, a marker, under the next free number.

    CommitError: there are no counts, or a position is outside of the unit.
    """
    places = sorted(crash_counts.crashes)
    if not places or places[0] < 0 or places[-1] >= unit.num_rows:
        raise CommitError(
            f"cannot store crash counts: unit {unit.number} has {unit.num_rows} rows, got the "
            f"positions {places}"
        )
    record = {
        "plan": plan_hash,
        "unit": unit.number,
        "crashes": {str(pos): crash_counts.crashes[pos] for pos in places},
        "given_up": sorted(crash_counts.given_up),
    }
    data = json.dumps(record, sort_keys=True).encode()
    number = len(_markers(store, unit))
    while not store.create(attempt_name(unit.number, number), data):
        number += 1


def read_crash_counts(store: Store, unit: CommitUnit, *, plan_hash: str) -> CrashCounts:
    """Return the union of all crash counts stored for a unit; without any, costs one listing."""
    known = CrashCounts()
    for name in _markers(store, unit):
        try:
            known |= _crash_counts(store.read(name), unit, plan_hash)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("skipped %s/%s: %s", store.uri, name, error_text(error))
    return known


def _markers(store: Store, unit: CommitUnit) -> list[str]:
    names = store.names(attempt_folder(unit.number))
    return [name for name in names if attempt_unit(name) == unit.number]


def _crash_counts(data: bytes, unit: CommitUnit, plan_hash: str) -> CrashCounts:
    record = json.loads(data)
    if (record["plan"], record["unit"]) != (plan_hash, unit.number):
        raise ValueError(f"the file belongs to unit {record['unit']!r} of plan {record['plan']!r}")
    crashes = {int(pos): int(number) for pos, number in record["crashes"].items()}
    given_up = frozenset(int(pos) for pos in record["given_up"])
    if any(not 0 <= pos < unit.num_rows for pos in crashes) or not given_up <= crashes.keys():
        raise ValueError("a row's position is outside of the unit, or it has no crash count")
    return CrashCounts(crashes=crashes, given_up=given_up)


def drop_journal_and_staging(store: Store) -> int:
    """Remove journal and staged files of a complete output; return how many files were removed.

    Other runs may still be active: they stage a removed file again, and find the parts if there is
    no journal.
    """
    names = [name for folder in (FRAGMENTS, ATTEMPTS, STAGING) for name in store.names(folder)]
    for name in names:
        store.remove(name)
    return len(names)


def leftovers(
    store: Store, *, plans: Collection[str], is_committed: Callable[[int], bool], is_finished: bool
) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether an active run may still need it) of each file that could be removed.

    Args:
        plans: hashes of valid plans; if empty, no folder of a plan is yielded.
        is_committed: returns whether the unit with this number is committed.
        is_finished: whether the whole output is complete.
    """
    for folder, unit_of in ((FRAGMENTS, fragment_unit), (ATTEMPTS, attempt_unit)):
        for name in store.names(folder):
            unit = unit_of(name)
            if is_finished or (unit is not None and is_committed(unit)):
                yield name, False
    staged = store.names(STAGING)
    probes = [name for name in store.names("_raybatch") if probe_token(name) is not None]
    for name in staged + probes:
        yield name, not is_finished
    for name in store.names(PLANS) if plans else []:
        if plan_of_shard(name) not in (None, *plans):
            yield name, True


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
