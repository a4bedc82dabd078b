"""A pool of in-process engines whose rows a test moves, with failures at chosen steps."""

import asyncio
import time
from contextlib import suppress

import numpy as np

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.coordinator.rebalancer import MoveRows
from raybatch.actors.executors.calls import CallHandle, PeerDiedError, PeerError
from raybatch.actors.executors.local_pools import LocalRuntime
from raybatch.actors.installed_extensions import extensions_of
from raybatch.actors.pool import make_submission
from raybatch.actors.replica.engine_thread import EngineEndedError
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.columns import combine_results, request_table
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Place, PoolSpec, RowRange
from raybatch.backends.native import NativeBackend
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.policy.pool.snapshot import RowMove
from raybatch.telemetry import metrics_of_process
from raybatch_extensions.speculative.pool import SpeculativeExecution
from tests.actors.pools import handle_of
from tests.engine.sequences.test_forks import make

BLOCK = 4


class PacedBackend(NativeBackend):
    """Limits the step rate to what the loop of the test can follow."""

    pace_s = 0.002

    def poll(self):
        time.sleep(self.pace_s)
        return super().poll()


class MovingReplica(Replica):
    """A replica whose engine computes tokens by a rule, with KV that identifies its tokens."""

    def _build(self):
        engine, _ = make(block_size=BLOCK, max_num_seqs=16, num_blocks=900)
        self.engine, self.backend = engine, PacedBackend(engine)
        return self.backend


class Side:
    """One replica on the loop of the test, as the coordinator sees it."""

    def __init__(self, spec, replica_id, script):
        self.metrics = metrics_of_process()
        self.replica_id = replica_id
        self.replica = MovingReplica(spec, replica_id, self)
        self.dead = asyncio.Event()
        self._script = script

    @property
    def actor(self):
        return CallHandle(lambda name, *args: asyncio.create_task(self._call(name, *args)))

    def place(self):
        return Place(self.replica_id)

    def settle(self, spec):
        pass

    async def fetch(self, ref):
        return ref

    def share(self, value):
        return value

    async def shared(self, ref):
        return ref

    async def die(self):
        self.dead.set()
        await asyncio.Event().wait()

    def end(self):
        self.dead.set()
        self.replica.close_soon()

    async def _call(self, name, *args):
        if name == "move":
            self._script(self, args[0], "before")
        if self.dead.is_set():
            raise PeerDiedError("it was killed")
        if name == "run":
            return await self._run(*args)
        if name == "place":
            return self.place()
        try:
            answer = await self._unless_dead(getattr(self.replica, name)(*args))
        except EngineEndedError as error:
            raise PeerError(str(error)) from error
        if name == "move":
            self._script(self, args[0], "after")
        if self.dead.is_set():
            raise PeerDiedError("it was killed")
        return answer

    async def _run(self, coordinator):
        return await self._unless_dead(self.replica.run(coordinator))

    async def _unless_dead(self, work):
        """Wait for an action of this replica, or for its death."""
        working = asyncio.create_task(work)
        dead = asyncio.create_task(self.dead.wait())
        await asyncio.wait({working, dead}, return_when=asyncio.FIRST_COMPLETED)
        if not self.dead.is_set():
            dead.cancel()
            return await working
        working.cancel()
        raise PeerDiedError("it was killed")


class MovingRuntime:
    died = (PeerDiedError,)
    failed = (PeerError,)

    def __init__(self, script):
        self.metrics = metrics_of_process()
        self.owner = None
        self.sides = {}
        self._script = script

    def coordinator(self):
        def begin(name, *args):
            return asyncio.create_task(getattr(self.owner, name)(*args))

        return CallHandle(begin)

    def keep(self, requests):
        return requests

    def start(self, spec, plan, rank, replica_id, **options):
        self.sides[replica_id] = Side(spec, replica_id, self._script)
        return self.sides[replica_id]

    async def make_room(self, wanted):
        pass

    async def draining_hosts(self):
        return ()

    async def shortage(self, plan, pool):
        return ""


class OnThisLoop:
    """Replaces the loop of local pools by the loop of the test."""

    def handle(self, target):
        return CallHandle(lambda name, *args: asyncio.create_task(getattr(target, name)(*args)))


def pool_of_processes(folder, num_replicas, *, runtime=None, **options):
    """Return a pool of native engines, each in its own process."""
    spec = PoolSpec(
        model=str(folder),
        backend=BackendConfig(kind="native"),
        engine=EngineConfig(
            device="cpu", dtype="float32", block_size_tokens=8, kv_cache_bytes=32 << 20
        ),
        pool=PoolConfig(replicas=num_replicas, max_row_crashes=9, **options),
    )
    runtime = runtime or LocalRuntime(OnThisLoop())
    return MovingPool(num_replicas=num_replicas, runtime=runtime, spec=spec)


class SpeculationOfTest(SpeculativeExecution):
    """Speculative copies that a test begins; plans none."""

    def plan(self, snapshot, plan):
        return ()


class MovingPool:
    """A coordinator and its replicas; `move` begins one move as the plan of a pool does."""

    def __init__(
        self, *, num_replicas=2, script=lambda *_: None, runtime=None, spec=None, **options
    ):
        self.runtime = runtime or MovingRuntime(script)
        if spec is None:
            options = {"max_row_crashes": 9, "stuck_after_s": 300.0} | options
            spec = handle_of(pool={"replicas": num_replicas, **options}).spec
        self.spec = spec
        plan = Placement(
            num_replicas=num_replicas, num_cpus=0, num_gpus=0, num_engines_on_host=num_replicas
        )
        self._num_replicas = num_replicas
        extensions = extensions_of(self.spec, plan)
        if not self.spec.pool.duplicate_last_rows:
            extensions = (*extensions, SpeculationOfTest)
        self.coordinator = Coordinator(self.spec, plan, self.runtime, extensions)
        self.runtime.owner = self.coordinator
        self.queue = self.coordinator._queue
        self.rebalancer = self.coordinator._rebalancer

    @property
    def counters(self):
        return self.rebalancer.moves

    def move(self, row_id, source, target, *, with_kv=True):
        """Begin a move of a row, if the replica runs it."""
        snapshot = self.snapshot()
        rows = {r.replica_id: r.rows for r in snapshot.replicas}
        if rows.get(source) is None or row_id not in rows[source].ids:
            return
        self.rebalancer.apply(MoveRows((RowMove(row_id, source, target, with_kv),), snapshot))

    def copy(self, row_id, target):
        """Begin a speculative copy at a replica that requests rows; return whether it began."""
        if target not in self.coordinator._parts.demand() or not self.queue.copies.begin(
            target, row_id
        ):
            return False
        batch_id, row = row_id >> ROW_BITS, row_id & ROW_MASK
        self.coordinator._parts.hand_out(target, [RowRange(batch_id, row, row + 1)])
        return True

    def snapshot(self):
        members = self.coordinator._replicas.members
        return self.rebalancer.view.snapshot(members.values(), (), with_rows=True)

    def move_at_random(self, generator):
        """Begin a move of some running row to some other replica."""
        known = [
            r for r in self.snapshot().replicas if r.rows is not None and r.rows.can_move.any()
        ]
        ids = [m.replica_id for m in self.coordinator._replicas.members.values() if m.is_ready]
        if not known or len(ids) < 2:
            return
        source = generator.choice(known)
        row_id = int(generator.choice(source.rows.ids[source.rows.can_move].tolist()))
        target = generator.choice([i for i in ids if i != source.replica_id])
        self.move(row_id, source.replica_id, target, with_kv=generator.random() < 0.7)

    async def generate(self, prompts, samplings, meanwhile, then=None):
        """Run short rows to their end, and `meanwhile` concurrently; return completions by row.

        All replicas are alive when the rows are submitted, and still when `then` runs.
        """
        await self.coordinator.start()
        members = self.coordinator._replicas.members
        while sum(member.is_ready for member in members.values()) < self._num_replicas:
            await asyncio.sleep(0.002)
        doing = asyncio.create_task(meanwhile(self))
        results = await self.answers(prompts, samplings)
        doing.cancel()
        with suppress(asyncio.CancelledError):
            await doing
        if then is not None:
            await then(self)
        await self.coordinator.shutdown()
        return results

    async def answers(self, prompts, samplings):
        """Run rows to their end; return completions by row."""
        seeds = np.zeros(len(prompts), np.uint64)
        table = request_table([str(i) for i in range(len(prompts))], prompts, seeds=seeds)
        submission = make_submission(table, samplings, "c", self.spec.engine)
        answer = await self.coordinator.generate(submission, (table, samplings))
        while answer.status == "pending":
            answer = await self.coordinator.collect(submission.token)
        assert answer.status == "done", answer.cause
        return combine_results(answer.results, answer.attempts)
