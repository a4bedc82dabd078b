"""The pool on a local Ray cluster: every row comes out once, and engines stay warm."""

import asyncio

import pytest
import ray

from raybatch.actors.pool import release_pools
from raybatch.types import Sampling
from tests.actors.pools import (
    POISON,
    SAMPLING,
    Background,
    expected_tokens,
    handle_of,
    make_feeder,
    prompts_of,
    table_of,
    tokens_of,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


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


def test_a_handle_works_where_it_was_sent(shared):
    assert ray.get(make_feeder(shared).run.remote(table_of(prompts_of(30)), SAMPLING)) == 30


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
