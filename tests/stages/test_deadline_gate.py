"""Units that begin, wait or stay open by the rate of a run, with a test clock."""

import asyncio

from raybatch.policy.deadline import UnitDeadline
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import ReplicaStats
from raybatch.stages.unit_feeder import UnitGate

DEADLINE = UnitDeadline(ends_at=100.0, ready_at=0.0, row_s=1.0)


class Run:
    """A run with a sequence of states; the last one stays."""

    def __init__(self, *states, is_stopped=False):
        self.now_s = 0.0
        self.is_stopped = is_stopped
        self._states = list(states)

    def read(self):
        self.now_s, stats = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return stats

    async def has_to_stop(self):
        return self.is_stopped

    def gate(self, deadline=DEADLINE):
        return UnitGate(deadline, self.read, clock=lambda: self.now_s, poll_s=0.0)


def stats(*, done=0, received=0, busy_s=0.0, running=0):
    replicas = (ReplicaStats(num_running=running),) if running else ()
    return PoolStats(
        num_ready=1, rows_done=done, rows_received=received, busy_s=busy_s, replicas=replicas
    )


def admit(run, *sizes, deadline=DEADLINE):
    """Return whether each unit of these sizes, in rows, may begin."""

    async def begin():
        gate = run.gate(deadline)
        return [await gate.admits(size, run.has_to_stop) for size in sizes]

    return asyncio.run(asyncio.wait_for(begin(), 20))


def test_without_a_deadline_every_unit_begins():
    assert [True, True] == admit(Run((1e9, stats())), 10**9, 10**9, deadline=None)


def test_units_on_their_way_to_the_pool_count():
    # with 60 rows open there is time for 40 more, and for none after the deadline
    run = Run((0.0, stats()), (0.0, stats()), (100.0, stats()))
    assert [True, False] == admit(run, 60, 41)


def test_a_unit_alone_that_is_never_in_time_does_not_begin():
    assert [False] == admit(Run((0.0, stats())), 101)


def test_a_unit_waits_for_rows_that_are_quicker_than_predicted():
    run = Run(
        (0.0, stats(received=90)),
        (10.0, stats(received=90, running=8)),
        (40.0, stats(received=90, done=90, busy_s=20.0)),
    )
    assert [True] == admit(run, 80)


def test_a_unit_does_not_begin_where_rows_are_slower_than_predicted():
    quick = Run((0.0, stats()), (50.0, stats(received=40, done=40, busy_s=40.0)))
    slow = Run((0.0, stats()), (50.0, stats(received=40, done=40, busy_s=48.0)))
    assert ([True, True], [True, False]) == (admit(quick, 40, 45), admit(slow, 40, 45))


def test_work_of_a_warm_pool_for_others_does_not_count():
    run = Run((0.0, stats(busy_s=900.0)), (50.0, stats(received=40, done=40, busy_s=940.0)))
    assert [True, True] == admit(run, 40, 45)


def test_no_unit_begins_once_the_run_has_to_stop():
    assert [False] == admit(Run((0.0, stats()), is_stopped=True), 1)


def test_a_unit_without_remaining_rows_begins_at_once():
    assert [True] == admit(Run((200.0, stats())), 0)
