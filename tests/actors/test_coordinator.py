"""How the coordinator reacts to its replicas, which are plain objects here; needs no Ray."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayTaskError, RpcError

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.executors.ray_pools import RayRuntime, Reserved
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.wire.columns import encode_completions
from raybatch.actors.wire.records import Credit, Place, Submission
from raybatch.records.types import Completion, ReplicaStats
from tests.actors.pools import handle_of

CREDIT = Credit(tokens=64, rows=64)
BROKEN = RayTaskError("abort", "a bug in the replica", ValueError())


class Table:
    """Stands in for a request table in the object store."""


class FakeActor:
    """A replica that answers each call, or raises the same error each time."""

    def __init__(self, error=None, rows=()):
        self._error, self._rows = error, rows

    async def abort(self, batch_id):
        if self._error is not None:
            raise self._error

    async def give_back(self, max_rows, max_cost):
        if self._error is not None:
            raise self._error
        return self._rows


class Bench:
    """A coordinator whose replicas and row batches come from the test."""

    def __init__(self, runtime=None):
        plan = Placement(num_replicas=4, num_cpus=0, num_gpus=0, num_engines_on_host=4)
        self.coordinator = Coordinator(handle_of().spec, plan, runtime or RayRuntime())
        self.registry = self.coordinator._registry
        self.queue = self.coordinator._queue

    def join(self, replica_id, error=None, rows=()):
        member = Member(
            replica_id=replica_id,
            rank=0,
            started=Reserved({}, actor=FakeActor(error, rows)),
            place=Place(replica_id),
        )
        member.is_ready = True
        self.coordinator._replicas.members[replica_id] = member

    def leave(self, replica_id, cause):
        """End a replica as the replica set does; without a cause it was stopped."""
        self.coordinator._lose(self.coordinator._replicas.members.pop(replica_id), cause)

    def add(self, num_rows, table=None):
        submission = Submission(
            token=f"{num_rows} rows",
            client="c",
            refs=[table],
            prompt_tokens=np.ones(num_rows, np.int32),
            max_new_tokens=np.ones(num_rows, np.int64),
        )
        return self.registry.add(submission)

    async def finish_one_row(self, table):
        """Let replica 1 finish the only row of a batch, and drop the batch."""
        self.join(1)
        batch = self.add(1, table)
        await self.coordinator.pull(1, CREDIT)
        results = encode_completions([0], [Completion(request_id=0)])
        await self.coordinator.report(1, [batch.batch_id], [results], ReplicaStats(), "nothing")
        self.registry.drop(batch)

    async def num_held(self):
        # running tasks end within a few turns of the loop
        for _ in range(5):
            await asyncio.sleep(0)
        return (await self.coordinator.state()).num_held_rows


def test_stops_with_a_canary_are_no_sign_of_a_broken_engine():
    async def run():
        bench, table = Bench(), Table()
        await bench.finish_one_row(table)
        bad = bench.add(20)
        for replica_id in (2, 3):
            bench.join(replica_id)
            await bench.coordinator.pull(replica_id, CREDIT)
            bench.leave(replica_id, "it crashed")
        bench.registry.drop(bad)
        for replica_id in (4, 5, 6):
            bench.join(replica_id)
            (canary,) = await bench.coordinator.pull(replica_id, CREDIT)
            assert canary.refs == [table]
            bench.leave(replica_id, None)
        return await bench.coordinator.has_failed()

    assert not asyncio.run(run())


class SilentRuntime(RayRuntime):
    """A cluster that does not report the resources of its hosts."""

    async def make_room(self, wanted):
        """Query no cluster: none is connected, and Ray would start one."""

    async def shortage(self, plan, pool):
        raise RpcError("unavailable")


def test_a_wait_is_logged_if_the_cluster_reports_no_cause(caplog):
    async def run():
        bench = Bench(SilentRuntime())
        bench.join(1)
        member = bench.coordinator._replicas.members[1]
        member.place, member.made_s = None, 0.0
        bench.coordinator._rebalancer._warn_of_wait(1, 31.0)
        await bench.num_held()
        return await bench.coordinator.has_failed()

    assert not asyncio.run(run())
    assert "waiting for 1 engine" in caplog.text


def test_an_idle_pool_lets_go_of_the_last_request_table():
    async def run():
        bench, table = Bench(), Table()
        is_there = weakref.ref(table)
        await bench.finish_one_row(table)
        del table
        await bench.coordinator._stop_replicas()
        gc.collect()
        return is_there()

    assert asyncio.run(run()) is None


def test_rows_that_no_client_waits_for_are_held_by_no_replica():
    async def run():
        bench = Bench()
        bench.join(1)
        bench.queue.add(99, [1, 1], [1, 1])
        assert await bench.coordinator.pull(1, CREDIT) == []
        return await bench.num_held()

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize(
    ("error", "has_failed", "num_held"),
    [(None, False, 0), (ActorDiedError(), False, 2), (BROKEN, True, 2)],
    ids=["done", "dead", "broken"],
)
def test_an_abort_that_fails_in_a_living_replica_fails_the_pool(error, has_failed, num_held):
    async def run():
        bench = Bench()
        bench.join(1, error)
        batch = bench.add(2)
        await bench.coordinator.pull(1, CREDIT)
        bench.registry.drop(batch)
        return await bench.num_held(), await bench.coordinator.has_failed()

    assert asyncio.run(run()) == (num_held, has_failed)


@pytest.mark.parametrize(("error", "has_failed"), [(ActorDiedError(), False), (BROKEN, True)])
def test_a_return_of_rows_that_fails_in_a_living_replica_fails_the_pool(error, has_failed):
    async def run():
        bench = Bench()
        bench.join(1, error)
        bench.join(2)
        bench.add(8)
        await bench.coordinator.pull(1, CREDIT)
        await bench.coordinator.report(1, [], [], ReplicaStats(num_waiting=4), "nothing")
        demand = asyncio.create_task(bench.coordinator.pull(2, CREDIT))
        assert await bench.num_held() == 8
        demand.cancel()
        return await bench.coordinator.has_failed()

    assert asyncio.run(run()) == has_failed


def test_rows_that_are_given_back_go_to_the_idle_replica_and_no_others():
    async def run():
        bench, table = Bench(), Table()
        batch = bench.add(8, table)
        bench.join(1, rows=[(batch.batch_id, 2), (batch.batch_id, 5)])
        bench.join(2)
        await bench.coordinator.pull(1, CREDIT)
        await bench.coordinator.report(1, [], [], ReplicaStats(num_waiting=4), "nothing")
        (work,) = await bench.coordinator.pull(2, CREDIT)
        return [
            row for row_range in work.row_ranges for row in range(row_range.start, row_range.stop)
        ]

    assert asyncio.run(run()) == [2, 5]
