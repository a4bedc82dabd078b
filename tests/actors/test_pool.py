"""The pool on a local Ray cluster: every row comes out once, and engines stay warm."""

import asyncio

import pytest
import ray

from raybatch.actors.pool import release_pools
from tests.actors.pools import (
    SAMPLING,
    expected_tokens,
    generate,
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
    results = generate(shared, table_of(prompts), (SAMPLING,))
    assert list(range(500)) == results["row"].to_pylist()
    assert expected_tokens(prompts) == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())


def test_unstarted_rows_of_a_slow_replica_move_to_a_fast_one(own, tmp_path):
    handle = own(marks_dir=str(tmp_path), num_slow_starts=1, slow_step_s=0.1, max_num_seqs=4)
    handle.start()
    wait_until(lambda: len(handle.state().pids) == 2)
    # so few that both engines take their half at once
    generate(handle, table_of(prompts_of(120)), (SAMPLING,))
    fewer, more = sorted(handle.state().finished_by_pid.values())
    assert fewer + more == 120
    assert 0 < 2 * fewer < more


def test_a_pool_stays_warm_and_is_shared_by_equal_specs(shared):
    generate(shared, table_of(prompts_of(10)), (SAMPLING,))
    wait_until(lambda: len(shared.state().pids) == 2)
    pids = shared.state().pids
    generate(shared, table_of(prompts_of(10)), (SAMPLING,))
    assert pids == shared.state().pids


def test_many_calls_of_one_event_loop_run_together(shared):

    async def run():
        tables = [table_of(prompts_of(40)) for _ in range(16)]
        return await asyncio.gather(*(shared.generate(t, (SAMPLING,)) for t in tables))

    assert [results.num_rows for results in asyncio.run(run())] == [40] * 16


def test_a_handle_works_where_it_was_sent(shared):
    assert ray.get(make_feeder(shared).run.remote(table_of(prompts_of(30)), SAMPLING)) == 30


def test_a_released_pool_is_made_again_on_the_next_use():
    handle = handle_of(pool={"replicas": 1})
    generate(handle, table_of(prompts_of(10)), (SAMPLING,))
    release_pools()
    generate(handle, table_of(prompts_of(20)), (SAMPLING,))
    assert handle.stats().rows_done == 20
