"""How the coordinator switches the mode of a weight-sharing group."""

import asyncio
from types import SimpleNamespace

import pytest

from raybatch.actors.replicas.replica_set import Member
from raybatch.config import PoolConfig
from raybatch.errors import RankError
from raybatch.policy.pool.snapshot import PoolPlan
from raybatch.records.types import ReplicaStats
from raybatch_extensions.sharing.groups import WeightSharingGroup
from raybatch_extensions.sharing.pool import Sharing


class Actor:
    """A replica that records its calls, and answers with its generation."""

    def __init__(self, reported, *, generation_of=lambda generation: generation):
        self.reported = reported
        self._generation_of = generation_of

    async def extend(self, part, step, *args):
        assert part == "sharing"
        self.reported.append((step, *args))
        if step == "calls":
            return [SimpleNamespace(generation=args[0])] * args[1]
        generation = args[0].generation if step == "enter" else args[0]
        return self._generation_of(generation)


def member(rank, group, actor):
    started = SimpleNamespace(actor=actor, end=lambda: None)
    return Member(replica_id=rank, rank=rank, started=started, is_ready=True, group=group)


def switch_to_exchange(actors, thresholds=(64.0, 64.0), **more):
    """Poll two replicas three times; each has one row and a measured threshold."""
    group = WeightSharingGroup(number=0, size=len(actors))
    members = {rank: member(rank, group, actor) for rank, actor in enumerate(actors)}
    of_members = list(zip(members.values(), thresholds, strict=True))

    async def run():
        tasks = []
        parts = SimpleNamespace(
            members=members,
            runtime=SimpleNamespace(failed=()),
            pool=PoolConfig(share_group=len(actors)),
            replicas=SimpleNamespace(),
            timeout_s=15.0,
            spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
        )
        sharing = Sharing(parts)
        for turn in range(3):
            for each, threshold in of_members:
                each.stats = ReplicaStats(
                    num_running=1,
                    num_steps=10 * turn,
                    generated_tokens=10 * turn,
                    threshold_rows=threshold,
                    **more,
                )
            for switch in sharing.plan(sharing.snapshot(None, float(turn)), PoolPlan()):
                sharing.apply(switch)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_all_exchange_activations_in_one_generation():
    reported = [], []
    switch_to_exchange([Actor(each) for each in reported])
    assert [step for step, *_ in reported[0]] == ["calls", "enter"]
    assert [step for step, *_ in reported[1]] == ["enter"]


@pytest.mark.parametrize(
    ("thresholds", "are_exchanging"), [((0.0, 0.0), False), ((0.0, 64.0), True)]
)
def test_the_largest_threshold_of_a_group_decides(thresholds, are_exchanging):
    reported = [], []
    switch_to_exchange([Actor(each) for each in reported], thresholds)
    assert (("enter" in [step for step, *_ in reported[1]]), bool(reported[0])) == (
        are_exchanging,
        are_exchanging,
    )


@pytest.mark.parametrize(("kv_used", "are_exchanging"), [(0.01, False), (0.5, True)])
def test_rows_that_wait_and_have_kv_count_as_those_of_passes(kv_used, are_exchanging):
    reported = [], []
    actors = [Actor(each) for each in reported]
    switch_to_exchange(actors, num_waiting=99, kv_used_fraction=kv_used)
    assert bool(reported[0]) == are_exchanging


@pytest.mark.parametrize("where", [0, 1])
def test_all_leave_where_one_is_in_another_generation(where, caplog):
    reported = [], []
    actors = [Actor(each) for each in reported]
    actors[where]._generation_of = lambda generation: generation - 1
    with caplog.at_level("INFO"):
        switch_to_exchange(actors)
    assert [each[-1] for each in reported] == [("leave", 1, True)] * 2
    assert f"rank {where} missed a mode switch: it is in generation 0" in caplog.text


def test_all_leave_where_one_cannot_enter(caplog):
    reported = [], []

    def fail(generation):
        raise RankError("the others are not there")

    actors = [Actor(reported[0]), Actor(reported[1], generation_of=fail)]
    with caplog.at_level("INFO"):
        switch_to_exchange(actors)
    assert [each[-1] for each in reported] == [("leave", 1, True)] * 2
    assert "replicas 0 to 1 keep fetching weights" in caplog.text
