"""The log of a run, and heartbeats, in a folder and in fsspec's memory."""

import json
import os
import uuid

import pytest

from raybatch.durable.layout import heartbeat_name
from raybatch.durable.run_log import FRESH_S, RunLog, beat, live_runs, read_events, run_ids
from raybatch.durable.storage import open_store


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    if request.param == "local":
        return open_store(str(tmp_path / "out"))
    return open_store(f"memory://{uuid.uuid4().hex}/out")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def log_of(store, run_id="run-a"):
    clock = Clock()
    return RunLog(store, run_id, clock), clock


def test_lines_are_read_back_in_order_over_segments(store):
    log, _ = log_of(store)
    for number in range(3):
        log.write("unit_done", unit=number)
        log.flush()
    assert [0, 1, 2] == [event["unit"] for event in read_events(store, "run-a")]
    assert 3 == len(store.names("_raybatch/runs"))


def test_a_line_says_when_what_and_which_run(store):
    log, _ = log_of(store)
    log.write("run_started", level="warning", host="h")
    log.flush()
    (event,) = read_events(store, "run-a")
    assert event == {
        "ts": 1000.0,
        "level": "warning",
        "event": "run_started",
        "run": "run-a",
        "host": "h",
    }


def test_secrets_are_hidden_in_every_text_of_a_line(store):
    log, _ = log_of(store)
    log.write("x", sink="s3://key:Zq7RvW2k@bucket", deep={"a": ["hf_Zq7RvW2kLx0"]})
    log.flush()
    name = store.names("_raybatch/runs")[0]
    assert b"Zq7RvW2k" not in store.read(name)


def test_nothing_is_written_before_it_is_due(store):
    log, clock = log_of(store)
    log.write("x")
    clock.now += 1
    log.flush_if_due()
    assert [] == store.names("_raybatch/runs")
    clock.now += 1
    log.flush_if_due()
    assert 1 == len(store.names("_raybatch/runs"))


def test_segments_of_a_long_run_are_minutes_apart(store):
    log, clock = log_of(store)
    for _ in range(24 * 60):
        clock.now += 60
        log.write("x")
        log.flush_if_due()
    assert len(store.names("_raybatch/runs")) < 350


def test_a_segment_without_lines_is_not_written(store):
    log, _ = log_of(store)
    log.flush()
    assert [] == store.names("_raybatch/runs")


def test_a_torn_line_is_left_out(store):
    store.create("_raybatch/runs/run-a/000000.jsonl", b'{"event": "a"}\n{"eve\n[1]\n')
    assert ["a"] == [event["event"] for event in read_events(store, "run-a")]


def test_a_store_that_fails_ends_the_log_and_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log, _ = log_of(open_store(str(tmp_path / "file")))
    for _ in range(2):
        log.write("x")
        log.flush()
    assert 1 == caplog.text.count("stopped writing the log of this run")


def test_runs_are_those_with_a_segment(store):
    for run in ("run-b", "run-a"):
        log, _ = log_of(store, run)
        log.write("x")
        log.flush()
    beat(store, "run-c", 1.0)
    assert ["run-a", "run-b"] == run_ids(store)


def test_a_beat_is_fresh_for_three_of_them(store):
    beat(store, "run-a", 1000.0)
    assert ["run-a"] == [run.run_id for run in live_runs(store, 1000.0 + FRESH_S - 1)]
    assert [] == live_runs(store, 1000.0 + FRESH_S)


def test_a_beat_names_host_process_and_file(store):
    beat(store, "run-a", 1000.0)
    (run,) = live_runs(store, 1012.0)
    assert (12.0, os.getpid()) == (run.age_s, run.pid)
    assert run.path == f"{store.uri}/_raybatch/runs/run-a.alive"


def test_a_later_beat_takes_the_place_of_the_one_before(store):
    beat(store, "run-a", 1000.0)
    beat(store, "run-a", 1500.0)
    assert 1 == len(live_runs(store, 1510.0))


def test_a_run_that_has_ended_has_no_beat(store):
    beat(store, "run-a", 1000.0)
    store.remove(heartbeat_name("run-a"))
    assert [] == live_runs(store, 1000.0)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"ts": "x"}', json.dumps({"ts": 1}).encode()])
def test_a_broken_beat_is_no_run(store, data):
    store.replace("_raybatch/runs/run-a.alive", data)
    assert [] == live_runs(store, 1.0)
