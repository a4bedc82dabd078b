"""A replica: its engine steps, between steps it takes rows in, and it pulls and reports."""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from raybatch.actors.queue.pulling import (
    HEARTBEAT_S,
    LEAD_STEPS,
    MIN_NEW_TOKENS,
    Lead,
    OpenRows,
    PullPace,
    choose_rows,
    credit_for,
    report_every_s,
)
from raybatch.actors.wire.records import Credit, Progress
from raybatch.policy.pool.snapshot import Steal
from raybatch.records.arrays import Floats
from raybatch.records.types import ReplicaStats
from raybatch_lab.simulator.clock import VirtualClock
from raybatch_lab.simulator.engine import EngineSpec, MovedSequence, SimulatedEngine
from raybatch_lab.simulator.rows import SimulatedRows

_T = TypeVar("_T")


class Coordinator(Protocol):
    """The calls of a replica to its coordinator.

    They arrive at once: the replica delays each call by the seconds of a message. `members` are the
    replicas of the pool.
    """

    @property
    def members(self) -> Sized: ...

    def pull(self, replica_id: int, credit: Credit) -> None: ...

    def report(self, replica_id: int, rows: Sequence[int], stats: ReplicaStats) -> None: ...


@dataclass(slots=True)
class _Run:
    """Steps that the engine is at: when they began, and when each of them ends."""

    began: float
    ends: Floats
    num_steps: int

    @property
    def end_s(self) -> float:
        return self.began + float(self.ends[self.num_steps - 1])

    def cut(self, now: float) -> None:
        """Let the run end with the step that is running at `now`; drop the later ones."""
        running = int(np.searchsorted(self.began + self.ends, now)) + 1
        self.num_steps = min(self.num_steps, running)


class SimulatedReplica:
    """Simulates `raybatch.actors.replica`: its engine thread, its pulls, and its reports.

    Args:
        slowness: factor on the seconds of its steps.
        message_s: seconds of a call to the coordinator, or of an answer.
    """

    def __init__(
        self,
        replica_id: int,
        rank: int,
        rows: SimulatedRows,
        spec: EngineSpec,
        coordinator: Coordinator,
        clock: VirtualClock,
        *,
        slowness: float,
        message_s: float,
    ) -> None:
        self.replica_id, self.rank, self.host_id = replica_id, rank, ""
        self.engine = SimulatedEngine(rows, spec, slowness=slowness)
        self.num_finished = 0
        self.is_dead = False
        self.is_ready = True
        self.is_tp_driver = False
        # from, to: seconds in which the engine stepped
        self.busy: list[tuple[float, float]] = []
        self._all_rows, self._coordinator, self._clock = rows, coordinator, clock
        self._message_s = message_s
        self._min_tokens = LEAD_STEPS * spec.token_budget
        self._pace = PullPace()
        self._rows = OpenRows()
        self._incoming: list[int] = []
        self._moved: list[MovedSequence] = []
        self._calls: list[Callable[[], None]] = []
        self._finished: list[int] = []
        self._stats = ReplicaStats()
        self._num_in_hand = self._reported_waiting = 0
        self._run: _Run | None = None
        self._is_pulling = False
        # its idle state is reported once
        self.has_reported_idle = False
        self._reported_s, self._report_due_s = -HEARTBEAT_S, float("inf")

    @property
    def stats(self) -> ReplicaStats:
        """Return the counters of its engine after the last event."""
        return self._stats

    def start(self) -> None:
        self._pull()

    def die(self) -> None:
        """Crash: stop at once, and lose all results that were not reported."""
        self.is_dead = True
        self.close()

    def close(self) -> None:
        """Stop the engine now; steps that have ended count, the running one does not."""
        if (run := self._run) is None:
            return
        self._note_busy(self._clock.now)
        self._run = None
        num_done = int(np.searchsorted(run.began + run.ends, self._clock.now, side="right"))
        if num_done:
            self.engine.compute(min(num_done, run.num_steps))

    def submit(self, rows: Sequence[int], checkpointed: Sequence[MovedSequence]) -> None:
        """Accept the rows that answer a pull.

        `checkpointed` has the states of those that ran on other replicas.
        """
        self._is_pulling = False
        self._pace.note_pull(self._lead, self._rows.done, now_s=self._clock.now)
        self._take_in(rows, checkpointed)
        self._pull()

    def take_over(self, moved: MovedSequence) -> None:
        """Queue a sequence that ran on another replica."""
        self._take_in([moved.row], [moved])

    def give_back(self, steal: Steal, answer: Callable[[list[int]], None]) -> None:
        """Remove unstarted rows before the next step, and call `answer` with them."""
        self._call(lambda: self._give(steal, answer))

    def give_checkpoint(self, answer: Callable[[list[MovedSequence]], None]) -> None:
        """Call `answer` with the states of rows that have many new tokens since the last call."""
        self._call(lambda: self._answer(answer, self.engine.checkpoint(MIN_NEW_TOKENS)))

    def tell(self, answer: Callable[[ReplicaStats, Progress], None]) -> None:
        """Call `answer` with the counters of the engine and the progress of its rows."""

        def reported() -> None:
            progress = Progress(rows=self.engine.table.progress(), capacity=self.engine.capacity())
            stats, self.has_reported_idle = self.engine.stats(), self.engine.is_idle()
            self._clock.after(
                self._message_s, lambda: None if self.is_dead else answer(stats, progress)
            )

        self._call(reported)

    def set_slowdown(self, slowdown: float, pause_s: float) -> None:
        """Multiply the seconds of steps by `slowdown` from the next step on, after a pause."""
        self._call(lambda: self.engine.set_slowdown(slowdown, pause_s))

    def recompute(self) -> None:
        """Recompute the KV of all running rows, because it is lost."""
        self._call(self.engine.recompute)

    def move_out(
        self, row: int, *, with_kv: bool, answer: Callable[[list[MovedSequence]], None]
    ) -> None:
        """Remove a row before the next step, and call `answer` with it, or [] if it has ended."""

        def export() -> None:
            moved = self.engine.export([row], with_kv=with_kv)
            for sequence in moved:
                self._rows.give_back(sequence.row)
            answer(moved)

        self._call(export)

    def _take_in(self, rows: Sequence[int], checkpointed: Sequence[MovedSequence]) -> None:
        if self.is_dead:
            return
        self._incoming += rows
        self._moved += checkpointed
        self._rows.add(self._all_rows.request(row) for row in rows)
        self._stir()

    def _call(self, call: Callable[[], None]) -> None:
        if not self.is_dead:
            self._calls.append(call)
            self._stir()

    def _stir(self) -> None:
        """Let what came in be seen before the next step."""
        if self._run is None:
            self._step()
        elif self._run.num_steps > 1:
            planned = self._run.num_steps
            self._run.cut(self._clock.now)
            if self._run.num_steps < planned:
                self._await_end()

    def _step(self) -> None:
        """Take in what has come, do what was asked for, and begin the next steps."""
        rows, self._incoming = self._incoming, []
        moved, self._moved = self._moved, []
        calls, self._calls = self._calls, []
        self._num_in_hand = len(rows)
        checkpointed = {sequence.row for sequence in moved}
        self.engine.restore(moved)
        self.engine.add(row for row in rows if row not in checkpointed)
        for call in calls:
            call()
        ends = self.engine.begin()
        if len(ends):
            self._run = _Run(self._clock.now, ends, len(ends))
            self._await_end()
        if calls or not len(ends):
            self._note(is_event=bool(calls))

    def _await_end(self) -> None:
        run = self._run
        assert run is not None, "no step to wait for"
        num_steps = run.num_steps

        def end() -> None:
            # a cut or a death has made another end of it
            if self._run is run and run.num_steps == num_steps:
                self._end(run)

        self._clock.at(run.end_s, end)

    def _end(self, run: _Run) -> None:
        self._note_busy(run.end_s)
        self._run = None
        ended = self.engine.compute(run.num_steps)
        for row in ended:
            self._rows.close(row)
        self._finished += ended
        self._note(is_event=bool(ended))
        self._step()

    def _note(self, *, is_event: bool) -> None:
        """Read the counters of the engine, and pull and report where they ask for it."""
        self._stats = self.engine.stats()
        self._num_in_hand = 0
        self._pull()
        if is_event:
            is_dry = not len(self._rows)
            pace_s = self._reported_s + report_every_s(len(self._coordinator.members))
            self._report_at(self._clock.now if is_dry else pace_s)
        elif self._stats.num_waiting != self._reported_waiting:
            self._report_at(self._reported_s + HEARTBEAT_S)

    def _pull(self) -> None:
        if self._is_pulling:
            return
        num_waiting = len(self._incoming) + self._num_in_hand + self._stats.num_waiting
        cached_fraction = self._stats.cached_fraction
        credit = credit_for(
            self._lead, self._rows, num_waiting=num_waiting, cached_fraction=cached_fraction
        )
        if credit is not None:
            self._is_pulling = True
            self._clock.after(
                self._message_s, lambda: self._coordinator.pull(self.replica_id, credit)
            )

    @property
    def _lead(self) -> Lead:
        return Lead.of(
            self.engine.capacity(), min_tokens=self._min_tokens, num_leads=self._pace.num_leads
        )

    def _report_at(self, time_s: float) -> None:
        time_s = max(self._clock.now, time_s)
        if time_s >= self._report_due_s:
            return
        self._report_due_s = time_s

        def report() -> None:
            if self._report_due_s == time_s and not self.is_dead:
                self._report()

        self._clock.at(time_s, report)

    def _report(self) -> None:
        self._reported_s, self._report_due_s = self._clock.now, float("inf")
        rows, self._finished = self._finished, []
        stats, self._reported_waiting = self._stats, self._stats.num_waiting
        self.num_finished += len(rows)
        self._clock.after(
            self._message_s, lambda: self._coordinator.report(self.replica_id, rows, stats)
        )

    def _give(self, steal: Steal, answer: Callable[[list[int]], None]) -> None:
        unstarted = self.engine.drain()
        chosen = choose_rows(
            [self._all_rows.request(row) for row in unstarted],
            self._rows.groups,
            max_rows=steal.max_rows,
            max_cost=steal.max_cost,
        )
        given = {request.request_id for request in chosen}
        for row in given:
            self._rows.give_back(row)
        self.engine.add(row for row in unstarted if row not in given)
        self._answer(answer, [row for row in unstarted if row in given])

    def _answer(self, answer: Callable[[list[_T]], None], value: list[_T]) -> None:
        self._clock.after(self._message_s, lambda: None if self.is_dead else answer(value))

    def _note_busy(self, end_s: float) -> None:
        if self._run is None:
            return
        began = self._run.began
        if self.busy and self.busy[-1][1] == began:
            began = self.busy.pop()[0]
        self.busy.append((began, end_s))
