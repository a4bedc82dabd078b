"""When a replica is started again, and when it is given up."""

import asyncio
from types import SimpleNamespace

import pytest

from raybatch.actors.replicas import replica_set
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.starts import StartEvents, StartLedger
from raybatch.actors.wire.records import FailedStart, Place, PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig


def ledger(num_replicas=1, max_start_failures=3):
    return StartLedger(num_replicas, max_start_failures)


def test_failed_starts_wait_longer_each_time_and_end():
    starts = ledger(max_start_failures=4)
    delays = [starts.died(0, lost_rows=False) for _ in range(4)]
    assert delays == [0.2, 1.0, 5.0, None]


def test_a_start_that_can_only_fail_again_is_not_tried_again():
    starts = ledger()
    assert starts.died(0, lost_rows=False, is_final=True) is None
    assert starts.is_exhausted()


def test_a_death_that_cost_rows_is_answered_at_once():
    assert [ledger().died(0, lost_rows=True) for _ in range(5)] == [0.0] * 5


def test_starts_of_a_group_fail_together():
    starts = StartLedger(8, 3, group_size=4)
    delays = [starts.died(rank, lost_rows=False) for rank in (5, 4, 7)]
    assert delays == [0.2, 1.0, None]
    assert (starts.ranks[7].is_retired, starts.num_retired()) == (True, 1)
    # the other group has none
    assert starts.died(0, lost_rows=False) == 0.2
    starts.worked(6)
    assert starts.died(4, lost_rows=False) == 0.2


def test_finished_rows_make_failures_count_from_zero():
    starts = ledger(max_start_failures=2)
    starts.died(0, lost_rows=False)
    starts.worked(0)
    assert starts.died(0, lost_rows=False) == 0.2


def test_a_pool_is_exhausted_when_its_last_rank_is_given_up():
    starts = ledger(num_replicas=2, max_start_failures=1)
    starts.died(0, lost_rows=False)
    assert (starts.ranks[0].is_retired, starts.is_exhausted()) == (True, False)
    starts.died(1, lost_rows=False)
    assert starts.is_exhausted()


def test_a_start_is_expected_for_twice_the_longest_one():
    starts = ledger(num_replicas=2)
    starts.begin(0, 0.0)
    starts.begin(1, 0.0)
    starts.ready(0, 3.0)
    assert [starts.num_expected(6.0), starts.num_expected(6.1)] == [1, 0]


def test_only_replicas_that_answer_are_ready():
    starts = ledger(num_replicas=2)
    starts.begin(0, 0.0)
    starts.ready(0, 1.0)
    assert starts.num_ready() == 1
    starts.died(0, lost_rows=True)
    assert starts.num_ready() == 0


TRACE = "Traceback (most recent call last):\n  ...\nRuntimeError: no"


def test_a_trace_is_told_once():
    events = StartEvents()
    first, second = (events.again(rank, "RuntimeError: no", TRACE) for rank in (0, 1))
    assert first == f"restarting replica 0: RuntimeError: no\n{TRACE}"
    assert second == "restarting replica 1: RuntimeError: no"


def test_an_error_of_this_library_has_no_trace():
    assert StartEvents().again(0, "ConfigError: x") == "restarting replica 0: ConfigError: x"


def test_a_rank_that_is_given_up_is_told_when_it_is_asked_for_and_once():
    events = StartEvents()
    events.given_up(1, "ConfigError: x")
    events.given_up(2, "RuntimeError: no", TRACE)
    assert events.take() == [
        "giving up on replica 1: ConfigError: x",
        f"giving up on replica 2: RuntimeError: no\n{TRACE}",
    ]
    assert events.take() == []


def test_a_message_about_a_rank_names_its_host():
    events = StartEvents()
    assert "replica 3 on host n (L4)" in events.again(3, "why", where="host n (L4)")


class Hosts:
    """A site whose replicas take seconds of a clock to be placed, and others to start."""

    failed = died = ()

    def __init__(self, clock, *, place_s=0.0, start_s=0.0):
        self._clock = clock
        self.actor = SimpleNamespace(
            place=call_of(lambda: self._passed(place_s, Place(1))),
            start=call_of(lambda *_: self._passed(start_s)),
            run=call_of(lambda *_: None),
        )

    def _passed(self, seconds, result=None):
        self._clock.now += seconds
        return result

    def start(self, *args, **options):
        return self

    def end(self):
        pass


def call_of(method):
    async def call(*args):
        return method(*args)

    return call


def replicas_on(runtime, on_lost=lambda *_: None, **pool):
    pool = PoolConfig(**pool)
    return replica_set.ReplicaSet(
        PoolSpec(model="demo", backend=BackendConfig(), engine=EngineConfig(), pool=pool),
        Placement(num_replicas=1, num_cpus=0, num_gpus=1, num_engines_on_host=1),
        runtime,
        on_lost=on_lost,
        on_exhausted=lambda *_: None,
    )


@pytest.mark.parametrize("timeout_s", [0.01, 3600.0])
def test_no_wait_for_a_place_outlives_the_wait_for_its_replica(timeout_s, monkeypatch):
    monkeypatch.setattr(replica_set, "_STOP_GRACE_S", 0)

    async def run():
        runtime = Hosts(SimpleNamespace(now=0.0))
        waits, began = [], asyncio.Event()

        async def place():
            waits.append(asyncio.current_task())
            began.set()
            await asyncio.Event().wait()

        runtime.actor.place = place
        replicas = replicas_on(runtime, start_timeout_s=timeout_s, max_start_failures=1)
        replicas.start(lambda: None)
        await began.wait()
        if timeout_s < 1:
            await asyncio.wait(waits)
        await replicas.stop()
        assert {asyncio.current_task()} == asyncio.all_tasks()
        assert [True] == [task.cancelled() for task in waits]

    asyncio.run(run())


def test_what_a_host_takes_to_come_is_no_part_of_a_start(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(replica_set, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def run():
        ended = asyncio.Event()
        runtime = Hosts(clock, place_s=3600.0, start_s=5.0)
        replicas = replicas_on(runtime, on_lost=lambda *_: ended.set())
        replicas.start(lambda: None)
        await ended.wait()
        return replicas.ledger.longest_start_s

    assert asyncio.run(run()) == 5.0


class UnlikeHosts(Hosts):
    """A site where rank 0 comes to a host on which no engine can start; it notes what to avoid."""

    def __init__(self, clock):
        super().__init__(clock)
        self.avoided = []

    def start(self, spec, plan, rank, replica_id, *, avoid, group):
        self.avoided.append((rank, set(avoid)))
        failed = FailedStart(cause="too small", is_final=True) if rank == 0 else None
        place = Place(1, "a", "large" if rank else "small")
        actor = SimpleNamespace(
            place=call_of(lambda: place), start=call_of(lambda *_: failed), run=self.actor.run
        )
        return SimpleNamespace(actor=actor, end=self.end)


def test_a_host_where_a_rank_was_given_up_is_avoided_once_engines_run_elsewhere():
    async def run():
        runtime = UnlikeHosts(SimpleNamespace(now=0.0))
        replicas = replicas_on(runtime)
        for _ in range(3):
            replicas.start(lambda: None)
            await asyncio.gather(*replicas._tasks.values())
            replicas.ledger.grow(1)
        return runtime.avoided

    first, second, *later = asyncio.run(run())
    assert [(0, set()), (1, set())] == [first, second]
    assert [(1, {"small"}), (2, {"small"})] == later


def test_a_rank_that_was_stopped_is_wanted_again_before_another_one_comes():
    starts = ledger(num_replicas=2)
    starts.ready(0, 1.0)
    starts.release(0)
    assert (starts.to_start(), starts.num_wanted(), starts.num_working()) == ([1], 1, 0)
    # while its replica ends, its place is not free
    starts.grow(1)
    assert starts.to_start() == [1, 2]
    starts.stopped(0)
    starts.grow(1)
    assert (starts.to_start(), starts.num_restarting(), starts.most_wanted) == ([0, 1, 2], 0, 3)


def test_a_pool_that_has_stopped_begins_with_its_first_number_of_good_ranks():
    starts = ledger(num_replicas=1, max_start_failures=1)
    starts.grow(2)
    starts.died(0, lost_rows=False)
    starts.shrink()
    assert (starts.to_start(), starts.is_exhausted()) == ([1], False)
