"""The thread that drives a backend: whole rows, failures, unstarted rows."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from raybatch.actors.queue import pulling
from raybatch.actors.replica.engine_thread import EngineEndedError, EngineThread
from raybatch.actors.wire.records import Credit
from raybatch.backends.fake import FakeBackend, FakeOptions
from raybatch.records.types import Request, Sampling


def request(request_id, token=1, **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array([token], np.int32),
        sampling=Sampling(**({"max_tokens": 3} | sampling)),
    )


class Driver:
    """Waits for notifications, not for time."""

    def __init__(self, backend=FakeBackend, **options):
        self.news = threading.Event()
        self.engine = EngineThread(
            lambda: backend(FakeOptions(**options)), self.news.set, lead_tokens=1000
        )
        self.engine.start().result(10)

    def wait_until(self, is_there):
        while not is_there():
            assert self.news.wait(10)
            self.news.clear()

    def rows(self, num):
        completions = []

        def has_all():
            completions.extend(self.engine.collect())
            return len(completions) >= num

        self.wait_until(has_all)
        return completions


@pytest.fixture
def start():
    drivers = []

    def make(*args, **options):
        drivers.append(Driver(*args, **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.close()


def test_all_samples_of_a_row_come_together(start):
    driver = start(max_num_seqs=2)
    driver.engine.submit([request(1, n=3), request(2, n=3)])
    assert [c.request_id for c in driver.rows(6)] == [1, 1, 1, 2, 2, 2]


def test_a_row_with_an_error_gives_one_completion(start):
    driver = start(error_on=9)
    driver.engine.submit([request(1, 9, n=3), request(2)])
    assert sorted((c.request_id, bool(c.error)) for c in driver.rows(2)) == [(1, True), (2, False)]
    assert driver.engine.is_idle()


def test_a_broken_engine_is_reported_with_its_exception(start):
    driver = start(raise_on=9)
    driver.engine.submit([request(1, 9)])
    driver.wait_until(lambda: driver.engine.failure is not None)
    assert "the fake backend fails, since" in str(driver.engine.failure)


def test_a_failed_start_carries_its_exception():
    engine = EngineThread(
        lambda: FakeBackend(FakeOptions(fail_start=True)), lambda: None, lead_tokens=1
    )
    with pytest.raises(RuntimeError, match="the fake backend fails to start"):
        engine.start().result(10)


def test_the_last_unstarted_rows_are_given_back(start):
    driver = start(max_num_seqs=1, step_s=0.02)
    driver.engine.submit([request(i) for i in range(6)])
    driver.rows(1)
    assert driver.engine.give_back(2).result(10) == [4, 5]
    assert {1, 2, 3} == {c.request_id for c in driver.rows(3)}
    assert driver.engine.is_idle()


@pytest.mark.parametrize(("max_rows", "ids"), [(9, []), (None, [1, 2, 3])])
def test_rows_beside_their_running_group_are_given_back_without_a_limit_alone(start, max_rows, ids):
    driver = start(max_num_seqs=1, step_s=0.01)
    shared = {"prompt_token_ids": np.ones(1000, np.int32), "group_id": 5, "prefix_len": 999}
    group = [replace(request(i, max_tokens=50), **shared) for i in range(4)]
    driver.engine.submit(group)
    # the step after this call starts the first row
    driver.engine.call(lambda backend: backend.progress()).result(10)
    assert driver.engine.give_back(max_rows).result(10) == ids


def test_an_empty_engine_asks_for_rows(start):
    assert start().engine.credit().tokens == 1000


def test_a_fed_engine_does_not_ask(start):
    driver = start(max_num_seqs=1, step_s=0.05)
    driver.engine.submit([request(i, max_tokens=100) for i in range(64)])
    assert driver.engine.credit() is None


class Growing(FakeBackend):
    """Computes larger steps with more rows from its second step on."""

    def capacity(self):
        capacity = super().capacity()
        if self._counters.num_steps < 2:
            return capacity
        return replace(capacity, max_num_seqs=1024, max_batched_tokens=4096)


def test_an_engine_that_takes_larger_steps_is_fed_for_these(start):
    driver = start(Growing)
    assert driver.engine.credit() == Credit(tokens=1000, rows=64)
    driver.engine.submit([request(1, max_tokens=5)])
    driver.rows(1)
    assert driver.engine.credit() == Credit(tokens=2 * 4096, rows=1024 // 4)


def test_an_engine_that_finishes_rows_fast_requests_more_of_them(start, monkeypatch):
    # on a slow host as well
    monkeypatch.setattr(pulling, "_PULL_EVERY_S", 60.0)
    driver = start()
    for first in (0, 64, 128):
        driver.engine.submit([request(first + i, max_tokens=1) for i in range(64)])
        driver.rows(64)
    assert driver.engine.credit() == Credit(tokens=4 * 1000, rows=4 * 64)


def test_the_prefix_of_a_group_counts_once_in_the_room(start):
    driver = start(max_num_seqs=1, step_s=0.05)
    rows = [
        replace(
            request(i, max_tokens=100),
            prompt_token_ids=np.ones(110, np.int32),
            group_id=3,
            prefix_len=100,
        )
        for i in range(20)
    ]
    driver.engine.submit(rows)
    driver.wait_until(lambda: driver.engine.stats.num_running == 1)
    # 19 rows wait, of 100 / 20 + 10 tokens each on average
    assert driver.engine.credit() == Credit(tokens=1000 - 19 * 15, rows=64 - 19)


def test_aborted_rows_leave_nothing_behind(start):
    driver = start(max_num_seqs=2, step_s=0.01)
    driver.engine.submit([request(i, max_tokens=100_000, n=2) for i in range(10, 20)])
    driver.engine.submit([request(30)])
    driver.engine.abort(10, 19).result(10)
    assert [c.request_id for c in driver.rows(1)] == [30]
    driver.wait_until(lambda: driver.engine.stats.num_running == 0)
    assert driver.engine.is_idle()
    assert driver.engine.collect() == []


def test_finished_rows_that_are_aborted_are_not_collected(start):
    driver = start()
    driver.engine.submit([request(1), request(2)])
    driver.wait_until(driver.engine.is_idle)
    driver.engine.abort(1, 1).result(10)
    assert [c.request_id for c in driver.engine.collect()] == [2]


def test_an_abort_makes_room(start):
    driver = start(max_num_seqs=1, step_s=0.01)
    driver.engine.submit([request(i, max_tokens=100_000) for i in range(64)])
    assert driver.engine.credit() is None
    driver.news.clear()
    driver.engine.abort(0, 63).result(10)
    driver.wait_until(lambda: driver.engine.credit() is not None)


def test_a_call_that_was_cancelled_does_not_break_the_engine(start):
    driver = start(step_s=0.01)
    driver.engine.submit([request(1, max_tokens=5)])
    driver.engine.give_back(5).cancel()
    assert [c.request_id for c in driver.rows(1)] == [1]
    assert driver.engine.failure is None


def test_a_start_whose_caller_was_cancelled_ends_quietly():
    may_build = threading.Event()

    def build():
        may_build.wait(10)
        return FakeBackend(FakeOptions())

    engine = EngineThread(build, lambda: None, lead_tokens=1000)
    engine.start().cancel()
    may_build.set()
    # an exception in the thread would be a warning, and warnings are errors
    engine.close()
    assert engine.failure is None


def test_calls_to_an_engine_that_has_broken_are_refused(start):
    driver = start(raise_on=9)
    driver.engine.submit([request(0, token=9)])
    driver.wait_until(lambda: driver.engine.failure is not None)
    for call in (driver.engine.give_back(1), driver.engine.abort(0, 0)):
        with pytest.raises(EngineEndedError):
            call.result(10)


def test_calls_that_wait_while_the_engine_breaks_are_refused(start, monkeypatch):
    driver = start()

    def broken(self):
        raise RuntimeError("the engine broke")

    monkeypatch.setattr(FakeBackend, "drain", broken)
    calls = [driver.engine.give_back(1) for _ in range(3)]
    for call in calls:
        with pytest.raises(EngineEndedError):
            call.result(10)


def test_calls_to_an_engine_that_is_closed_are_refused(start):
    driver = start()
    driver.engine.close()
    with pytest.raises(EngineEndedError):
        driver.engine.give_back(1).result(10)


class LongSteps(FakeBackend):
    """Reports the rows of a step, then blocks until the test continues."""

    def __init__(self, options):
        super().__init__(options)
        self.has_looked, self.may_end = threading.Event(), threading.Event()

    def watch(self, scheduled):
        self._scheduled = scheduled

    def poll(self):
        completions = super().poll()
        self._scheduled()
        self.has_looked.set()
        assert self.may_end.wait(10)
        return completions


def test_a_long_step_is_reported_while_it_runs(start):
    made = []
    driver = start(lambda options: made.append(LongSteps(options)) or made[0])
    driver.engine.submit([request(0), request(1)])
    backend, seen = made[0], []
    assert backend.has_looked.wait(10)
    for _ in range(3):
        seen.append(driver.engine.stats)
        time.sleep(0.01)
    assert [stats.num_running for stats in seen] == [2, 2, 2]
    assert 0 < seen[0].busy_s < seen[1].busy_s < seen[2].busy_s
    backend.may_end.set()
    driver.rows(2)
    seen.append(driver.engine.stats)
    assert seen[3].num_steps > 0
    assert seen[3].busy_s >= seen[2].busy_s
