"""What a recorder writes of a run, and what is read from it again."""

import json
import logging
import socket
import subprocess
import sys
import uuid
from dataclasses import replace

import numpy as np
import pytest

from raybatch.durable.layout import heartbeat_name
from raybatch.durable.run_log import beat, live_runs, read_events
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError, RowError
from raybatch.planning.store import StoredPlan
from raybatch.records.pool_stats import PoolStats, QuantileCoverage
from raybatch.records.types import ReplicaStats
from raybatch.report.history import History, RunRecord, read_history, run_of, with_unlogged
from raybatch.report.recorder import RunRecorder, StatsSampler, new_run_id
from raybatch.stages.unit_writer import UnitReceipt


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/out")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def recorder_of(store, run_id="run-a", clock=None, **about):
    return RunRecorder(store, run_id, about=about, clock=clock or Clock())


def stored_plan(**changes):
    values = {
        "hash": "p",
        "num_rows": 20,
        "num_units": 2,
        "num_groups": 0,
        "is_reordered": False,
        "logical_tokens": 100,
        "computed_tokens": 25,
        "block_size": 8,
        "options": {},
        "files": (),
        "shards": (),
        "fingerprint": {},
    }
    return StoredPlan(**{**values, **changes})


def receipt(unit=0, **changes):
    values = {
        "unit": unit,
        "num_rows": 10,
        "won": True,
        "num_errors": 0,
        "prompt_tokens": 50,
        "cached_tokens": 5,
        "generated_tokens": 40,
        "started": 1001.0,
        "ended": 1003.5,
        "host": "h",
        "pid": 7,
    }
    return UnitReceipt(**{**values, **changes})


def stats(engine_s=0.0, *, ranks=(0,), **changes):
    replicas = tuple(ReplicaStats(engine_s=engine_s, **changes) for _ in ranks)
    return PoolStats(num_replicas=1, num_ready=len(ranks), replicas=replicas, ranks=ranks)


class UnreadableStore:
    """Lists files that it does not give out."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read(self, name):
        raise PermissionError(f"{name} is somebody else's")


def test_a_heartbeat_that_cannot_be_read_ends_no_run(store):
    beat(store, "run-b", 1000.0)
    with recorder_of(UnreadableStore(store)):
        pass
    assert [event["event"] for event in events_of(store)] == ["run_started", "run_ended"]


def test_a_log_that_cannot_be_read_is_left_out(store, caplog):
    with recorder_of(store):
        pass
    assert events_of(UnreadableStore(store)) == []
    assert ": PermissionError" in caplog.text


def test_coverage_of_predicted_lengths_is_in_the_log(store):
    clock, coverage = (
        Clock(),
        (QuantileCoverage(share=0.5, num_rows=100, num_below=40, num_at_most=60),),
    )
    with recorder_of(store, clock=clock) as recorder:
        clock.now += 5
        recorder.observe(replace(stats(), length_coverage=coverage))
    assert run_of(events_of(store)).last.length_coverage == coverage


def events_of(store, run_id="run-a"):
    return list(read_events(store, run_id))


def test_a_run_begins_and_ends_in_its_log(store):
    clock = Clock()
    with recorder_of(store, clock=clock, model="m", rows_resumed=3):
        clock.now += 5
    first, last = events_of(store)
    assert ("run_started", "m", 3) == (first["event"], first["model"], first["rows_resumed"])
    assert ("run_ended", "finished", 5.0) == (last["event"], last["reason"], last["seconds"])


def test_how_engines_run_is_told_once_they_have_rows_and_when_it_changes(store):
    with recorder_of(store) as recorder:
        for way, num_steps in (("as usual", 0), ("a", 1), ("a", 9), ("b", 12)):
            recorder.observe(stats(ranks=(0, 1), execution_mode=way, num_steps=num_steps))
        recorder.observe(stats(ranks=(2,), execution_mode="b", num_steps=3))
        recorder.observe(stats(ranks=(3,), num_steps=3))
    recorded = [(e["rank"], e["way"]) for e in events_of(store) if e["event"] == "engine"]
    assert [(0, "a"), (1, "a"), (0, "b"), (1, "b"), (2, "b")] == recorded
    found = run_of(events_of(store))
    assert ((("b", 3),), 2) == (found.modes, found.mode_changes)


def test_of_many_ways_the_first_of_the_most_frequent_are_kept():
    started = {"event": "run_started", "ts": 1.0}
    changes = [{"event": "engine", "ts": 2.0, "rank": i, "way": str(i % 50)} for i in range(100)]
    assert tuple((str(i), 2) for i in range(8)) == run_of([started, *changes]).modes


def test_the_first_line_is_there_while_the_run_goes_on(store):
    with recorder_of(store):
        assert ["run_started"] == [event["event"] for event in events_of(store)]


def test_a_run_is_alive_until_it_ends(store):
    with recorder_of(store):
        assert 1 == len(live_runs(store, 1000.0))
    assert [] == live_runs(store, 1000.0)


def test_another_run_that_is_alive_is_told(store, caplog):
    beat(store, "run-b", 990.0)
    with caplog.at_level(logging.WARNING), recorder_of(store):
        pass
    assert "another run is active, or died just now: run run-b" in caplog.text


def test_a_run_whose_process_is_gone_is_no_warning(store, caplog):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record = {"ts": 990.0, "host": socket.gethostname(), "pid": ended.pid}
    store.create(heartbeat_name("run-b"), json.dumps(record).encode())
    with caplog.at_level(logging.WARNING), recorder_of(store):
        pass
    assert "run-b" not in caplog.text
    # what removes files asks for more: another container may have the name of this host
    assert len(live_runs(store, 1000.0)) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (ConfigError("sink s3://k:Zq7RvW2k@b"), "failed: ConfigError: sink s3://***@b"),
        (RowError("row 'a': the secret prompt"), "failed: RowError"),
        (ValueError("the secret prompt"), "failed: ValueError"),
    ],
)
def test_an_error_ends_the_log_without_secrets_and_row_texts(store, error, reason):
    with pytest.raises(type(error)), recorder_of(store):
        raise error
    assert reason == events_of(store)[-1]["reason"]


def test_a_run_with_missing_rows_is_incomplete(store):
    with recorder_of(store) as recorder:
        recorder.incomplete()
    assert "incomplete" == events_of(store)[-1]["reason"]


def test_units_count_from_those_that_were_there(store):
    with recorder_of(store, rows_resumed=10) as recorder:
        recorder.planned(stored_plan(), np.array([True, False]))
        assert (2, 1, 1, 10) == (
            recorder.units.total,
            recorder.units.done,
            recorder.units.resumed,
            recorder.units.rows_resumed,
        )
        assert recorder.units.planned_hit_rate == 0.75
        recorder.unit_done(receipt(1))
        assert 2 == recorder.units.done


def test_units_count_as_soon_as_feeders_say_so(store):
    with recorder_of(store) as recorder:
        recorder.planned(stored_plan(num_units=5), np.array([True, False, False, False, False]))
        recorder.observe(PoolStats(num_units_written=3))
        recorder.unit_done(receipt(1))
        assert 4 == recorder.units.done


def test_units_of_a_second_plan_come_after_those_of_the_first(store):
    with recorder_of(store) as recorder:
        recorder.planned(stored_plan(num_units=3), np.array([True, False, False]))
        recorder.unit_done(receipt(1))
        recorder.unit_done(receipt(2))
        recorder.planned(stored_plan(num_units=2), np.array([True, True, True, False, False]))
        recorder.observe(PoolStats(num_units_written=3))
        assert (5, 4, 1) == (recorder.units.total, recorder.units.done, recorder.units.resumed)
    (units_resumed,) = {e["units_resumed"] for e in events_of(store) if e["event"] == "planned"}
    assert 1 == units_resumed


def test_a_killed_run_has_written_what_the_next_one_found():
    killed = RunRecord(run_id="a", started=1.0, seconds=1.0, units_written=1, rows_written=10)
    last = RunRecord(run_id="b", started=2.0, seconds=1.0, units_resumed=3, rows_resumed=30)
    found = with_unlogged(History(runs=(killed, last)), num_units=4, num_rows=45)
    written = [(run.units_written, run.rows_written) for run in found.runs]
    assert [(3, 30), (1, 15)] == written


def test_a_run_with_an_end_has_logged_what_it_wrote():
    run = RunRecord(run_id="a", started=1.0, seconds=1.0, units_written=1, end="interrupted")
    history = History(runs=(run,))
    assert history == with_unlogged(history, num_units=4, num_rows=45)


def test_a_unit_is_read_back_with_its_time_and_place(store):
    with recorder_of(store) as recorder:
        recorder.unit_done(receipt(4))
    (unit,) = read_history(store).runs[0].units
    assert (4, 1.0, 2.5, 10) == (unit.unit, unit.start_s, unit.seconds, unit.rows)
    assert ("h", 7) == (unit.host, unit.pid)


def test_units_that_another_run_wrote_are_counted_apart(store):
    with recorder_of(store) as recorder:
        recorder.unit_done(receipt(0))
        recorder.unit_done(receipt(1, won=False))
    (run,) = read_history(store).runs
    assert (1, 1, 10) == (run.units_written, run.units_found, run.rows_written)


def test_samples_are_read_back(store):
    clock = Clock()
    with recorder_of(store, clock=clock) as recorder:
        for number in range(4):
            clock.now += 1
            recorder.observe(stats(0.75 * number, num_running=3, kv_used_fraction=0.5))
    samples = read_history(store).runs[0].samples
    assert [1.0, 2.0, 3.0, 4.0] == [sample.end_s for sample in samples]
    assert [0.0, 0.75, 0.75, 0.75] == [sample.busy_s for sample in samples]
    assert (3, 0.5) == (samples[0].running, samples[0].kv)


def test_what_was_seen_last_is_in_the_log(store):
    clock = Clock()
    with recorder_of(store, clock=clock) as recorder:
        for seconds in (1.0, 0.25):
            clock.now += seconds
            recorder.observe(stats())
    assert [1.0, 1.25] == [sample.end_s for sample in read_history(store).runs[0].samples]


def test_engines_that_come_and_go_are_events(store):
    clock = Clock()
    with recorder_of(store, clock=clock) as recorder:
        for ranks in ((0,), (0, 1), (1,)):
            clock.now += 1
            recorder.observe(stats(ranks=ranks))
    found = [(e["rank"], e["state"]) for e in events_of(store) if e["event"] == "replica"]
    assert [(0, "ready"), (1, "ready"), (0, "gone")] == found


def test_an_engine_that_started_again_counts_from_0():
    sampler = StatsSampler()
    for now_s, busy_s in ((1.0, 100.0), (2.0, 100.5)):
        sampler.observe(now_s, stats(busy_s))
    _, sample = sampler.observe(3.0, stats(0.25))
    assert [[0, 0.25, 1.0]] == sample["engines"]


def test_a_log_without_an_end_is_of_a_run_that_was_killed():
    events = [
        {"event": "run_started", "ts": 10.0, "run": "a"},
        {"event": "sample", "ts": 25.0, "end_s": 15.0, "seconds": 15.0},
    ]
    run = run_of(events)
    assert ("", 15.0) == (run.end, run.seconds)


def test_a_log_without_a_beginning_is_no_run():
    assert run_of([{"event": "run_ended", "ts": 1.0, "reason": "finished"}]) is None


def test_lines_of_another_version_are_left_out():
    events = [{"event": "run_started", "ts": 1.0}, {"event": "unit_done", "ts": 2.0}, {"event": 1}]
    assert 0 == run_of(events).units_written


def test_samples_of_a_long_run_are_few_and_add_up():
    events = [{"event": "run_started", "ts": 0.0}] + [
        {
            "event": "sample",
            "ts": float(i),
            "end_s": float(i),
            "seconds": 1.0,
            "rows": i,
            "engines": [[0, 0.5, 1.0]],
        }
        for i in range(1, 5001)
    ]
    run = run_of(events)
    assert len(run.samples) <= 480
    assert (5000, 5000.0) == (run.last.rows, sum(sample.seconds for sample in run.samples))
    assert sum(sample.busy_s for sample in run.samples) == 2500.0


def test_names_of_runs_sort_by_time():
    assert new_run_id(1_700_000_000.0) < new_run_id(1_700_000_001.0)
