"""Replicas that compute the steps of one together: equal tokens, whatever fails when."""

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
from raybatch.actors.executors.local_site import LocalSite
from raybatch.actors.ext.teams import policy
from raybatch.actors.ext.teams.extension import Teams
from raybatch.actors.ext.teams.policy import TeamBook, TeamKind, TeamPace, TeamPlan
from raybatch.actors.wire.columns import decode_completions
from raybatch.errors import TeamError
from raybatch.policy.pool.snapshot import PoolPlan
from raybatch.records.types import Sampling
from tests.actors.moving_pool import OnThisLoop, pool_of_processes
from tests.actors.test_moves import check_holders, running, until
from tests.engine.fakes import run_all
from tests.engine.real_engines import Engines, requests_of
from tests.engine.tiny_models import build
from tests.tiers import pairs

MAX_TOKENS = 900
# of a row that outlives what a test waits for, however slow the host is
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


class ScriptedSite(LocalSite):
    """Lets a script see every step of a team, before it and after it."""

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
            if (name, *args)[:2] != ("extend", "teams"):
                return getattr(self._started.actor, name)(*args)
            return asyncio.create_task(self._step(*args[1:]))

        return CallHandle(call)

    async def _step(self, step, *args):
        await self._script(self._replica_id, step, "before")
        answer = await self._started.actor.extend("teams", step, *args)
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
    pool = pool_of_processes(folder, num_replicas, site=ScriptedSite(script))
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


def teams_of(pool) -> Teams:
    return pool.rebalancer.extensions[0]


def members_of(pool):
    return pool.coordinator._replicas.members


def begin_team(pool, leader, followers):
    plan = TeamPlan(leader, tuple(followers), TeamKind(len(followers) + 1, True), "of a test", 1.0)
    teams_of(pool)._begin(plan)


async def some_leader(pool):
    """Return a replica whose row decodes, and those that have none."""
    ids = sorted(members_of(pool))
    await until(lambda: any(running(pool, r) for r in ids))
    leader = next(r for r in ids if running(pool, r))
    return leader, [r for r in ids if not pool.queue.load(r).num_rows]


async def form(pool):
    """Form a team of all replicas, and return it once it works."""
    leader, idle = await some_leader(pool)
    begin_team(pool, leader, idle)
    team = teams_of(pool)._teams[leader]
    await until(lambda: team.is_formed or leader not in teams_of(pool)._teams)
    return team


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_row_whose_steps_are_those_of_a_team_has_its_tokens(folder, alone, num_replicas):
    async def meanwhile(pool):
        await form(pool)

    # steps of a team take some times as long on a host with fewer cores than ranks
    num_tokens = MAX_TOKENS // 2
    pool, tokens, attempts = run(
        folder, meanwhile, num_replicas=num_replicas, max_tokens=num_tokens, then=all_free
    )
    assert [alone[0][:num_tokens]] == tokens
    assert [1] == attempts
    assert teams_of(pool).counters.num_formed
    assert not teams_of(pool).counters.num_failed


async def all_free(pool):
    """Wait until no replica follows another one, and none is in a team."""
    members = members_of(pool)
    await until(lambda: not teams_of(pool)._teams)
    assert not any(member.is_following for member in members.values())


def test_rows_that_come_free_the_replicas_of_a_team(folder, alone):
    async def meanwhile(pool):
        team = await form(pool)
        assert members_of(pool)[team.plan.followers[0]].is_following
        await asyncio.sleep(0.05)
        others.append(asyncio.create_task(pool.answers([as_array(PROMPTS[1])], (SAMPLING,))))
        await until(lambda: not teams_of(pool)._teams)
        assert "rows wait" == team.ends
        # long before its row would have ended it
        assert team.num_steps < MAX_TOKENS - 200

    async def then(pool):
        others.append(await others.pop())

    others = []
    pool, tokens, attempts = run(folder, meanwhile, then=then)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert alone[1:] == tokens_of(others[0])
    assert teams_of(pool).counters.num_steps > 0


class Killer:
    """Kills a rank at one step of the first team, of itself or of the other one."""

    def __init__(self, step, when, victim):
        self._where, self._victim = (step, when), victim
        self.pool, self.is_done = None, False
        self._ids = {}

    async def __call__(self, replica_id, step, when):
        for team in teams_of(self.pool)._teams.values():
            self._ids = {"leader": team.plan.leader, "follower": team.plan.followers[0]}
        if not self.is_done and (step, when) == self._where:
            self.is_done = True
            kill(self.pool, self._ids[self._victim])


def kill(pool, replica_id, how=signal.SIGKILL):
    os.kill(members_of(pool)[replica_id].pid, how)


STEPS = [("reunite", "before"), ("reunite", "after")]
STEPS += [(step, when) for step in ("team_calls", "follow", "lead") for when in ("before", "after")]
# a follow that returns is the end of a team
STEPS.remove(("follow", "after"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("place", "victim"), pairs(STEPS, ["leader", "follower"]))
def test_a_death_at_any_step_of_a_team_changes_no_token(folder, alone, place, victim):
    killer = Killer(*place, victim)

    async def meanwhile(pool):
        killer.pool = pool
        team = await form(pool)
        for _ in range(10):
            check_holders(pool)
            await asyncio.sleep(0.01)
        teams_of(pool)._end(team, "the test ends it")
        while True:
            check_holders(pool)
            await asyncio.sleep(0.005)

    _, tokens, _ = run(folder, meanwhile, script=killer)
    assert alone[:1] == tokens
    assert killer.is_done


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_follower_that_dies_while_a_team_forms_lets_it_be_called_off(
    folder, alone, caplog, monkeypatch, num_replicas
):
    """Those who wait for it do not wait until they have waited for too long."""
    monkeypatch.setattr("raybatch.actors.coordinator.parts._TIMEOUT_S", 1000.0)
    killer = Killer("follow", "before", "follower")

    async def meanwhile(pool):
        killer.pool = pool
        await form(pool)

    with caplog.at_level(logging.INFO):
        pool, tokens, attempts = run(
            folder, meanwhile, num_replicas=num_replicas, script=killer, then=all_free
        )
    assert (alone[:1], [1]) == (tokens, attempts)
    assert "follows no more" in caplog.text
    assert "called off: replica" in caplog.text
    assert not pool.coordinator._replicas.ledger.num_hung


def test_followers_hear_that_their_leader_has_failed(folder, alone, caplog, monkeypatch):
    """They wait for it no longer than until it has told the coordinator."""
    monkeypatch.setattr("raybatch.actors.coordinator.parts._TIMEOUT_S", 1000.0)

    async def script(replica_id, step, when):
        if (step, when) == ("lead", "before"):
            raise TeamError("no memory for this")

    async def meanwhile(pool):
        await form(pool)

    with caplog.at_level(logging.INFO):
        pool, tokens, _ = run(folder, meanwhile, num_replicas=3, script=script, then=all_free)
    assert alone[:1] == tokens
    assert "the team was called off: TeamError: no memory for this" in caplog.text
    assert not pool.coordinator._replicas.ledger.num_hung


@pytest.mark.parametrize("place", ["team_calls", "follow"])
def test_a_team_that_forms_while_rows_come_to_wait_is_called_off(folder, alone, caplog, place):
    """Without blame: such a team may form again."""

    async def script(replica_id, step, when):
        if (step, when) == ("call_off", "after"):
            is_called_off.set()
        # on a slow host the pool forms more of them by itself
        if (step, when) == (place, "before"):
            wanted = [team for team in teams_of(pools[0])._teams.values() if not team.ends]
            for team in wanted:
                is_called_off.clear()
                teams_of(pools[0])._end(team, "rows wait")
                # a follower that comes sooner may let the team form
                await is_called_off.wait()

    async def meanwhile(pool):
        pools.append(pool)
        await form(pool)

    async def then(pool):
        await all_free(pool)
        assert not teams_of(pool).book.paces

    pools, is_called_off = [], asyncio.Event()
    with caplog.at_level(logging.INFO):
        pool, tokens, attempts = run(folder, meanwhile, script=script, then=then)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert re.search(r"could not form: .*rows wait", caplog.text)
    assert (0, 0) == (teams_of(pool).counters.num_formed, teams_of(pool).counters.num_failed)


@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_a_death_between_steps_of_a_team_changes_no_token(folder, alone, victim):
    async def meanwhile(pool):
        team = await form(pool)
        assert team.is_formed
        await asyncio.sleep(0.05)
        kill(pool, team.plan.leader if victim == "leader" else team.plan.followers[1])
        while True:
            check_holders(pool)
            await asyncio.sleep(0.005)

    pool, tokens, _ = run(folder, meanwhile, num_replicas=3, then=all_free)
    assert alone[:1] == tokens
    # on a slow host the pool forms one by itself
    assert teams_of(pool).counters.num_formed


def test_a_follower_that_hangs_is_killed_and_the_row_goes_on(folder, alone, monkeypatch, caplog):
    """Its leader tells that the team is over, whatever its pace comes to."""
    monkeypatch.setattr("raybatch.actors.coordinator.parts._TIMEOUT_S", 1.0)

    async def meanwhile(pool):
        team = await form(pool)
        kill(pool, team.plan.followers[0], signal.SIGSTOP)
        await asyncio.Event().wait()

    async def then(pool):
        await all_free(pool)
        await until(lambda: pool.coordinator._replicas.ledger.num_hung)

    with caplog.at_level(logging.INFO):
        _, tokens, attempts = run(folder, meanwhile, then=then)
    assert "its leader has lost a rank" in caplog.text
    assert (alone[:1], [1]) == (tokens, attempts)


def test_a_follower_that_leaves_ends_its_team(folder, alone, caplog):
    async def meanwhile(pool):
        team = await form(pool)
        (follower,) = team.plan.followers
        kill(pool, follower, signal.SIGTERM)
        await until(lambda: follower not in members_of(pool))

    with caplog.at_level(logging.INFO):
        pool, tokens, attempts = run(folder, meanwhile)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert " leaves" in caplog.text
    assert 0 == pool.coordinator._replicas.ledger.num_restarts


def test_a_team_that_forms_once_its_rows_have_ended_ends(folder):
    """An engine ends its team with its last step, and this one takes none."""

    async def then(pool):
        await all_free(pool)
        teams, (leader, *followers) = teams_of(pool), sorted(members_of(pool))
        begin_team(pool, leader, followers)
        team = teams._teams[leader]
        await until(lambda: team.is_formed or leader not in teams._teams)
        # the pool may have done it before
        for action in teams.plan(teams.snapshot(pool.snapshot(), 0.0), PoolPlan()):
            teams.apply(action)
        assert "its rows have ended" == team.ends
        await all_free(pool)

    pool, _, _ = run(folder, no_more, max_tokens=2, then=then)
    assert (1, 0) == (teams_of(pool).counters.num_formed, teams_of(pool).counters.num_failed)


@pytest.mark.parametrize("seed", range(2))
def test_random_teams_and_moves_change_no_token_and_keep_one_holder(folder, alone, seed):
    async def meanwhile(pool):
        generator = random.Random(seed)
        await form(pool)
        while True:
            await asyncio.sleep(0.02)
            check_holders(pool)
            teams, members = teams_of(pool)._teams, members_of(pool)
            busy = [r for r in members if running(pool, r) and r not in teams]
            free = [m.replica_id for m in members.values() if m.takes_rows and m not in busy]
            idle = [r for r in free if not pool.queue.load(r).num_rows]
            if teams and generator.random() < 0.3:
                teams_of(pool)._end(generator.choice(list(teams.values())), "of a test")
            elif busy and idle and generator.random() < 0.5:
                begin_team(pool, generator.choice(busy), generator.sample(idle, 1))
            else:
                pool.move_at_random(generator)

    pool, tokens, attempts = run(folder, meanwhile, num_replicas=3, prompts=PROMPTS)
    assert (alone, [1, 1]) == (tokens, attempts)
    assert teams_of(pool).counters.num_formed > 0


def test_a_pool_forms_a_team_by_itself_and_judges_it_by_its_steps(folder, alone, monkeypatch):
    """The thresholds are low, as steps of this model are quick; the decision is the real one."""
    monkeypatch.setattr(policy, "_LEAST_S", 0.0)
    monkeypatch.setattr(policy, "_CONNECT_S", 0.0)
    monkeypatch.setattr("raybatch.actors.coordinator.coordinator._TICK_S", 0.02)

    async def then(pool):
        endless = replace(SAMPLING, max_tokens=ENDLESS)
        answering = asyncio.create_task(pool.answers([as_array(PROMPTS[0])], (endless,)))
        await until(lambda: teams_of(pool).book.paces or answering.done())
        assert not answering.done()
        answering.cancel()

    pool, tokens, attempts = run(folder, no_more, then=then)
    assert (alone[:1], [1]) == (tokens, attempts)
    assert teams_of(pool).counters.num_formed
    ((kind, pace),) = teams_of(pool).book.paces.items()
    assert TeamKind(2, True) == kind
    assert pace.ratio > 0


def test_the_latest_pace_of_a_kind_counts_and_is_forgotten_after_some_time():
    book, kind = TeamBook(), TeamKind(2, True)
    for ratio in (1.4, 0.7):
        book.note_pace(kind, TeamPace(ratio, 0.1), 10.0)
    assert {kind: TeamPace(0.7, 0.1)} == book.paces
    book.retry(309.0)
    assert book.paces
    book.retry(311.0)
    assert not book.paces
