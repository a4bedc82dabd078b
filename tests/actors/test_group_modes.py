"""How a group of replicas comes to a mode, on the side of the coordinator."""

import asyncio
from types import SimpleNamespace

import pytest

from raybatch.actors.ext.sharing.extension import Sharing
from raybatch.actors.ext.sharing.groups import ShareGroup
from raybatch.actors.replicas.replica_set import Member
from raybatch.config import PoolConfig
from raybatch.errors import TeamError
from raybatch.policy.pool.snapshot import PoolPlan
from raybatch.records.types import ReplicaStats


class Actor:
    """A replica that notes what it is told, and answers with the epoch that it is in."""

    def __init__(self, told, *, epoch_of=lambda epoch: epoch):
        self.told = told
        self._epoch_of = epoch_of

    async def extend(self, part, step, *args):
        assert part == "sharing"
        self.told.append((step, *args))
        if step == "calls":
            return [SimpleNamespace(epoch=args[0])] * args[1]
        epoch = args[0].epoch if step == "enter" else args[0]
        return self._epoch_of(epoch)


def member(rank, group, actor):
    started = SimpleNamespace(actor=actor, end=lambda: None)
    return Member(replica_id=rank, rank=rank, started=started, is_ready=True, group=group)


def switch_to_rounds(actors, thresholds=(64.0, 64.0), **more):
    """Look three times at two replicas that have one row each, and have measured thresholds."""
    group = ShareGroup(number=0, size=len(actors))
    members = {rank: member(rank, group, actor) for rank, actor in enumerate(actors)}
    of_members = list(zip(members.values(), thresholds, strict=True))

    async def run():
        tasks = []
        parts = SimpleNamespace(
            members=members,
            site=SimpleNamespace(failed=()),
            pool=PoolConfig(share_group=len(actors)),
            replicas=SimpleNamespace(),
            timeout_s=15.0,
            spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
        )
        sharing = Sharing(parts)
        for look in range(3):
            for each, threshold in of_members:
                each.stats = ReplicaStats(
                    num_running=1,
                    num_steps=10 * look,
                    generated_tokens=10 * look,
                    threshold_rows=threshold,
                    **more,
                )
            for switch in sharing.plan(sharing.snapshot(None, float(look)), PoolPlan()):
                sharing.apply(switch)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_all_enter_rounds_of_one_epoch():
    told = [], []
    switch_to_rounds([Actor(each) for each in told])
    assert [step for step, *_ in told[0]] == ["calls", "enter"]
    assert [step for step, *_ in told[1]] == ["enter"]


@pytest.mark.parametrize(("thresholds", "are_rounds"), [((0.0, 0.0), False), ((0.0, 64.0), True)])
def test_the_largest_threshold_of_a_group_decides(thresholds, are_rounds):
    told = [], []
    switch_to_rounds([Actor(each) for each in told], thresholds)
    assert (("enter" in [step for step, *_ in told[1]]), bool(told[0])) == (are_rounds, are_rounds)


@pytest.mark.parametrize(("kv_used", "are_rounds"), [(0.01, False), (0.5, True)])
def test_rows_that_wait_and_have_kv_count_as_those_of_passes(kv_used, are_rounds):
    told = [], []
    actors = [Actor(each) for each in told]
    switch_to_rounds(actors, num_waiting=99, kv_used_fraction=kv_used)
    assert bool(told[0]) == are_rounds


@pytest.mark.parametrize("where", [0, 1])
def test_all_leave_where_one_is_in_another_epoch(where, caplog):
    told = [], []
    actors = [Actor(each) for each in told]
    actors[where]._epoch_of = lambda epoch: epoch - 1
    with caplog.at_level("INFO"):
        switch_to_rounds(actors)
    assert [each[-1] for each in told] == [("leave", 1, True)] * 2
    assert f"rank {where} is in epoch 0 of its group, the others are in epoch 1" in caplog.text


def test_all_leave_where_one_cannot_enter(caplog):
    told = [], []

    def fail(epoch):
        raise TeamError("the others are not there")

    actors = [Actor(told[0]), Actor(told[1], epoch_of=fail)]
    with caplog.at_level("INFO"):
        switch_to_rounds(actors)
    assert [each[-1] for each in told] == [("leave", 1, True)] * 2
    assert "replicas 0 to 1 stay with copies of weights" in caplog.text
