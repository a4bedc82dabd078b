"""Replica actors are started, watched and ended."""

import asyncio
import os
import signal

import pytest
import ray

from raybatch.actors.crew import Crew, CrewPlan
from tests.actors.pools import handle_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def make_silent_coordinator():
    """Return an actor that never has work; defined here so that it travels by value."""

    @ray.remote(num_cpus=0)
    class Silent:
        async def pull(self, replica_id, room):
            await asyncio.Event().wait()

        async def report(self, replica_id, results, stats):
            return None

    return Silent.remote()


def test_a_replica_that_dies_while_the_crew_stops_is_not_started_again():
    lost = []

    def on_lost(member, cause):
        lost.append((member.replica_id, "Error: " in cause))
        return True

    async def run():
        plan = CrewPlan(num_replicas=1, num_cpus=0, num_gpus=0, num_engines_on_host=1)
        crew = Crew(handle_of().spec, plan, on_lost=on_lost, on_exhausted=lambda *_: None)
        coordinator = make_silent_coordinator()
        crew.start(coordinator)
        while not crew.ledger.num_ready():
            await asyncio.sleep(0.02)
        stopping = asyncio.create_task(crew.stop())
        await asyncio.sleep(0)
        os.kill(crew.members[1].pid, signal.SIGKILL)
        await stopping
        ray.kill(coordinator)
        return dict(crew.members)

    assert asyncio.run(run()) == {}
    assert lost == [(1, True)]
