"""Replicas that hang are detected by their reports, killed and replaced."""

import os
import signal

import pytest

from raybatch.actors.replicas.starts import StuckWatch
from raybatch.config import PoolConfig
from tests.actors.pools import (
    POISON,
    SAMPLING,
    Background,
    expected_tokens,
    generate,
    handle_of,
    is_computing,
    prompts_of,
    table_of,
    tokens_of,
    wait_until,
)


def watch_of(*, after_s=10.0, start_s=100.0):
    return StuckWatch(PoolConfig(stuck_after_s=after_s, start_timeout_s=start_s))


def ticks(watch, seconds, *, pulse=None, with_rows=(1,)):
    """Let seconds pass one by one, with a report before each; return the hung replicas."""
    found = {}
    for _ in range(seconds):
        if pulse is not None:
            watch.note_report(1, *pulse)
        found = watch.tick(1.0, with_rows)
    return found


def test_an_engine_that_reports_but_finishes_no_step_hangs():
    watch = watch_of()
    assert ticks(watch, 10, pulse=(3, "steps")) == {}
    assert "finished no step for 10 s" in ticks(watch, 1, pulse=(3, "steps"))[1]


def test_a_finished_step_starts_the_clock_again():
    watch = watch_of()
    for num_steps in range(1, 5):
        assert ticks(watch, 9, pulse=(num_steps, "steps")) == {}


def test_a_replica_that_says_nothing_hangs_only_with_rows():
    watch = watch_of()
    assert ticks(watch, 50, with_rows=()) == {}
    assert ticks(watch, 10) == {}
    assert "for 10 s" in ticks(watch, 1)[1]


def test_a_first_step_may_take_as_long_as_a_start():
    watch = watch_of()
    assert ticks(watch, 100, pulse=(0, "steps")) == {}
    assert "no first step for 100 s" in ticks(watch, 1, pulse=(0, "steps"))[1]


@pytest.mark.parametrize("num_before", [0, 7], ids=["first", "later"])
def test_steps_may_take_twice_as_long_as_the_longest_of_the_pool(num_before):
    watch = watch_of()
    ticks(watch, 15, pulse=(0, "steps"))
    watch.note_report(1, 1, "steps")
    watch.forget(1)
    assert ticks(watch, 30, pulse=(num_before, "steps")) == {}
    assert "for 30 s" in ticks(watch, 1, pulse=(num_before, "steps"))[1]


@pytest.mark.parametrize("busy_with", ["fetching", "endpoint"])
def test_work_outside_of_steps_may_take_any_time_while_the_replica_answers(busy_with):
    assert ticks(watch_of(), 1000, pulse=(3, busy_with)) == {}


def test_none_waits_for_ever():
    assert ticks(watch_of(after_s=None), 100_000) == {}


ON_RAY = [pytest.mark.ray, pytest.mark.slow]
EXECUTORS = [pytest.param(True, id="local"), pytest.param(False, id="ray", marks=ON_RAY)]


@pytest.fixture(params=EXECUTORS)
def pool(request):
    """Makes a pool on either executor, which ends with its test."""
    if not request.param:
        request.getfixturevalue("ray_cluster")
    handles = []

    def make(**options):
        limits = {"replicas": 2, "stuck_after_s": 2.0} | options.pop("pool", {})
        # `hang_on` gives each engine of a local pool its own process
        handle = handle_of(is_local=request.param, pool=limits, **{"hang_on": POISON} | options)
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        handle.shutdown()


def test_a_row_that_hangs_engines_becomes_an_error_row(pool):
    handle = pool(pool={"replicas": 1, "max_row_crashes": 1})
    # the first step has finished
    generate(handle, table_of(prompts_of(2)), (SAMPLING,))
    prompts = prompts_of(2, poison=[1])
    results = generate(handle, table_of(prompts), (SAMPLING,))
    errors = results["error"].to_pylist()
    assert [row for row, error in enumerate(errors) if error] == [1]
    assert errors[1].startswith("ReplicaCrash: the engine died")
    assert "the engine hung: it has finished no" in errors[1]
    expected = expected_tokens(prompts)
    expected[1] = []
    assert expected == tokens_of(results)
    stats = handle.stats()
    assert 0 < stats.hung <= stats.restarts


def test_a_process_that_answers_nothing_is_replaced_and_its_rows_run_elsewhere(pool):
    handle = pool(step_s=0.02, max_num_seqs=4)
    prompts = prompts_of(300)
    job = Background(handle, prompts)
    wait_until(lambda: len(handle.state().pids) == 2 and is_computing(handle))
    stopped = handle.state().pids[0]
    os.kill(stopped, signal.SIGSTOP)
    assert expected_tokens(prompts) == tokens_of(job.join())
    wait_until(lambda: stopped not in handle.state().pids)
    assert handle.stats().hung >= 1
    wait_until(lambda: not is_alive(stopped))


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
