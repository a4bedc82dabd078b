"""Rows that two replicas compute: one result each with equal tokens after any failure."""

import asyncio
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from raybatch.actors.wire.records import ROW_BITS, ROW_MASK
from raybatch.backends.choice import check_pool
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError
from raybatch.policy.pool.throughput import StepSeconds
from raybatch.records.types import Capacity
from raybatch_extensions.speculative.copies import SpeculativeCopies
from raybatch_extensions.speculative.policy import SpeculativeCopy
from raybatch_extensions.speculative.pool import LaunchCopies, SpeculativeExecution
from tests.actors.moving_pool import MovingPool
from tests.actors.queues import AMPLE, queue_of
from tests.actors.test_moves import LONG, NUM_ROWS, PROMPTS, expected, run, until
from tests.tiers import some


@pytest.fixture(autouse=True)
def reported_often(monkeypatch):
    """Rows of these engines live for less than a second."""
    monkeypatch.setattr("raybatch.actors.replica.replica._PROGRESS_EVERY_S", 0.01)


def check_runs(pool):
    """Check that each row has one live owner, and that loads are all runs, copies included."""
    queue, members = pool.queue, pool.coordinator._replicas.members
    counted = dict.fromkeys(members, 0)
    for batch in queue._batches.values():
        for replica_id in batch.holders():
            counted[replica_id] += len(batch.held_by(replica_id))
    for row_id in queue.copies.row_ids():
        places = queue.copies.are_at(np.array(list(members)), np.full(len(members), row_id))
        (at,) = np.array(list(members))[places].tolist()
        batch, row = queue._batches[row_id >> ROW_BITS], row_id & ROW_MASK
        assert batch.holder[row] in members
        assert batch.holder[row] != at
        counted[at] += 1
    for replica_id, _ in queue.copies._ending:
        counted[replica_id] += 1
    for replica_id, num_rows in counted.items():
        assert queue.load(replica_id).num_rows == num_rows


def check_empty(pool):
    """Check that live replicas hold no rows."""
    for side in pool.runtime.sides.values():
        if not side.dead.is_set():
            side.replica.engine.check()
            assert not side.replica.engine.num_unfinished()
            assert not side.replica._open


def held_rows(pool):
    """Return owner and id of all held rows."""
    return [
        (owner, int(row) | of_batch.batch_id << ROW_BITS)
        for of_batch in pool.queue.copies.held()
        for row, owner in zip(of_batch.rows, of_batch.owners.tolist(), strict=True)
    ]


def copy_some(pool, generator):
    """Begin a copy of a random row at a replica that requests rows; return both sides."""
    members = pool.coordinator._replicas.members
    rows = held_rows(pool)
    if rows:
        owner, row_id = generator.choice(rows)
        target = generator.choice([r for r in members if r != owner] or [owner])
        if target != owner and pool.copy(row_id, target):
            return owner, target
    return None


async def first_copy(pool, generator):
    while (sides := copy_some(pool, generator)) is None:
        await asyncio.sleep(0.002)
    return sides


def copies_and_moves(seed, moves):
    async def meanwhile(pool):
        generator = random.Random(seed)
        while True:
            await asyncio.sleep(0.003)
            copy_some(pool, generator)
            if moves:
                pool.move_at_random(generator)
            check_runs(pool)

    return meanwhile


@pytest.mark.parametrize("moves", [False, True], ids=["copies", "copies-and-moves"])
@pytest.mark.parametrize("seed", some(range(3)))
def test_random_copies_change_no_token_and_give_one_result_per_row(seed, moves):
    pool = MovingPool(num_replicas=3)
    tokens, attempts = run(pool, copies_and_moves(seed, moves))
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    assert pool.queue.copies.counters.num_launched > 0
    check_empty(pool)


def check_open(pool, replica_id):
    """Check that a replica keeps the request table of a batch for as many rows as it runs."""
    num_open = sum(
        batch.num_rows for batch in pool.runtime.sides[replica_id].replica._open.values()
    )
    assert pool.queue.load(replica_id).num_rows == num_open


def test_a_copy_that_is_faster_gives_the_result_and_the_owner_drops_its_run():
    pool, aborted = MovingPool(), []

    async def meanwhile(pool):
        await until(lambda: held_rows(pool))
        owner, row_id = held_rows(pool)[0]
        pool.runtime.sides[owner].replica.backend.pace_s = 0.2
        await until(lambda: pool.copy(row_id, 3 - owner))
        await until(lambda: pool.queue.copies.counters.num_won)
        # the slower run is aborted long before its own end
        await until(lambda: not pool.queue.copies._ending)
        aborted.append(row_id)
        assert await pool.runtime.sides[owner].replica.abort_row(row_id) is None
        check_open(pool, owner)
        # rows without a copy would take half a minute at the slow replica
        pool.runtime.sides[owner].replica.backend.pace_s = 0.0
        await asyncio.Event().wait()

    tokens, attempts = run(pool, meanwhile)
    assert aborted
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    check_empty(pool)


@pytest.mark.parametrize("after_s", some([0.004, 0.0, 0.05]))
@pytest.mark.parametrize("victim", ["owner", "copy"])
def test_a_death_of_either_side_at_any_moment_loses_no_row(victim, after_s):
    pool = MovingPool()
    struck = {}

    async def meanwhile(pool):
        sides = dict(zip(("owner", "copy"), await first_copy(pool, random.Random(7)), strict=True))
        (row_id,) = pool.queue.copies.row_ids()
        await asyncio.sleep(after_s)
        check_runs(pool)
        pool.runtime.sides[sides[victim]].dead.set()
        await until(lambda: sides[victim] not in pool.coordinator._replicas.members)
        batch, row = pool.queue._batches[row_id >> ROW_BITS], row_id & ROW_MASK
        struck[row] = int(batch.crash_counts[row])
        assert not pool.queue.copies.row_ids()
        # the copy now owns the row, or the owner continues it
        assert victim == "copy" or batch.holder[row] == sides["copy"]
        while True:
            check_runs(pool)
            await asyncio.sleep(0.005)

    tokens, attempts = run(pool, meanwhile)
    assert expected(PROMPTS) == tokens
    ((row, num_crashes),) = struck.items()
    assert (num_crashes, attempts[row]) == ((1, 2) if victim == "owner" else (0, 1))
    check_empty(pool)


@pytest.mark.parametrize("seed", some(range(4)))
def test_deaths_among_random_copies_lose_no_row(seed):
    pool = MovingPool(num_replicas=3)

    async def meanwhile(pool):
        generator = random.Random(seed)
        for _ in range(3):
            sides = await first_copy(pool, generator)
            for _ in range(generator.randrange(20)):
                await asyncio.sleep(0.002)
                copy_some(pool, generator)
                check_runs(pool)
            pool.runtime.sides[generator.choice(sides)].dead.set()
        while True:
            check_runs(pool)
            await asyncio.sleep(0.005)

    tokens, _ = run(pool, meanwhile)
    assert expected(PROMPTS) == tokens
    check_empty(pool)


def test_a_copy_that_lost_before_its_rows_were_fetched_is_not_begun():
    pool, submitted = MovingPool(), []

    async def meanwhile(pool):
        await until(lambda: held_rows(pool))
        owner, row_id = held_rows(pool)[0]
        other, backend = pool.runtime.sides[3 - owner], pool.runtime.sides[owner].replica.backend
        engine, submit = other.replica._engine, other.replica._engine.submit

        def submitting(requests, checkpointed):
            submitted.append([request.request_id for request in requests])
            submit(requests, checkpointed)

        backend.pace_s = 0.2
        # the replica has to fetch its request table
        await until(
            lambda: not other.replica._open and 3 - owner in pool.coordinator._parts.demand()
        )

        async def fetch(ref):
            await until(lambda: row_id in other.replica._dropped_rows)
            return ref

        other.fetch, engine.submit = fetch, submitting
        assert pool.copy(row_id, 3 - owner)
        backend.pace_s = 0.002
        await asyncio.Event().wait()

    tokens, attempts = run(pool, meanwhile)
    assert [[]] == submitted
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    check_empty(pool)


def test_copies_of_a_cancelled_batch_are_dropped_at_both_sides():
    pool = MovingPool()

    async def cancelling(pool):
        await first_copy(pool, random.Random(3))
        pool.coordinator._registry.drop_rows(0)
        assert not pool.queue.copies.row_ids()
        await until(lambda: not any(pool.queue.load(r).num_rows for r in (1, 2)))
        for side in pool.runtime.sides.values():
            await until(lambda side=side: not side.replica.engine.num_unfinished())
            assert side.replica.engine.stats().kv_used_fraction == 0.0
        pool.coordinator._registry.fail(0, "the test is over")

    async def whole():
        async with asyncio.timeout(60):
            with pytest.raises(AssertionError, match="the test is over"):
                await pool.generate(PROMPTS, (LONG,), cancelling)

    asyncio.run(whole())


def test_rows_of_an_engine_that_hangs_are_computed_by_one_that_is_idle():
    """Hung replicas are not killed here: without copies their rows would never end."""
    pool, seen = MovingPool(duplicate_last_rows=True, stuck_after_s=None), []
    is_over = threading.Event()

    async def meanwhile(pool):
        members, throughput = pool.coordinator._replicas.members, pool.rebalancer.view.throughput
        await until(lambda: len(members) == 2 and all(m.is_ready for m in members.values()))
        for side in pool.runtime.sides.values():
            side.replica.backend.pace_s = 0.01
        await until(lambda: held_rows(pool) and throughput.seconds(1) is not None)
        owner = max(members, key=lambda r: pool.queue.load(r).num_rows)
        num_hung = pool.queue.load(owner).num_rows
        pool.runtime.sides[owner].replica._engine.call(lambda _: is_over.wait())
        try:
            await until(lambda: owner in pool.rebalancer.view.silent)
            # no row moves to or from it
            seen.append([r.replica_id for r in pool.snapshot().replicas if not r.can_give])
            seen.append([owner])
            await until(lambda: pool.queue.copies.counters.num_won == num_hung)
        finally:
            is_over.set()

    tokens, attempts = run(pool, meanwhile)
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    assert pool.coordinator._replicas.ledger.num_restarts == 0
    assert seen[0] == seen[1]


def queue_with_copies(num_rows):
    queue = queue_of(num_rows)
    queue.attach(SpeculativeCopies)
    return queue


def test_the_death_of_a_copy_is_no_crash_and_the_row_has_no_other():
    queue = queue_with_copies(2)
    queue.dispatch({1: AMPLE})
    assert queue.copies.begin(2, 0)
    assert queue.lose(2).crashes == {}
    assert not queue.copies.begin(3, 0)
    assert queue.copies.begin(3, 1)


def test_a_row_on_its_way_or_alone_as_a_suspect_gets_no_copy():
    queue = queue_with_copies(2)
    queue.dispatch({1: AMPLE})
    queue.begin_move(1, 0, 0)
    assert not queue.copies.begin(2, 0)
    assert queue.copies.begin(2, 1)
    # nor does a row with a copy move
    assert not queue.begin_move(1, 0, 1)
    alone = queue_with_copies(1)
    alone.dispatch({1: AMPLE})
    alone.lose(1)
    alone.dispatch({2: AMPLE})
    assert alone.load(2).is_testing
    assert not alone.copies.begin(3, 0)


def test_a_row_costs_nothing_any_more_once_both_replicas_have_ended_it():
    queue = queue_with_copies(1)
    queue.dispatch({1: AMPLE})
    queue.copies.begin(2, 0)
    assert queue.finish(2, 0, np.array([0])).all()
    assert [(1, 0)] == queue.copies.take_losers()
    assert (queue.load(1).num_rows, queue.load(2).num_rows) == (1, 0)
    queue.copies.note_aborted(1, 0)
    assert (queue.load(1).num_rows, queue.load(1).cost) == (0, 0)


def test_endpoints_are_refused():
    pool = PoolConfig(duplicate_last_rows=True)
    check_pool(pool, BackendConfig(kind="fake"), EngineConfig())
    with pytest.raises(ConfigError, match="duplicate_last_rows"):
        check_pool(pool, BackendConfig(kind="openai"), EngineConfig())


@pytest.mark.parametrize("num_moves", [0, 1])
def test_a_replica_that_a_row_of_the_same_plan_moves_to_gets_no_copy(num_moves):
    queue = queue_of(1)
    queue.dispatch({1: AMPLE})
    view = SimpleNamespace(
        capacity=lambda _: Capacity(kv_tokens=900, max_model_len=90, max_num_seqs=9, block_size=4),
        throughput=SimpleNamespace(seconds=lambda _: StepSeconds(0.01, 0.001, 0.001)),
        num_moves=lambda _: num_moves,
    )
    handed = []
    parts = SimpleNamespace(
        view=view,
        queue=queue,
        registry=None,
        demand=lambda: {2: AMPLE},
        hand_out=lambda *given: handed.append(given),
    )
    SpeculativeExecution(parts).apply(LaunchCopies(2, (SpeculativeCopy(0, 1, 2, 9.0, 1.0),)))
    assert (not num_moves) == bool(handed) == (0 in queue.copies)
