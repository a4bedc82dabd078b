"""Replica actors are started, watched and ended."""

import asyncio
import os
import signal

import pytest
import ray

from raybatch.actors import crew as crew_module
from raybatch.actors.crew import Crew, CrewPlan
from tests.actors.pools import handle_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def make_coordinator(*, has_ended=False):
    """Return an actor without work, silent or at its end; defined here: it travels by value."""

    @ray.remote(num_cpus=0)
    class Coordinator:
        async def pull(self, replica_id, room):
            if not has_ended:
                await asyncio.Event().wait()

        async def report(self, replica_id, results, stats):
            return None

    return Coordinator.remote()


def run_crew(end, *, has_ended=False):
    """Start one replica, await `end(crew)` once it is ready, and return what the crew lost."""
    lost = []

    def on_lost(member, cause):
        lost.append((member.replica_id, cause))
        return True

    async def run():
        plan = CrewPlan(num_replicas=1, num_cpus=0, num_gpus=0, num_engines_on_host=1)
        crew = Crew(handle_of().spec, plan, on_lost=on_lost, on_exhausted=lambda *_: None)
        coordinator = make_coordinator(has_ended=has_ended)
        crew.start(coordinator)
        while not crew.ledger.num_ready() and not lost:
            await asyncio.sleep(0.02)
        await end(crew)
        ray.kill(coordinator)
        assert crew.members == {}

    asyncio.run(run())
    return lost


def test_a_replica_that_dies_while_the_crew_stops_is_not_started_again():
    async def kill_while_stopping(crew):
        stopping = asyncio.create_task(crew.stop())
        await asyncio.sleep(0)
        os.kill(crew.members[1].pid, signal.SIGKILL)
        await stopping

    ((replica_id, cause),) = run_crew(kill_while_stopping)
    assert (replica_id, "Error: " in cause) == (1, True)


def test_a_replica_that_does_not_end_by_itself_is_stopped_without_a_cause(monkeypatch):
    monkeypatch.setattr(crew_module, "_STOP_GRACE_S", 0.1)
    assert run_crew(Crew.stop) == [(1, None)]


def test_a_replica_that_ends_as_asked_has_no_cause():
    assert run_crew(Crew.stop, has_ended=True) == [(1, None)]
