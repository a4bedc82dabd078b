"""A head and the rest in their two threads, with planning and running replaced; no Ray."""

import threading
from types import SimpleNamespace

import pytest

from raybatch.config import PlanConfig
from raybatch.errors import ReplicaError, RunStopped
from raybatch.inputs.source import Source
from raybatch.planning import head as head_module
from raybatch.planning import large
from raybatch.planning.head import HeadRun
from raybatch.planning.planned import RunSpec

HEAD = SimpleNamespace(first_unit=2, num_units=3, num_rows=5)


class Threads:
    """Ends the head and stores the rest when a test says so; notes what ran."""

    def __init__(self, monkeypatch):
        self.head_error, self.is_stopped = None, False
        self.rows_received, self.head_may_end = 7, threading.Event()
        self.head_may_end.set()
        self.is_storing, self.may_store = threading.Event(), threading.Event()
        self.seen = []
        monkeypatch.setattr(head_module, "run_planned", self.run_head)
        monkeypatch.setattr(head_module, "_POLL_S", 0.01)
        monkeypatch.setattr(large, "plan_large", self.plan_rest)
        monkeypatch.setattr(large, "run_large", self.run_rest)
        job = RunSpec(
            source=Source(schema=None, slices=(), num_rows=0),
            config=None,
            plan=PlanConfig(),
            sink="",
            row_id_column=None,
        )
        self.run = HeadRun(
            head=job,
            rest=job,
            plans=(None, None),
            rows_received=lambda: self.rows_received,
            is_stopped=lambda: self.is_stopped,
            stop=lambda: self.seen.append("stop"),
        )

    def run_head(self, job, stored):
        job.on_stored(HEAD)
        assert self.head_may_end.wait(30)
        if self.head_error is not None:
            raise self.head_error

    def plan_rest(self, job, *, raise_if_over):
        self.seen.append("plan")
        return "a plan"

    def run_rest(self, job, stored, planned):
        self.is_storing.set()
        assert self.may_store.wait(30)
        job.on_stored(None)
        self.seen.append(f"run from unit {job.first_unit}")
        return planned

    def join(self):
        self.head_may_end.set()
        self.may_store.set()
        for thread in threading.enumerate():
            if thread.name == "raybatch-rest":
                thread.join(30)


@pytest.fixture
def threads(monkeypatch):
    found = Threads(monkeypatch)
    yield found
    found.join()


def test_the_rest_has_units_after_those_of_the_head(threads):
    threads.may_store.set()
    assert threads.run.run() == "a plan"
    assert ["plan", "run from unit 5"] == threads.seen


def test_a_head_that_fails_leaves_the_rest_unplanned(threads):
    threads.head_error = ReplicaError(0, "it broke")
    with pytest.raises(ReplicaError):
        threads.run.run()
    threads.join()
    assert ["stop"] == threads.seen


def test_a_run_that_is_over_while_the_rest_is_stored_runs_none_of_its_rows(threads):
    ended = threading.Thread(target=threads.run.run)
    ended.start()
    assert threads.is_storing.wait(30)
    threads.is_stopped = True
    # it does not wait for what is stored
    ended.join(30)
    assert not ended.is_alive()
    threads.join()
    assert ["plan"] == threads.seen


def test_the_rest_waits_for_the_first_row_of_the_head(threads):
    threads.head_may_end.clear()
    ended = threading.Thread(target=threads.run.run)
    ended.start()
    # rows that an earlier part of the run has received do not count
    assert not threads.is_storing.wait(0.1)
    threads.rows_received += 1
    assert threads.is_storing.wait(30)
    threads.join()
    ended.join(30)
    assert ["plan", "run from unit 5"] == threads.seen


def test_an_error_of_the_rest_is_that_of_the_run(threads, monkeypatch):
    def fails(*_, **__):
        raise ValueError("no plan")

    monkeypatch.setattr(large, "plan_large", fails)
    with pytest.raises(ValueError, match="no plan"):
        threads.run.run()
    threads.join()
    assert ["stop"] == threads.seen


def test_a_rest_that_stops_itself_is_left_to_the_next_run(threads, monkeypatch):
    def stops(*_, **__):
        raise RunStopped("over")

    monkeypatch.setattr(large, "plan_large", stops)
    assert threads.run.run() is None
    assert [] == threads.seen
