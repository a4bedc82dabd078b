"""Rows that move between replicas while they run: one holder and equal tokens after any failure."""

import asyncio
import logging
import os
import random
import signal
import threading
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from raybatch.actors.coordinator.learned_lengths import LearnedLengths
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.replica.engine_thread import NO_CAPACITY
from raybatch.actors.wire.columns import decode_completions
from raybatch.actors.wire.records import MoveStep, Progress
from raybatch.backends.base import progress_of
from raybatch.policy.pool.snapshot import RowMove, RunningRows
from raybatch.records.types import ReplicaStats, Sampling
from tests.actors.moving_pool import MovingPool, pool_of_processes
from tests.actors.queues import AMPLE, queue_of
from tests.engine.fakes import run_all
from tests.engine.real_engines import Engines, requests_of
from tests.engine.sequences.test_forks import answer, make_request
from tests.engine.tiny_models import build
from tests.tiers import pairs, some


@pytest.fixture(autouse=True)
def reported_often(monkeypatch):
    """Rows of these engines live for less than a second."""
    monkeypatch.setattr("raybatch.actors.replica.replica._PROGRESS_EVERY_S", 0.01)


NUM_ROWS = 10
PROMPTS = [np.arange(i, 20 + 2 * i, dtype=np.int32) for i in range(NUM_ROWS)]
LONG = Sampling(max_tokens=150)


def expected(prompts, sampling=LONG):
    requests = [
        make_request(i, prompt, max_tokens=sampling.max_tokens) for i, prompt in enumerate(prompts)
    ]
    return [answer(r, sample) for r in requests for sample in range(sampling.n)]


def run(pool, meanwhile, *, prompts=PROMPTS, sampling=LONG):
    """Run rows to their end while others move; return tokens and attempts by row."""

    async def whole():
        async with asyncio.timeout(100):
            return await pool.generate(prompts, (sampling,), meanwhile)

    results = asyncio.run(whole())
    tokens = [c.token_ids.tolist() for c in decode_completions(results)]
    return tokens, results["attempts"].to_pylist()


def check_holders(pool):
    """Check that each row waits or is held by one live replica, and that loads match the rows."""
    queue, members = pool.queue, pool.coordinator._replicas.members
    counted = dict.fromkeys(members, 0)
    for batch in queue._batches.values():
        for replica_id in batch.holders():
            assert replica_id in members
            counted[replica_id] += len(batch.held_by(replica_id))
    for replica_id, num_rows in counted.items():
        assert queue.load(replica_id).num_rows == num_rows


async def until(is_there):
    while not is_there():
        await asyncio.sleep(0.002)


def running(pool, replica_id):
    """Return the rows that a replica reports as running and that have generated tokens."""
    for replica in pool.snapshot().replicas:
        if replica.replica_id == replica_id and replica.rows is not None:
            return replica.rows.ids[replica.rows.can_move].tolist()
    return []


def first_move(*, with_kv=True, reported=lambda source, target: None):
    """Return a coroutine function that moves the first reported row to the other replica, once."""

    async def meanwhile(pool):
        await until(lambda: len(pool.snapshot().replicas) == 2)
        await until(lambda: running(pool, 1) or running(pool, 2))
        source, target = (1, 2) if running(pool, 1) else (2, 1)
        reported(source, target)
        pool.move(running(pool, source)[0], source, target, with_kv=with_kv)

    return meanwhile


@pytest.mark.parametrize("with_kv", [True, False])
def test_a_row_that_moved_has_its_tokens_and_one_attempt(with_kv):
    pool = MovingPool()
    tokens, attempts = run(pool, first_move(with_kv=with_kv))
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    assert (pool.counters.num_moved, pool.counters.num_failed) == (1, 0)
    stats = [side.replica.engine.stats() for side in pool.runtime.sides.values()]
    num_recomputed = sum(of_one.num_recomputed_tokens for of_one in stats)
    num_carried = sum(of_one.num_migrated_kv_tokens for of_one in stats)
    assert (num_recomputed == 0, num_carried > 0) == (with_kv, with_kv)


def test_a_row_with_samples_that_have_ended_moves_with_them():
    """Samples end one after the other; finished samples of a row move with the others."""
    pool = MovingPool()

    async def meanwhile(pool):
        generator = random.Random(5)
        while True:
            await asyncio.sleep(0.01)
            pool.move_at_random(generator)

    sampling = Sampling(max_tokens=60, n=3)
    tokens, _ = run(pool, meanwhile, prompts=PROMPTS[:4], sampling=sampling)
    assert expected(PROMPTS[:4], sampling) == tokens


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_random_moves_change_no_token_and_keep_one_holder(seed, num_replicas):
    pool = MovingPool(num_replicas=num_replicas)

    async def meanwhile(pool):
        generator = random.Random(seed)
        while True:
            await asyncio.sleep(0.005)
            pool.move_at_random(generator)
            check_holders(pool)

    tokens, attempts = run(pool, meanwhile)
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    assert pool.counters.num_moved > 0
    for side in pool.runtime.sides.values():
        side.replica.engine.check()
        # no request table is kept for a row that has left
        assert not side.replica._open
        assert not side.replica._moving._guests


STEPS = get_args(MoveStep)


class Killer:
    """Ends one side of the first move at one of its steps."""

    def __init__(self, step, when, victim):
        self.is_done = False
        self._step, self._when, self._victim = step, when, victim
        self.replica_ids = {}
        self.sides = {}

    def reported(self, source, target):
        self.replica_ids = {"source": source, "target": target}

    def __call__(self, side, step, when):
        if not self.is_done and (step, when) == (self._step, self._when):
            self.is_done = True
            self.end(self.sides[self.replica_ids[self._victim]])

    def end(self, side):
        side.dead.set()


@pytest.mark.parametrize(
    ("step", "when", "victim"),
    pairs([s for s in STEPS if s not in ("stay",)], ["before", "after"], ["source", "target"]),
)
def test_a_death_at_any_step_of_a_move_changes_nothing(step, when, victim):
    killer = Killer(step, when, victim)
    pool = MovingPool(script=killer)
    killer.sides = pool.runtime.sides

    async def meanwhile(pool):
        await first_move(reported=killer.reported)(pool)
        while True:
            check_holders(pool)
            await asyncio.sleep(0.005)

    tokens, _ = run(pool, meanwhile)
    assert expected(PROMPTS) == tokens
    assert killer.is_done
    for side in pool.runtime.sides.values():
        side.replica.engine.check() if not side.dead.is_set() else None


class Hanger(Killer):
    """Makes the engine of one side hang at a step of the first move, while its loop answers."""

    def __init__(self, *where):
        super().__init__(*where)
        self._is_over = threading.Event()
        self._engine = None

    def end(self, side):
        self._engine = side.replica._engine
        self._engine.call(lambda _: self._is_over.wait())

    async def let_go(self):
        """Let the thread end while there is a loop to notify."""
        self._is_over.set()
        if self._engine is not None:
            await asyncio.to_thread(self._engine._thread.join)


@pytest.mark.parametrize(
    ("step", "when", "victim"),
    some(
        [
            ("depart", "after", "source"),
            ("depart", "before", "source"),
            ("begin", "before", "target"),
        ]
    ),
)
def test_an_engine_that_hangs_in_a_move_is_replaced_and_loses_no_row(step, when, victim):
    hanger = Hanger(step, when, victim)
    pool = MovingPool(script=hanger, stuck_after_s=2.0)
    hanger.sides = pool.runtime.sides

    async def meanwhile(pool):
        try:
            await first_move(reported=hanger.reported)(pool)
            while True:
                check_holders(pool)
                await asyncio.sleep(0.005)
        finally:
            await hanger.let_go()

    tokens, _ = run(pool, meanwhile)
    assert expected(PROMPTS) == tokens
    assert hanger.is_done
    assert pool.coordinator._replicas.ledger.num_hung == 1


class Refuser:
    """Makes the target refuse one step of the first move."""

    def __init__(self, step):
        self.step = step

    def __call__(self, side, step, when):
        if step == self.step and when == "before":
            moving = side.replica._moving
            setattr(moving, step, self._refused(getattr(moving, step)))

    @staticmethod
    def _refused(method):
        async def refused(*args):
            return False

        return refused


@pytest.mark.parametrize("step", ["reserve", "receive"])
def test_a_target_that_has_no_room_leaves_the_row_where_it_is(step):
    pool = MovingPool(script=Refuser(step))
    tokens, attempts = run(pool, first_move())
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    assert (pool.counters.num_moved, pool.counters.num_failed) == (0, 1)
    stats = [side.replica.engine.stats() for side in pool.runtime.sides.values()]
    assert [0, 0] == [of_one.num_recomputed_tokens for of_one in stats]


class Slow(Refuser):
    """Makes one step of the first move take longer than a replica may send no report."""

    @staticmethod
    def _refused(method):
        async def slow(*args):
            await asyncio.sleep(3.5)
            return await method(*args)

        return slow


def test_a_replica_whose_only_row_is_on_its_way_does_not_count_as_one_that_hangs():
    pool = MovingPool(script=Slow("arrive"), stuck_after_s=2.0)
    tokens, attempts = run(pool, first_move(), prompts=PROMPTS[:1])
    assert expected(PROMPTS[:1]) == tokens
    assert [1] == attempts
    assert (pool.counters.num_moved, pool.coordinator._replicas.ledger.num_hung) == (1, 0)


def test_rows_of_a_cancelled_batch_that_move_are_dropped_at_both_sides():
    pool = MovingPool()

    async def whole():
        async with asyncio.timeout(60):
            task = asyncio.create_task(pool.generate(PROMPTS, (LONG,), cancelling))
            with pytest.raises(AssertionError):
                await task

    async def cancelling(pool):
        for _ in range(3):
            await first_move()(pool)
        await asyncio.sleep(0)
        pool.coordinator._registry.drop_rows(0)
        await until(lambda: not any(pool.rebalancer.view.num_moves(r) for r in (1, 2)))
        await until(lambda: not any(pool.queue.load(r).num_rows for r in (1, 2)))
        for side in pool.runtime.sides.values():
            assert not side.replica._moving._left
            assert not side.replica._moving._come
            await until(lambda side=side: not side.replica.engine.num_unfinished())
            side.replica.engine.check()
            assert side.replica.engine.stats().kv_used_fraction == 0.0
        pool.coordinator._registry.fail(0, "the test is over")

    asyncio.run(whole())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    build("qwen3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """Tokens of rows that one engine computes."""
    engine = Engines(folder)
    made = engine.make(engine.config(block_size_tokens=8))
    made.add(requests_of(LONG_PROMPTS, max_tokens=250))
    return [tokens for _, tokens in sorted(run_engine(made).items())]


LONG_PROMPTS = [list(range(3 + i, 60 + 9 * i)) for i in range(6)]


def run_engine(engine):
    return {key: c.token_ids.tolist() for key, c in run_all(engine, check=False).items()}


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("num_replicas", "kills"),
    [(2, False), pytest.param(3, True, marks=pytest.mark.slow)],
    ids=["two", "three-and-a-death"],
)
def test_moves_between_processes_keep_the_tokens_of_one_engine(
    folder, alone, num_replicas, kills, monkeypatch
):
    pool = pool_of_processes(folder, num_replicas)

    async def meanwhile(pool):
        generator, is_killed = random.Random(num_replicas), not kills
        while True:
            await asyncio.sleep(0.02)
            pool.move_at_random(generator)
            check_holders(pool)
            if not is_killed and pool.counters.num_moved >= 3:
                is_killed = True
                await kill_one(pool)

    prompts = [np.array(prompt, np.int32) for prompt in LONG_PROMPTS]
    tokens, _ = run(pool, meanwhile, prompts=prompts, sampling=Sampling(max_tokens=250))
    assert alone == tokens
    assert pool.counters.num_moved > 0
    assert pool.counters.num_bytes > 0


async def kill_one(pool):
    state = await pool.coordinator.state()
    os.kill(state.pids[0], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
def test_a_process_that_gets_sigterm_moves_its_rows_with_their_kv_and_leaves(folder, alone):
    async def meanwhile(pool):
        await until(lambda: running(pool, 1) and running(pool, 2))
        left = pool.coordinator._replicas.members[1].pid
        os.kill(left, signal.SIGTERM)
        while left in (await pool.coordinator.state()).pids:
            check_holders(pool)
            await asyncio.sleep(0.02)

    prompts = [np.array(prompt, np.int32) for prompt in LONG_PROMPTS]
    for _ in range(4):
        pool = pool_of_processes(folder, 2)
        tokens, attempts = run(pool, meanwhile, prompts=prompts, sampling=Sampling(max_tokens=250))
        assert alone == tokens
        assert {1} == set(attempts)
        assert pool.coordinator._replicas.ledger.num_restarts == 0
        # on a busy host rows may end before they are reported
        if pool.counters.num_moved:
            break
    assert pool.counters.num_bytes > 0


@pytest.mark.parametrize("name", ["read_blocks", "_write_blocks"])
def test_an_engine_without_memory_for_a_copy_continues(name):
    def short_of_memory(side, step, when):
        def fail(*_):
            raise MemoryError("out of memory")

        engine = side.replica.engine
        owner = engine._scheduler.arrivals if name == "_write_blocks" else engine.runner
        setattr(owner, name, fail)

    pool = MovingPool(script=short_of_memory)
    tokens, attempts = run(pool, first_move())
    assert expected(PROMPTS) == tokens
    assert [1] * NUM_ROWS == attempts
    assert (pool.counters.num_moved, pool.counters.num_failed) == (0, 1)


def test_a_row_that_decodes_faster_than_its_kv_is_copied_stays(monkeypatch, caplog):
    # the source decodes several blocks while one block is copied
    monkeypatch.setattr("raybatch.actors.replica.replica._PIECE_BYTES", 1)

    def slow_copies(side, step, when):
        moving = side.replica._moving

        async def peek(request_id, from_block):
            await asyncio.sleep(0.05)
            return await type(moving).peek(moving, request_id, from_block)

        moving.peek = peek

    pool, sampling = MovingPool(script=slow_copies), Sampling(max_tokens=400)
    with caplog.at_level(logging.INFO):
        tokens, attempts = run(pool, first_move(), prompts=PROMPTS[:2], sampling=sampling)
    assert expected(PROMPTS[:2], sampling) == tokens
    assert [1, 1] == attempts
    assert (pool.counters.num_moved, pool.counters.num_failed) == (0, 1)
    assert "decodes faster than its KV is copied" in caplog.text


def test_a_row_that_ended_where_it_moved_to_is_not_seen_there_any_more():
    queue = queue_of(4)
    queue.dispatch({1: AMPLE})
    view = PoolView(queue, LearnedLengths())
    progress = Progress(rows=progress_of(()), capacity=NO_CAPACITY)
    view.note_report(2, ReplicaStats(), progress)
    move, rows = (
        RowMove(0, 1, 2, True),
        RunningRows(**dict.fromkeys(("ids", "tokens", "left", "can_move"), np.array([0]))),
    )
    queue.begin_move(1, 0, 0)
    view.begin_move(move, rows)
    queue.commit_move(1, 2, 0, 0, with_kv=True)
    view.end_move(move, has_moved=True)
    target = SimpleNamespace(
        replica_id=2, is_ready=True, is_tp_driver=False, stats=ReplicaStats(), host_id=""
    )

    def seen():
        return view.snapshot([target], (), with_rows=True).replicas[0].rows.ids.tolist()

    assert [0] == seen()
    queue.finish(2, 0, [0])
    assert [] == seen()
