"""Replicas that compute steps as a TP group: equal tokens after any failure."""

import asyncio
import logging
import os
import random
import re
import signal
from dataclasses import replace

import numpy as np
import pytest

from raybatch.actors.executors.calls import CallHandle
from raybatch.actors.executors.local_pools import LocalRuntime
from raybatch.actors.wire.columns import decode_completions
from raybatch.errors import RankError
from raybatch.policy.pool.snapshot import PoolPlan
from raybatch.records.types import Sampling
from raybatch_extensions.tp_groups import policy
from raybatch_extensions.tp_groups.policy import (
    TPGroupHistory,
    TPGroupKind,
    TPGroupPlan,
    TPGroupTimes,
)
from raybatch_extensions.tp_groups.pool import TPGroups
from tests.actors.moving_pool import OnThisLoop, pool_of_processes
from tests.actors.test_moves import check_holders, running, until
from tests.engine.fakes import run_all
from tests.engine.real_engines import Engines, requests_of
from tests.engine.tiny_models import build
from tests.tiers import pairs, some

MAX_TOKENS = 900
# tokens of a row that outlives any wait of a test, also on a slow host
ENDLESS = 20_000
PROMPTS = [list(range(3 + i, 40 + 9 * i)) for i in range(2)]
SAMPLING = Sampling(max_tokens=MAX_TOKENS)

pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
    build("qwen3", max_position_embeddings=ENDLESS + 480, **heads).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """Tokens of rows that one engine computes."""
    engine = Engines(folder)
    made = engine.make(engine.config(block_size_tokens=8))
    made.add(requests_of(PROMPTS, max_tokens=MAX_TOKENS))
    done = run_all(made, check=False)
    return [completion.token_ids.tolist() for _, completion in sorted(done.items())]


class ScriptedRuntime(LocalRuntime):
    """Calls a script before and after every step of a TP group."""

    def __init__(self, script):
        super().__init__(OnThisLoop())
        self._script = script

    def start(self, *args, **options):
        return Scripted(super().start(*args, **options), args[3], self._script)


class Scripted:
    def __init__(self, started, replica_id, script):
        self._started, self._replica_id, self._script = started, replica_id, script
        self.end = started.end

    @property
    def actor(self):
        def call(name, *args):
            if (name, *args)[:2] != ("extend", "tp_groups"):
                return getattr(self._started.actor, name)(*args)
            return asyncio.create_task(self._step(*args[1:]))

        return CallHandle(call)

    async def _step(self, step, *args):
        await self._script(self._replica_id, step, "before")
        answer = await self._started.actor.extend("tp_groups", step, *args)
        await self._script(self._replica_id, step, "after")
        return answer


async def no_script(replica_id, step, when):
    pass


async def no_more(pool):
    pass


def run(
    folder,
    meanwhile,
    *,
    num_replicas=2,
    script=no_script,
    prompts=PROMPTS[:1],
    max_tokens=MAX_TOKENS,
    then=None,
):
    """Run rows to their end; return the pool, and tokens and attempts by row."""
    sampling = replace(SAMPLING, max_tokens=max_tokens)
    pool = pool_of_processes(folder, num_replicas, runtime=ScriptedRuntime(script))
    arrays = [as_array(prompt) for prompt in prompts]

    async def whole():
        async with asyncio.timeout(200):
            return await pool.generate(arrays, (sampling,), meanwhile, then)

    results = asyncio.run(whole())
    return pool, tokens_of(results), results["attempts"].to_pylist()


def as_array(prompt):
    return np.array(prompt, np.int32)


def tokens_of(results):
    return [c.token_ids.tolist() for c in decode_completions(results)]


def tp_groups_of(pool) -> TPGroups:
    return pool.rebalancer.extensions[0]


def members_of(pool):
    return pool.coordinator._replicas.members


def begin_tp_group(pool, driver, workers):
    plan = TPGroupPlan(
        driver, tuple(workers), TPGroupKind(len(workers) + 1, True), "of a test", 1.0
    )
    tp_groups_of(pool)._begin(plan)


async def some_driver(pool):
    """Return a replica whose row decodes, and the idle replicas."""
    ids = sorted(members_of(pool))
    await until(lambda: any(running(pool, r) for r in ids))
    driver = next(r for r in ids if running(pool, r))
    return driver, [r for r in ids if not pool.queue.load(r).num_rows]


async def form(pool):
    """Form a TP group of all replicas, and return it when its forming has ended."""
    driver, idle = await some_driver(pool)
    begin_tp_group(pool, driver, idle)
    tp_group = tp_groups_of(pool)._tp_groups[driver]
    await until(lambda: tp_group.is_formed or driver not in tp_groups_of(pool)._tp_groups)
    return tp_group


@pytest.mark.parametrize("num_replicas", some([2, 3]))
def test_a_row_whose_steps_are_those_of_a_tp_group_has_its_tokens(folder, alone, num_replicas):
    async def meanwhile(pool):
        await form(pool)

    # steps of a TP group are several times slower on a host with fewer cores than ranks
    num_tokens = MAX_TOKENS // 2
    pool, tokens, attempts = run(
        folder, meanwhile, num_replicas=num_replicas, max_tokens=num_tokens, then=all_free
    )
    assert [alone[0][:num_tokens]] == tokens
    assert [1] == attempts
    assert tp_groups_of(pool).counters.num_formed
    assert not tp_groups_of(pool).counters.num_failed


async def all_free(pool):
    """Wait until no replica is a rank of a TP group."""
    members = members_of(pool)
    await until(lambda: not tp_groups_of(pool)._tp_groups)
    assert not any(member.is_tp_worker for member in members.values())


def test_rows_that_come_free_the_replicas_of_a_tp_group(folder, alone):
    async def meanwhile(pool):
        tp_group = await form(pool)
        assert members_of(pool)[tp_group.plan.workers[0]].is_tp_worker
        await asyncio.sleep(0.05)
        others.append(asyncio.create_task(pool.answers([as_array(PROMPTS[1])], (SAMPLING,))))
        await until(lambda: not tp_groups_of(pool)._tp_groups)
        assert "rows wait" == tp_group.ends
        # long before its row would have finished
        assert tp_group.num_steps < MAX_TOKENS - 200

    async def then(pool):
        others.append(await others.pop())

    others = []
    pool, tokens, attempts = run(folder, meanwhile, then=then)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert alone[1:] == tokens_of(others[0])
    assert tp_groups_of(pool).counters.num_steps > 0


class Killer:
    """Kills a rank at a step of the driver or worker of the first TP group."""

    def __init__(self, step, when, victim):
        self._where, self._victim = (step, when), victim
        self.pool, self.is_done = None, False
        self._ids = {}

    async def __call__(self, replica_id, step, when):
        for tp_group in tp_groups_of(self.pool)._tp_groups.values():
            self._ids = {"driver": tp_group.plan.driver, "worker": tp_group.plan.workers[0]}
        if not self.is_done and (step, when) == self._where:
            self.is_done = True
            kill(self.pool, self._ids[self._victim])


def kill(pool, replica_id, how=signal.SIGKILL):
    os.kill(members_of(pool)[replica_id].pid, how)


STEPS = [("reunite", "before"), ("reunite", "after")]
STEPS += [(step, when) for step in ("rank_inits", "follow", "lead") for when in ("before", "after")]
# the TP group has ended when `follow` returns
STEPS.remove(("follow", "after"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("place", "victim"), pairs(STEPS, ["driver", "worker"]))
def test_a_death_at_any_step_of_a_tp_group_changes_no_token(folder, alone, place, victim):
    killer = Killer(*place, victim)

    async def meanwhile(pool):
        killer.pool = pool
        tp_group = await form(pool)
        for _ in range(10):
            check_holders(pool)
            await asyncio.sleep(0.01)
        tp_groups_of(pool)._end(tp_group, "the test ends it")
        while True:
            check_holders(pool)
            await asyncio.sleep(0.005)

    _, tokens, _ = run(folder, meanwhile, script=killer)
    assert alone[:1] == tokens
    assert killer.is_done


@pytest.mark.parametrize("num_replicas", some([2, 3]))
def test_a_worker_that_dies_while_a_tp_group_forms_lets_it_be_called_off(
    folder, alone, caplog, monkeypatch, num_replicas
):
    """The other ranks stop waiting before their timeout."""
    monkeypatch.setattr("raybatch.actors.coordinator.parts._TIMEOUT_S", 1000.0)
    killer = Killer("follow", "before", "worker")

    async def meanwhile(pool):
        killer.pool = pool
        await form(pool)

    with caplog.at_level(logging.INFO):
        pool, tokens, attempts = run(
            folder, meanwhile, num_replicas=num_replicas, script=killer, then=all_free
        )
    assert (alone[:1], [1]) == (tokens, attempts)
    assert "left the TP group: " in caplog.text
    assert "cancelled: replica" in caplog.text
    assert not pool.coordinator._replicas.ledger.num_hung


def test_workers_are_notified_of_a_failed_driver(folder, alone, caplog, monkeypatch):
    """They stop waiting as soon as the coordinator knows of the failure."""
    monkeypatch.setattr("raybatch.actors.coordinator.parts._TIMEOUT_S", 1000.0)

    async def script(replica_id, step, when):
        if (step, when) == ("lead", "before"):
            raise RankError("no memory for this")

    async def meanwhile(pool):
        await form(pool)

    with caplog.at_level(logging.INFO):
        pool, tokens, _ = run(folder, meanwhile, num_replicas=3, script=script, then=all_free)
    assert alone[:1] == tokens
    assert "cancelled: RankError: no memory for this" in caplog.text
    assert not pool.coordinator._replicas.ledger.num_hung


@pytest.mark.parametrize("place", some(["rank_inits", "follow"]))
def test_a_tp_group_that_forms_while_rows_come_to_wait_is_called_off(folder, alone, caplog, place):
    """It counts as no failure: such a TP group may form again."""

    async def script(replica_id, step, when):
        if (step, when) == ("call_off", "after"):
            is_called_off.set()
        # on a slow host the pool itself forms more of them
        if (step, when) == (place, "before"):
            wanted = [
                tp_group
                for tp_group in tp_groups_of(pools[0])._tp_groups.values()
                if not tp_group.ends
            ]
            for tp_group in wanted:
                is_called_off.clear()
                tp_groups_of(pools[0])._end(tp_group, "rows wait")
                # the TP group might form if a worker arrived earlier
                await is_called_off.wait()

    async def meanwhile(pool):
        pools.append(pool)
        await form(pool)

    async def then(pool):
        await all_free(pool)
        assert not tp_groups_of(pool).book.measured

    pools, is_called_off = [], asyncio.Event()
    with caplog.at_level(logging.INFO):
        pool, tokens, attempts = run(folder, meanwhile, script=script, then=then)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert re.search(r"could not form TP group .*rows wait", caplog.text)
    assert (0, 0) == (
        tp_groups_of(pool).counters.num_formed,
        tp_groups_of(pool).counters.num_failed,
    )


@pytest.mark.parametrize("victim", some(["driver", "worker"]))
def test_a_death_between_steps_of_a_tp_group_changes_no_token(folder, alone, victim):
    async def meanwhile(pool):
        tp_group = await form(pool)
        assert tp_group.is_formed
        await asyncio.sleep(0.05)
        kill(pool, tp_group.plan.driver if victim == "driver" else tp_group.plan.workers[1])
        while True:
            check_holders(pool)
            await asyncio.sleep(0.005)

    pool, tokens, _ = run(folder, meanwhile, num_replicas=3, then=all_free)
    assert alone[:1] == tokens
    # on a slow host the pool itself forms one
    assert tp_groups_of(pool).counters.num_formed


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_and_the_row_continues(folder, alone, monkeypatch, caplog):
    """Its driver reports the end of the TP group, whatever the measured step times are."""
    monkeypatch.setattr("raybatch.actors.coordinator.parts._TIMEOUT_S", 1.0)

    async def meanwhile(pool):
        tp_group = await form(pool)
        kill(pool, tp_group.plan.workers[0], signal.SIGSTOP)
        await asyncio.Event().wait()

    async def then(pool):
        await all_free(pool)
        await until(lambda: pool.coordinator._replicas.ledger.num_hung)

    with caplog.at_level(logging.INFO):
        _, tokens, attempts = run(folder, meanwhile, then=then)
    assert "lost a rank" in caplog.text
    assert (alone[:1], [1]) == (tokens, attempts)


def test_a_worker_that_leaves_ends_its_tp_group(folder, alone, caplog):
    async def meanwhile(pool):
        tp_group = await form(pool)
        (worker,) = tp_group.plan.workers
        kill(pool, worker, signal.SIGTERM)
        await until(lambda: worker not in members_of(pool))

    with caplog.at_level(logging.INFO):
        pool, tokens, attempts = run(folder, meanwhile)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert "draining" in caplog.text
    assert 0 == pool.coordinator._replicas.ledger.num_restarts


def test_a_tp_group_that_forms_once_its_rows_have_ended_ends(folder):
    """An engine ends its TP group with its last step, and this one runs none."""

    async def then(pool):
        await all_free(pool)
        tp_groups, (driver, *workers) = tp_groups_of(pool), sorted(members_of(pool))
        begin_tp_group(pool, driver, workers)
        tp_group = tp_groups._tp_groups[driver]
        await until(lambda: tp_group.is_formed or driver not in tp_groups._tp_groups)
        # the pool may have ended it already
        for action in tp_groups.plan(tp_groups.snapshot(pool.snapshot(), 0.0), PoolPlan()):
            tp_groups.apply(action)
        assert "its rows have finished" == tp_group.ends
        await all_free(pool)

    pool, _, _ = run(folder, no_more, max_tokens=2, then=then)
    assert (1, 0) == (
        tp_groups_of(pool).counters.num_formed,
        tp_groups_of(pool).counters.num_failed,
    )


@pytest.mark.parametrize("seed", some(range(2)))
def test_random_tp_groups_and_moves_change_no_token_and_keep_one_holder(folder, alone, seed):
    async def meanwhile(pool):
        generator = random.Random(seed)
        await form(pool)
        while True:
            await asyncio.sleep(0.02)
            check_holders(pool)
            tp_groups, members = tp_groups_of(pool)._tp_groups, members_of(pool)
            busy = [r for r in members if running(pool, r) and r not in tp_groups]
            free = [m.replica_id for m in members.values() if m.takes_rows and m not in busy]
            idle = [r for r in free if not pool.queue.load(r).num_rows]
            if tp_groups and generator.random() < 0.3:
                tp_groups_of(pool)._end(generator.choice(list(tp_groups.values())), "of a test")
            elif busy and idle and generator.random() < 0.5:
                begin_tp_group(pool, generator.choice(busy), generator.sample(idle, 1))
            else:
                pool.move_at_random(generator)

    pool, tokens, attempts = run(folder, meanwhile, num_replicas=3, prompts=PROMPTS)
    assert (alone, [1, 1]) == (tokens, attempts)
    assert tp_groups_of(pool).counters.num_formed > 0


def test_a_pool_forms_a_tp_group_by_itself_and_judges_it_by_its_steps(folder, alone, monkeypatch):
    """The thresholds are low, as steps of this model are quick; the decision is the real one."""
    monkeypatch.setattr(policy, "_LEAST_S", 0.0)
    monkeypatch.setattr(policy, "_CONNECT_S", 0.0)
    monkeypatch.setattr("raybatch.actors.coordinator.coordinator._TICK_S", 0.02)

    async def then(pool):
        endless = replace(SAMPLING, max_tokens=ENDLESS)
        answering = asyncio.create_task(pool.answers([as_array(PROMPTS[0])], (endless,)))
        await until(lambda: tp_groups_of(pool).book.measured or answering.done())
        assert not answering.done()
        answering.cancel()

    pool, tokens, attempts = run(folder, no_more, then=then)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert tp_groups_of(pool).counters.num_formed
    ((kind, measured),) = tp_groups_of(pool).book.measured.items()
    assert TPGroupKind(2, True) == kind
    assert measured.ratio > 0


def test_the_latest_pace_of_a_kind_counts_and_is_forgotten_after_some_time():
    book, kind = TPGroupHistory(), TPGroupKind(2, True)
    for ratio in (1.4, 0.7):
        book.note_times(kind, TPGroupTimes(ratio, 0.1), 10.0)
    assert {kind: TPGroupTimes(0.7, 0.1)} == book.measured
    book.retry(309.0)
    assert book.measured
    book.retry(311.0)
    assert not book.measured
