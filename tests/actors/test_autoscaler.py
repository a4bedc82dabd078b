"""Pools whose number of engines follows the work, and engines that drain before they end."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from raybatch.actors.coordinator.rebalancer import Autoscaler
from raybatch.actors.replicas.replica_set import Member
from raybatch.backends.fake import fake_tokens
from raybatch.errors import ReplicaError
from raybatch.policy.pool import autoscaling
from raybatch.records.types import Sampling
from tests.actors.pools import (
    LONG,
    POISON,
    Background,
    expected_tokens,
    handle_of,
    prompts_of,
    table_of,
    tokens_of,
    wait_until,
)
from tests.actors.queues import AMPLE, queue_of

ELASTIC = {"replicas": None, "min_replicas": 1, "max_replicas": 3}


@pytest.fixture
def pool():
    """Makes a pool without Ray that ends with its test."""
    handles = []

    def make(**options):
        handles.append(handle_of(is_local=True, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.shutdown()


async def wait_beside_a_long_row(handle, is_there):
    """Run a row that does not end, until a condition is true."""
    task = asyncio.create_task(handle.generate(table_of(prompts_of(1)), (LONG,)))
    async with asyncio.timeout(60):
        while not is_there():
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_pool_grows_while_work_is_left_and_idle_engines_stop_beside_the_last_row(
    pool, monkeypatch
):
    monkeypatch.setattr(autoscaling, "LEAST_IDLE_S", 0.0)
    handle, prompts = pool(pool=ELASTIC, step_s=0.02, max_num_seqs=4), prompts_of(1500)
    job = Background(handle, prompts)
    wait_until(lambda: handle.stats().num_ready == 1)
    assert handle.stats().num_replicas == 1
    wait_until(lambda: handle.stats().num_ready == 3)
    results = job.join()
    assert expected_tokens(prompts) == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())
    stats = handle.stats()
    assert (stats.most_replicas, stats.restarts, stats.num_restarting) == (3, 0, 0)
    asyncio.run(wait_beside_a_long_row(handle, lambda: handle.stats().num_replicas == 1))
    wait_until(lambda: handle.stats().num_ready == 1)
    # the stopped engines were idle, and none of their results was lost
    stats = handle.stats()
    assert (stats.restarts, stats.num_restarting, stats.num_given_up) == (0, 0, 0)


async def terminate_the_first(handle):
    """Send SIGTERM to an engine of two that work, and return its process."""
    while len(handle.stats().replicas) < 2 or not all(
        replica.num_running for replica in handle.stats().replicas
    ):
        await asyncio.sleep(0.02)
    first, _ = handle.state().pids
    os.kill(first, signal.SIGTERM)
    return first


@pytest.mark.parametrize(
    ("num_rows", "max_num_seqs", "has_room"),
    [
        pytest.param(24, 32, True, id="others have room"),
        pytest.param(50, 20, False, id="rows wait"),
    ],
)
def test_a_process_that_gets_sigterm_leaves_and_no_row_is_tried_twice(
    pool, num_rows, max_num_seqs, has_room
):
    """Waiting rows return to the queue, running rows move if there is room; it is no failure."""
    sampling = Sampling(max_tokens=300)
    # this option gives each engine its own process
    handle = pool(step_s=0.005, max_num_seqs=max_num_seqs, crash_on=POISON)
    prompts = prompts_of(num_rows)

    async def run():
        job = asyncio.create_task(handle.generate(table_of(prompts), (sampling,)))
        first = await terminate_the_first(handle)
        while first in handle.state().pids:
            await asyncio.sleep(0.02)
        assert not job.done()
        return await job

    results = asyncio.run(run())
    expected = [fake_tokens(p, i, sampling).tolist() for i, p in enumerate(prompts)]
    assert expected == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())
    stats = handle.stats()
    assert stats.moved > 0 or not has_room
    # its waiting rows have run at the other engine
    assert sum(handle.state().finished_by_pid.values()) >= num_rows - max_num_seqs
    assert (stats.restarts, stats.num_given_up) == (0, 0)


def test_an_engine_that_dies_on_its_way_out_costs_no_row_an_attempt(pool, caplog):
    sampling, prompts = Sampling(max_tokens=200), prompts_of(50)
    handle = pool(step_s=0.005, max_num_seqs=20, crash_on=POISON)

    async def run():
        job = asyncio.create_task(handle.generate(table_of(prompts), (sampling,)))
        first = await terminate_the_first(handle)
        while "draining" not in caplog.text:
            await asyncio.sleep(0.01)
        assert first in handle.state().pids
        os.kill(first, signal.SIGKILL)
        return await job

    results = asyncio.run(run())
    expected = [fake_tokens(p, i, sampling).tolist() for i, p in enumerate(prompts)]
    assert expected == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())
    assert handle.stats().restarts == 0


def test_a_pool_that_may_grow_fails_with_the_cause_where_its_first_engine_cannot_start(pool):
    handle = pool(pool=ELASTIC, refuse_start=True)
    job = Background(handle, prompts_of(3))
    with pytest.raises(ReplicaError, match="ConfigError: the fake backend refuses"):
        job.join()


@pytest.mark.parametrize("work", ["", "rows", "moves", "steps"])
def test_a_replica_for_which_the_same_plan_has_work_does_not_stop(work):
    started = SimpleNamespace(actor=None, end=lambda: None)
    member = Member(replica_id=2, rank=1, started=started, is_ready=True)
    member.is_tp_worker = work == "steps"
    queue, released = queue_of(1), []
    if work == "rows":
        queue.dispatch({2: AMPLE})
    parts = SimpleNamespace(
        plan=SimpleNamespace(num_first=1, num_replicas=2),
        replicas=SimpleNamespace(
            members={2: member}, ledger=SimpleNamespace(release=released.append)
        ),
        queue=queue,
        view=SimpleNamespace(num_moves=lambda _: int(work == "moves")),
        pending_pulls=SimpleNamespace(answer=lambda replica_id, _: released.append(replica_id)),
    )
    Autoscaler(parts).apply(autoscaling.AutoscalePlan(stops=(2,), reason="nothing is left"))
    assert (not work) == member.is_draining == bool(released)
