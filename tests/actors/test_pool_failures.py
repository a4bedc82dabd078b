"""The pool on a local Ray cluster: after any death no row is lost, doubled or run in vain."""

import os
import signal

import numpy as np
import pytest
import ray

from raybatch.actors.executors import ray_pools
from raybatch.actors.queue.pulling import MAX_LEADS
from raybatch.errors import ReplicaError
from tests.actors.pools import (
    LONG,
    POISON,
    SAMPLING,
    Background,
    cancel_a_call,
    expected_tokens,
    generate,
    handle_of,
    is_computing,
    make_feeder,
    prompts_of,
    table_of,
    tokens_of,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_killed_replicas_lose_no_row_and_redo_no_finished_row(own):
    num_rows = 4000
    handle = own(step_s=0.005, max_num_seqs=32)
    prompts = prompts_of(num_rows)
    job = Background(handle, prompts)
    num_done = []
    for fraction in (0.3, 0.6):
        wait_until(lambda f=fraction: handle.stats().rows_done >= f * num_rows)
        wait_until(lambda: len(handle.state().pids) == 2)
        num_done.append(handle.stats().rows_done)
        os.kill(handle.state().pids[0], signal.SIGKILL)
    results = job.join()
    assert expected_tokens(prompts) == tokens_of(results)
    attempts = np.array(results["attempts"])
    assert handle.stats().restarts == 2
    assert attempts.max() > 1
    # two deaths repeat at most the rows that two engines hold
    assert attempts.sum() - num_rows <= 2 * 2 * (32 + 64 * MAX_LEADS)
    assert num_rows == handle.stats().rows_done


def test_a_poison_row_becomes_one_error_row(own):
    prompts = prompts_of(4, poison=[2])
    handle = own(crash_on=POISON, pool={"replicas": 1, "max_row_crashes": 1})
    results = generate(handle, table_of(prompts), (SAMPLING,))
    errors = results["error"].to_pylist()
    assert "ReplicaCrash: the engine died" in errors[2]
    expected = expected_tokens(prompts)
    expected[2] = []
    assert expected == tokens_of(results)
    assert [row for row, error in enumerate(errors) if error] == [2]


def test_a_failing_start_raises_with_its_cause(own):
    handle = own(fail_start=True, pool={"replicas": 1, "max_start_failures": 2})
    for _ in range(2):
        with pytest.raises(ReplicaError, match="RuntimeError: the fake backend fails"):
            generate(handle, table_of(prompts_of(3)), (SAMPLING,))


def test_the_engines_stop_the_rows_of_a_cancelled_call(own):
    handle = own(step_s=0.02, max_num_seqs=4)
    cancel_a_call(handle, 500)
    wait_until(lambda: not is_computing(handle), 60)
    # rows in transit to an engine are dropped on arrival
    wait_until(lambda: not handle.state().num_held_rows, 60)
    state = handle.state()
    assert (state.num_batches, state.num_waiting_rows) == (0, 0)


def test_the_engines_stop_the_rows_of_a_dead_feeder(own):
    handle = own(step_s=0.02, max_num_seqs=1, pool={"replicas": 1, "feeder_timeout_s": 0.6})
    feeder = make_feeder(handle)
    feeder.run.remote(table_of(prompts_of(500)), LONG)
    wait_until(lambda: is_computing(handle))
    ray.kill(feeder)
    wait_until(lambda: not is_computing(handle), 60)
    state = handle.state()
    assert (state.num_batches, state.num_waiting_rows, state.num_held_rows) == (0, 0, 0)


def pool_whose_feeder_died(own, log, prompts):
    """Return a pool that has finished a quarter of the rows of "unit 3" when its feeder dies."""
    log.touch()
    handle = own(step_s=0.02, max_num_seqs=8, finished_log=str(log))
    feeder = make_feeder(handle)
    feeder.run_named.remote(table_of(prompts), SAMPLING, "unit 3")
    wait_until(lambda: log.stat().st_size >= len(prompts) // 4)
    ray.kill(feeder)
    return handle


def test_a_feeder_continues_where_the_one_before_it_died(own, tmp_path):
    num_rows, log = 400, tmp_path / "finished"
    prompts = prompts_of(num_rows)
    handle = pool_whose_feeder_died(own, log, prompts)
    second = make_feeder(handle)
    results = ray.get(second.run_named.remote(table_of(prompts), SAMPLING, "unit 3"))
    assert expected_tokens(prompts) == tokens_of(results)
    assert log.stat().st_size == num_rows


def test_rows_that_finish_while_there_is_no_feeder_are_kept_for_the_next(own, tmp_path):
    num_rows, log = 40, tmp_path / "finished"
    prompts = prompts_of(num_rows)
    handle = pool_whose_feeder_died(own, log, prompts)
    wait_until(lambda: handle.state().num_held_rows + handle.state().num_waiting_rows == 0)
    assert log.stat().st_size == num_rows
    second = make_feeder(handle)
    results = ray.get(second.run_named.remote(table_of(prompts), SAMPLING, "unit 3"))
    assert expected_tokens(prompts) == tokens_of(results)
    assert log.stat().st_size == num_rows
    handle.forget(["unit 3"], client="default")
    wait_until(lambda: handle.state().num_batches == 0)


def test_a_dead_coordinator_is_replaced_on_the_use_after_the_error():
    handle = handle_of(pool={"replicas": 1})
    generate(handle, table_of(prompts_of(1)), (SAMPLING,))
    os.kill(handle.state().coordinator_pid, signal.SIGKILL)
    with pytest.raises(ReplicaError, match="coordinator of the pool is gone"):
        generate(handle, table_of(prompts_of(1)), (SAMPLING,))
    assert generate(handle, table_of(prompts_of(1)), (SAMPLING,)).num_rows == 1
    handle.shutdown()


def test_an_execution_begins_with_a_new_coordinator_where_one_died_as_it_began():
    handle = handle_of(pool={"replicas": 1})
    # Ray still finds its name after its death, because this test holds a reference
    dead = ray_pools._make(ray_pools._name(handle.spec), handle.spec)
    os.kill(ray.get(dead.state.remote()).coordinator_pid, signal.SIGKILL)
    handle.connect()
    assert handle.stats().rows_done == 0
    assert generate(handle, table_of(prompts_of(1)), (SAMPLING,)).num_rows == 1
    handle.shutdown()


def test_two_users_who_notice_a_death_keep_the_new_coordinator():
    handle = handle_of(pool={"replicas": 1})
    pools, dead = handle._pools, handle._connect()
    os.kill(handle.state().coordinator_pid, signal.SIGKILL)
    with pytest.raises(ReplicaError, match="coordinator of the pool is gone"):
        handle.stats()
    pid = handle.state().coordinator_pid
    pools.forget(handle.spec, dead)
    assert handle.state().coordinator_pid == pid
    handle.shutdown()
