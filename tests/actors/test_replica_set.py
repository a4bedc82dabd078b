"""Replica actors are started, watched and ended."""

import asyncio
import os
import signal

import pytest
import ray

from raybatch.actors.executors.ray_pools import RayHandle, RayRuntime
from raybatch.actors.replicas import replica_set as replica_set_module
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import ReplicaSet
from tests.actors.pools import handle_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def make_coordinator(*, has_ended=False):
    """Return an actor without work, pending or ended; defined here to be pickled by value."""

    @ray.remote(num_cpus=0)
    class Coordinator:
        async def pull(self, replica_id, credit):
            if not has_ended:
                await asyncio.Event().wait()

        async def report(self, replica_id, batch_ids, results, stats, busy_with):
            return 0.05

    return RayHandle(Coordinator.remote())


def run_replicas(end, *, has_ended=False, bundles=()):
    """Start one replica, await `end(replicas)` once it is ready, and return the lost replicas."""
    lost = []

    def on_lost(member, cause):
        lost.append((member.replica_id, cause))
        return True

    async def run():
        plan = Placement(
            num_replicas=1, num_cpus=0, num_gpus=0, num_engines_on_host=1, bundles=bundles
        )
        replicas = ReplicaSet(
            handle_of().spec, plan, RayRuntime(), on_lost=on_lost, on_exhausted=lambda *_: None
        )
        coordinator = make_coordinator(has_ended=has_ended)
        replicas.start(lambda: coordinator)
        while not replicas.ledger.num_ready() and not lost:
            await asyncio.sleep(0.02)
        await end(replicas)
        ray.kill(coordinator.ray_actor)
        assert replicas.members == {}

    asyncio.run(run())
    return lost


def test_a_replica_that_dies_while_the_replica_set_stops_is_not_restarted():
    async def kill_while_stopping(replicas):
        stopping = asyncio.create_task(replicas.stop())
        await asyncio.sleep(0)
        os.kill(replicas.members[1].pid, signal.SIGKILL)
        await stopping

    ((replica_id, cause),) = run_replicas(kill_while_stopping)
    assert (replica_id, "Error: " in cause) == (1, True)


def test_a_replica_that_does_not_end_by_itself_is_stopped_without_a_cause(monkeypatch):
    monkeypatch.setattr(replica_set_module, "_STOP_GRACE_S", 0.1)
    assert run_replicas(ReplicaSet.stop) == [(1, None)]


def test_a_replica_that_ends_as_asked_has_no_cause():
    assert run_replicas(ReplicaSet.stop, has_ended=True) == [(1, None)]


def test_a_group_is_released_with_its_replica_and_created_again_for_the_next():
    groups = []

    async def kill_the_first(replicas):
        (first,) = replicas.members.values()
        groups.append(first.started.group)
        os.kill(first.pid, signal.SIGKILL)
        while (
            not replicas.members
            or first.replica_id in replicas.members
            or not replicas.ledger.num_ready()
        ):
            await asyncio.sleep(0.02)
        (second,) = replicas.members.values()
        groups.append(second.started.group)
        assert [state_of(group) for group in groups] == ["REMOVED", "CREATED"]
        await replicas.stop()

    run_replicas(kill_the_first, bundles=({"CPU": 0.1}, {"CPU": 0.1}))
    assert [state_of(group) for group in groups] == ["REMOVED", "REMOVED"]


def state_of(group):
    return ray.util.placement_group_table(group)["state"]


def groups_alive():
    table = ray.util.placement_group_table()
    return {name for name, group in table.items() if group["state"] != "REMOVED"}


def test_a_replica_that_ray_refuses_ends_its_rank_and_leaves_no_group(tmp_path):
    before, reported = groups_alive(), []

    async def run():
        plan = Placement(
            num_replicas=1, num_cpus=0, num_gpus=0, num_engines_on_host=1, bundles=({"CPU": 0.1},)
        )
        spec = handle_of(pool={"runtime_env": {"working_dir": str(tmp_path)}}).spec
        replicas = ReplicaSet(
            spec,
            plan,
            RayRuntime(),
            on_lost=lambda *_: True,
            on_exhausted=lambda *of: reported.append(of),
        )
        replicas.start(make_coordinator)
        while not reported:
            await asyncio.sleep(0.02)
        await replicas.stop()

    asyncio.run(run())
    ((rank, cause),) = reported
    assert (rank, "is not a valid URI" in cause) == (0, True)
    assert groups_alive() == before
