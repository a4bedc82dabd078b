"""The pool on a local Ray cluster: every row comes out once, whatever dies."""

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
import ray

from raybatch.actors.pool import PoolHandle, PoolSpec, release_pools
from raybatch.actors.wire import decode_completions, request_table
from raybatch.backends.fake import fake_tokens
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ReplicaError
from raybatch.types import Sampling

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SAMPLING = Sampling(max_tokens=4)
POISON = 999


def handle_of(*, pool=None, **options):
    return PoolHandle(
        PoolSpec(
            model="none",
            backend=BackendConfig(kind="fake", options=options),
            engine=EngineConfig(max_batched_tokens=64),
            pool=PoolConfig(**({"replicas": 2} | (pool or {}))),
        )
    )


@pytest.fixture
def shared():
    """The pool without options; warm for all tests that need no other."""
    return handle_of()


@pytest.fixture
def own():
    """Makes a pool that ends with its test."""
    handles = []

    def make(**options):
        handles.append(handle_of(**options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.shutdown()


def prompts_of(num_rows, **special):
    prompts = [np.array([i % 97, i % 11, 1], np.int32) for i in range(num_rows)]
    for row in special.get("poison", ()):
        prompts[row] = np.array([POISON], np.int32)
    return prompts


def table_of(prompts):
    seeds = np.arange(len(prompts), dtype=np.uint64)
    return request_table([str(i) for i in range(len(prompts))], prompts, seeds=seeds)


def expected_tokens(prompts):
    return [fake_tokens(p, i, SAMPLING).tolist() for i, p in enumerate(prompts)]


def tokens_of(results):
    return [c.token_ids.tolist() for c in decode_completions(results)]


def wait_until(is_there, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waits for does not happen")
        time.sleep(0.02)


class Background:
    """One `generate_sync` in a thread."""

    def __init__(self, handle, prompts, client="default"):
        self.results = None
        self.error = None
        self._args = (handle, prompts, client)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        handle, prompts, client = self._args
        try:
            self.results = handle.generate_sync(table_of(prompts), (SAMPLING,), client=client)
        except Exception as error:
            self.error = error

    def join(self):
        self._thread.join(60)
        if self.error is not None:
            raise self.error
        return self.results


def test_every_row_comes_out_once_with_its_answer(shared):
    prompts = prompts_of(500)
    results = shared.generate_sync(table_of(prompts), (SAMPLING,))
    assert list(range(500)) == results["row"].to_pylist()
    assert expected_tokens(prompts) == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())


def test_an_empty_table_gives_an_empty_table(shared):
    assert shared.generate_sync(table_of([]), (SAMPLING,)).num_rows == 0


def test_every_sample_of_a_row_comes_out(shared):
    results = shared.generate_sync(table_of(prompts_of(3)), (Sampling(max_tokens=2, n=2),))
    assert results["row"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert results["sample_idx"].to_pylist() == [0, 1, 0, 1, 0, 1]


def test_an_engine_error_is_one_error_row(own):
    prompts = prompts_of(20, poison=[7])
    handle = own(error_on=POISON, pool={"replicas": 1})
    errors = handle.generate_sync(table_of(prompts), (SAMPLING,))["error"].to_pylist()
    assert [row for row, error in enumerate(errors) if error] == [7]
    assert dict(handle.stats().errors) == {"ValueError": 1}


def test_unstarted_rows_of_a_slow_replica_move_to_a_fast_one(own, tmp_path):
    handle = own(marks_dir=str(tmp_path), num_slow_starts=1, slow_step_s=0.1, max_num_seqs=4)
    handle.start()
    wait_until(lambda: len(handle.state().pids) == 2)
    # so few that both engines take their half at once
    handle.generate_sync(table_of(prompts_of(120)), (SAMPLING,))
    fewer, more = sorted(handle.state().finished_by_pid.values())
    assert fewer + more == 120
    assert 0 < 2 * fewer < more


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
    assert handle.stats().num_restarts == 2
    assert attempts.max() > 1
    # what one engine holds bounds what two deaths may cost
    assert attempts.sum() - num_rows <= 2 * 2 * (32 + 64)
    assert num_rows == handle.stats().rows_done


def test_a_poison_row_becomes_one_error_row(own):
    prompts = prompts_of(4, poison=[2])
    handle = own(crash_on=POISON, pool={"replicas": 1, "max_row_crashes": 1})
    results = handle.generate_sync(table_of(prompts), (SAMPLING,))
    errors = results["error"].to_pylist()
    assert "ReplicaCrash: the engine died" in errors[2]
    expected = expected_tokens(prompts)
    expected[2] = []
    assert expected == tokens_of(results)
    assert [row for row, error in enumerate(errors) if error] == [2]


def test_a_broken_engine_is_replaced(own):
    handle = own(raise_on=POISON, pool={"replicas": 1, "max_row_crashes": 1})
    handle.generate_sync(table_of(prompts_of(1, poison=[0])), (SAMPLING,))
    results = handle.generate_sync(table_of(prompts_of(3)), (SAMPLING,))
    assert results["error"].to_pylist() == ["", "", ""]
    assert handle.stats().num_restarts == 1


def test_a_failing_start_raises_with_its_cause(own):
    handle = own(fail_start=True, pool={"replicas": 1, "max_start_failures": 2})
    for _ in range(2):
        with pytest.raises(ReplicaError, match="RuntimeError: the fake backend was told to fail"):
            handle.generate_sync(table_of(prompts_of(3)), (SAMPLING,))


def test_a_failed_pool_gets_another_try_at_the_next_execution(own, tmp_path):
    handle = own(
        marks_dir=str(tmp_path),
        num_failing_starts=1,
        pool={"replicas": 1, "max_start_failures": 1},
    )
    with pytest.raises(ReplicaError):
        handle.generate_sync(table_of(prompts_of(3)), (SAMPLING,))
    handle.start()
    results = handle.generate_sync(table_of(prompts_of(3)), (SAMPLING,))
    assert results["error"].to_pylist() == ["", "", ""]


def test_a_hung_start_raises(own):
    handle = own(
        start_s=60.0, pool={"replicas": 1, "start_timeout_s": 0.5, "max_start_failures": 1}
    )
    with pytest.raises(ReplicaError, match="start_timeout_s"):
        handle.generate_sync(table_of(prompts_of(3)), (SAMPLING,))


def test_a_start_that_fails_once_is_tried_again(own, tmp_path):
    handle = own(marks_dir=str(tmp_path), num_failing_starts=1, pool={"replicas": 1})
    results = handle.generate_sync(table_of(prompts_of(3)), (SAMPLING,))
    assert results["error"].to_pylist() == ["", "", ""]


def test_a_pool_stays_warm_and_is_shared_by_equal_specs(shared):
    shared.generate_sync(table_of(prompts_of(10)), (SAMPLING,))
    wait_until(lambda: len(shared.state().pids) == 2)
    pids = shared.state().pids
    shared.generate_sync(table_of(prompts_of(10)), (SAMPLING,))
    assert pids == shared.state().pids


def test_counters_are_kept_per_client(shared):
    jobs = [
        Background(shared, prompts_of(30), client="a"),
        Background(shared, prompts_of(50), client="b"),
    ]
    for job in jobs:
        job.join()
    stats = {client: shared.stats(client) for client in ("a", "b", "c")}
    assert {c: s.rows_done for c, s in stats.items()} == {"a": 30, "b": 50, "c": 0}
    assert stats["b"].generated_tokens == 50 * 4
    assert stats["b"].max_tokens_left == 0


def test_nothing_stays_in_the_coordinator(shared):
    shared.generate_sync(table_of(prompts_of(200)), (SAMPLING,))
    state = shared.state()
    assert (
        state.num_batches,
        state.num_waiting_rows,
        state.num_held_rows,
        state.num_results,
    ) == (0, 0, 0, 0)


def test_many_calls_of_one_event_loop_run_together(shared):

    async def run():
        tables = [table_of(prompts_of(40)) for _ in range(16)]
        return await asyncio.gather(*(shared.generate(t, (SAMPLING,)) for t in tables))

    assert [results.num_rows for results in asyncio.run(run())] == [40] * 16


def test_a_cancelled_call_frees_its_rows(own):
    handle = own(step_s=0.2, max_num_seqs=1, pool={"replicas": 1})

    async def run():
        task = asyncio.create_task(handle.generate(table_of(prompts_of(500)), (SAMPLING,)))
        while handle.state().num_held_rows == 0:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    wait_until(lambda: handle.state().num_batches == 0)
    assert handle.state().num_waiting_rows == 0


def make_feeder(handle):
    """Return an actor that asks the pool; defined here so that it travels by value."""

    @ray.remote(num_cpus=0.1)
    class Feeder:
        def __init__(self, handle):
            self._handle = handle

        def run(self, table, sampling):
            return self._handle.generate_sync(table, (sampling,)).num_rows

    return Feeder.remote(handle)


def test_a_handle_works_where_it_was_sent(shared):
    assert ray.get(make_feeder(shared).run.remote(table_of(prompts_of(30)), SAMPLING)) == 30


def test_the_rows_of_a_dead_feeder_are_dropped(own):
    handle = own(step_s=0.2, max_num_seqs=1, pool={"replicas": 1, "feeder_timeout_s": 0.6})
    feeder = make_feeder(handle)
    feeder.run.remote(table_of(prompts_of(500)), SAMPLING)
    wait_until(lambda: handle.state().num_batches == 1)
    ray.kill(feeder)
    wait_until(lambda: handle.state().num_batches == 0)
    assert handle.state().num_waiting_rows == 0


def test_an_idle_pool_releases_its_engines_and_starts_them_on_demand(own):
    handle = own(pool={"replicas": 1, "idle_release_s": 0.5})
    handle.generate_sync(table_of(prompts_of(10)), (SAMPLING,))
    wait_until(lambda: not handle.state().pids)
    assert handle.generate_sync(table_of(prompts_of(10)), (SAMPLING,)).num_rows == 10


def test_a_released_pool_is_made_again_on_the_next_use():
    handle = handle_of(pool={"replicas": 1})
    handle.generate_sync(table_of(prompts_of(10)), (SAMPLING,))
    release_pools()
    handle.generate_sync(table_of(prompts_of(20)), (SAMPLING,))
    assert handle.stats().rows_done == 20


def test_a_shut_down_pool_tells_those_who_wait(own):
    handle = own(step_s=0.2, max_num_seqs=1, pool={"replicas": 1})
    job = Background(handle, prompts_of(500))
    wait_until(lambda: handle.state().num_batches == 1)
    handle.shutdown()
    with pytest.raises(ReplicaError, match="shut down"):
        job.join()


def test_a_dead_coordinator_is_replaced_on_the_use_after_the_error():
    handle = handle_of(pool={"replicas": 1})
    handle.generate_sync(table_of(prompts_of(1)), (SAMPLING,))
    os.kill(handle.state().coordinator_pid, signal.SIGKILL)
    with pytest.raises(ReplicaError, match="coordinator of the pool is gone"):
        handle.generate_sync(table_of(prompts_of(1)), (SAMPLING,))
    assert handle.generate_sync(table_of(prompts_of(1)), (SAMPLING,)).num_rows == 1
    handle.shutdown()
