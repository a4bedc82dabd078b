"""The class of the replica actor in this process, with a scripted coordinator."""

import asyncio
import contextlib
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from raybatch.actors.executors.ray_pools import RayRuntime
from raybatch.actors.queue.pulling import REPORT_EVERY_S, PullPace
from raybatch.actors.replica.replica import Replica
from raybatch.actors.wire.columns import request_table
from raybatch.actors.wire.records import Assignment, LikelyLengths, PoolSpec, RowGroups, RowRange
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.records.types import Completion, ReplicaStats, RowProgress, Sampling

TIMEOUT_S = 60


class ScriptedCoordinator:
    """Answers pulls with assignments of the test; records credits and the ids of reported rows."""

    def __init__(self):
        self.answers = asyncio.Queue()
        self.requested = asyncio.Semaphore(0)
        self.reported = asyncio.Queue()
        self.credits = []

    async def pull(self, replica_id, credit):
        self.credits.append(credit)
        self.requested.release()
        return await self.answers.get()

    async def report(self, replica_id, batch_ids, results, stats, busy_with, progress):
        for batch_id in batch_ids:
            await self.reported.put(batch_id)
        return REPORT_EVERY_S


async def table(num_rows):
    rows = [str(row) for row in range(num_rows)]
    prompts = [np.array([row + 1], np.int32) for row in range(num_rows)]
    return request_table(rows, prompts), (Sampling(max_tokens=3),)


def work(batch_id, ref=None):
    refs = [table(2) if ref is None else ref]
    return Assignment(batch_id=batch_id, refs=refs, row_ranges=(RowRange(batch_id, 0, 2),))


@pytest.fixture
def run(monkeypatch):
    """Runs a test's coroutine with a replica that has requested rows."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake"),
        engine=EngineConfig(max_batched_tokens=64),
        pool=PoolConfig(replicas=1),
    )

    async def drive(scene):
        coordinator, replica = ScriptedCoordinator(), Replica(spec, 1, RayRuntime())
        assert await replica.start(1) is None
        running = asyncio.create_task(replica.run(coordinator))
        async with asyncio.timeout(TIMEOUT_S):
            await coordinator.requested.acquire()
            result = await scene(replica, coordinator)
            await coordinator.answers.put(None)
            await running
        return result

    return lambda scene: asyncio.run(drive(scene))


def test_rows_that_were_dropped_on_their_way_do_not_run(run):
    async def scene(replica, coordinator):
        await replica.abort(7)
        dropped = work(7, table(2))
        await coordinator.answers.put([dropped, work(8)])
        first = await coordinator.reported.get()
        return first, replica._engine.is_idle(), coordinator.reported.empty()

    assert run(scene) == (8, True, True)


def test_rows_that_were_dropped_while_their_table_came_do_not_run(run):
    async def scene(replica, coordinator):
        arrives, is_awaited = asyncio.Event(), asyncio.Event()

        async def late_table():
            is_awaited.set()
            await arrives.wait()
            return await table(2)

        await coordinator.answers.put([work(7, late_table()), work(8)])
        await is_awaited.wait()
        await replica.abort(7)
        arrives.set()
        first = await coordinator.reported.get()
        return first, replica._engine.is_idle(), coordinator.reported.empty()

    assert run(scene) == (8, True, True)


def test_a_draining_replica_returns_all_its_unstarted_rows_and_reports_the_others(run):
    async def scene(replica, coordinator):
        given, limits = Future(), []
        given.set_result([7 << 32 | 1, 8 << 32])
        replica._engine.give_back = lambda *of_call: limits.append(of_call) or given
        return await replica.drain(), limits, replica._progress is not None

    assert run(scene) == ([(7, 1), (8, 0)], [(None, None)], True)


def test_rows_of_several_batches_run_in_the_order_of_the_pull(run):
    async def scene(replica, coordinator):
        submitted = []
        replica._engine.submit = lambda requests, checkpointed: submitted.extend(requests)
        groups = RowGroups(group_ids=np.array([9, -1]), prefix_lens=np.array([1, 0], np.int32))
        first = Assignment(
            batch_id=7,
            refs=[table(2)],
            row_ranges=(RowRange(7, 1, 2), RowRange(7, 0, 1)),
            places=(0, 2),
            groups=groups,
        )
        second = Assignment(
            batch_id=8, refs=[table(2)], row_ranges=(RowRange(8, 0, 1),), places=(1,)
        )
        await coordinator.answers.put([first, second])
        await coordinator.requested.acquire()
        return [(r.request_id >> 32, r.row_id, r.group_id, r.prefix_len) for r in submitted]

    assert [(7, "1", 9, 1), (8, "0", None, 0), (7, "0", None, 0)] == run(scene)


def test_lengths_that_the_pool_knows_come_with_the_rows(run):
    async def scene(replica, coordinator):
        submitted = []
        replica._engine.submit = lambda requests, checkpointed: submitted.extend(requests)
        likely = LikelyLengths(kinds=np.array([1, 0]), lengths=((), (3, 9)))
        row_ranges = (RowRange(7, 1, 2), RowRange(7, 0, 1))
        known = Assignment(batch_id=7, refs=[table(2)], row_ranges=row_ranges, likely=likely)
        await coordinator.answers.put([known])
        await coordinator.requested.acquire()
        return [(r.row_id, r.likely_output_lens) for r in submitted]

    assert [("1", (3, 9)), ("0", ())] == run(scene)


def test_the_tokens_so_far_of_rows_that_run_are_reported(run):
    async def scene(replica, coordinator):
        reports = []

        async def report(replica_id, batch_ids, results, stats, busy_with, progress):
            reports.extend(filter(None, [progress]))
            return REPORT_EVERY_S

        coordinator.report = report
        # progress of an engine that runs two samples of row 5
        ids = np.array([(7 << 32) + 5, (7 << 32) + 5, 8 << 32])
        rows = RowProgress(request_ids=ids, num_tokens=ids, num_generated=np.array([3, 9, 1]))

        async def ask(work):
            return rows

        replica._engine.ask = ask
        replica._engine.is_idle = lambda: False
        while not reports:
            await asyncio.sleep(0.02)
        del replica._engine.is_idle
        return reports[0].rows is rows

    assert run(scene)


def test_a_busy_replica_reports_as_rarely_as_the_coordinator_asks(run):
    async def scene(replica, coordinator):
        has_report, num_reports = asyncio.Event(), 0

        async def report(*_):
            nonlocal num_reports
            num_reports += 1
            has_report.set()
            return 3600.0

        coordinator.report = report
        replica._engine.is_idle = lambda: False
        replica._outbox.set()
        await has_report.wait()
        replica._outbox.set()
        await asyncio.sleep(0.3)
        num_before = num_reports
        has_report.clear()
        del replica._engine.is_idle
        replica._wake()
        await has_report.wait()
        return num_before

    assert run(scene) == 1


def test_a_fast_engine_requests_more_rows(run, monkeypatch):
    noted = []

    def note_pull(pace, lead, done, *, now_s):
        noted.append(done.rows)
        pace.num_leads = 8

    monkeypatch.setattr(PullPace, "note_pull", note_pull)

    async def scene(replica, coordinator):
        for batch_id in (7, 8):
            await coordinator.answers.put([work(batch_id)])
            await coordinator.reported.get()
            await coordinator.requested.acquire()
        return [credit.rows for credit in coordinator.credits]

    first, *later = run(scene)
    assert max(later) > 4 * first
    assert noted[:2] == [0, 2]


def test_a_replica_without_rows_reports_its_capacity_once(run):
    async def scene(replica, coordinator):
        reports = []

        async def report(replica_id, batch_ids, results, stats, busy_with, progress):
            reports.extend(filter(None, [progress]))
            return REPORT_EVERY_S

        coordinator.report = report
        await asyncio.sleep(0.5)
        return [(len(progress.rows.request_ids), progress.capacity) for progress in reports]

    ((num_rows, capacity),) = run(scene)
    assert (num_rows, capacity.max_num_seqs > 0) == (0, True)


def test_a_replica_continues_after_an_abort(run):
    async def scene(replica, coordinator):
        await coordinator.answers.put([work(7)])
        await coordinator.requested.acquire()
        await replica.abort(7)
        await coordinator.answers.put([work(8)])
        while (batch_id := await coordinator.reported.get()) == 7:
            pass
        return batch_id

    assert run(scene) == 8


def test_an_abort_of_rows_that_are_not_here_is_confirmed(run):
    async def scene(replica, coordinator):
        await replica.abort(7)
        return replica._engine.is_idle()

    assert run(scene)


@pytest.mark.parametrize(
    ("model", "is_final"),
    [("/nowhere/at/all", True), ("http://127.0.0.1:9/model", False)],
    ids=["no such folder", "a server that is away"],
)
def test_a_start_is_tried_again_only_where_it_may_succeed(model, is_final, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = PoolSpec(
        model=model,
        backend=BackendConfig(kind="native"),
        engine=EngineConfig(),
        pool=PoolConfig(replicas=1),
    )
    failed = asyncio.run(Replica(spec, 1, RayRuntime()).start(1))
    assert failed.is_final == is_final
    assert failed.cause
    # the message says all that a traceback would
    assert failed.trace == ""


STOPS_A_ROW = """
import asyncio, sys
import numpy as np
from raybatch.actors.executors.engine_process import EngineProcess
from raybatch.actors.replica.replica import Replica
from raybatch.actors.wire.columns import encode_checkpointed
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.records.types import Request, Sampling, SequenceState

spec = PoolSpec(
    model="none",
    backend=BackendConfig(kind="fake"),
    engine=EngineConfig(),
    pool=PoolConfig(replicas=1),
)
assert asyncio.run(Replica(spec, 1, EngineProcess(None)).start(1)) is None
prompt = np.arange(9, dtype=np.int32)
request = Request(request_id=0, row_id="0", prompt_token_ids=prompt, sampling=Sampling())
state = SequenceState(request=request, sample_idx=0, token_ids=prompt)
before = set(sys.modules)
encode_checkpointed([0], [state])
print(len(set(sys.modules) - before))
"""


def test_the_first_row_that_a_process_stops_waits_for_no_module_to_be_loaded():
    ended = subprocess.run([sys.executable, "-c", STOPS_A_ROW], capture_output=True, check=True)
    assert ended.stdout == b"0\n"


class BreakingEngine:
    """Finishes its last row and breaks while earlier results are sent."""

    def __init__(self):
        self.finished = [done(0)]
        self.broken = None
        self.stats = ReplicaStats()

    def break_down(self):
        self.finished = [done(1)]
        self.broken = RuntimeError("broken")

    def collect(self):
        finished, self.finished = self.finished, []
        return finished

    @property
    def failure(self):
        return self.broken

    def is_idle(self):
        return self.broken is not None


class DeadRuntime(RayRuntime):
    """Dies by cancelling the task that reported the failure."""

    async def die(self):
        raise asyncio.CancelledError


def done(row):
    return Completion(request_id=row, token_ids=np.array([1], np.int32), finish_reason="stop")


def test_what_an_engine_finished_before_it_broke_is_sent(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake"),
        engine=EngineConfig(),
        pool=PoolConfig(replicas=1),
    )

    async def note_report():
        engine, replica, news = BreakingEngine(), Replica(spec, 1, DeadRuntime()), []

        async def report(replica_id, batch_ids, results, stats, busy_with, progress):
            news.extend(row for table in results for row in table["row"].to_pylist())
            if engine.broken is None:
                engine.break_down()
                replica._wake()
                await asyncio.sleep(0)
            return REPORT_EVERY_S

        async def note_cause(replica_id, cause, ends_run, trace):
            assert "RuntimeError: broken" in trace
            news.append(cause)

        coordinator = SimpleNamespace(report=report, note_cause=note_cause)
        replica._loop = asyncio.get_running_loop()
        replica._wake()
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.create_task(replica._report(engine, coordinator))
        return news

    assert asyncio.run(note_report()) == [0, 1, "RuntimeError: broken"]
