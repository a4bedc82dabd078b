"""A simulated pool whose replicas each run one range of lengths, and hand over what outgrows it.

Rows begin in the stage of their prompt. Replicas, engines and moves are those of other simulated
pools; who gets a row is agreed between the traders of `raybatch_lab.stages`. With one stage, and
longest rows first, it is length-sorted admission without moves. No replica dies here.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from raybatch.actors.wire.records import Credit, Progress
from raybatch.errors import ConfigError
from raybatch.records.arrays import Floats, Ints
from raybatch.records.types import ReplicaStats
from raybatch_lab.simulator.clock import VirtualClock
from raybatch_lab.simulator.engine import EngineSpec, MovedSequence
from raybatch_lab.simulator.links import Link, LinkSpec
from raybatch_lab.simulator.replica import SimulatedReplica
from raybatch_lab.simulator.rows import SimulatedRows
from raybatch_lab.stages.messages import Deal, Message, TradeRules
from raybatch_lab.stages.plan import StagePlan, is_overloaded, next_stage, stage_for
from raybatch_lab.stages.quality import StepQuality
from raybatch_lab.stages.refinement import refine_bounds
from raybatch_lab.stages.trader import Trader


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedSpec:
    """Options of a simulated pool whose replicas form stages by the lengths of sequences.

    Args:
        by_final_len: a row runs in the stage of its expected final length, and does not move; a
            replica whose stage has no waiting rows takes rows of the stage with the most work.
        is_sorted: rows are handed out by expected final length, the longest first; else in order
            of arrival.
        arrivals_s: arrival time of each row, ascending; None if all arrive at the beginning.
        look_every_s: seconds between checks for rows that have outgrown their stage.
        refine_every_s: seconds between updates of the bounds of stages by the lengths of running
            rows; None keeps the bounds of the plan.
        quality: costs of steps, needed with `refine_every_s`.
        max_standing: largest number of moved rows that wait at a replica for a slot; while it has
            that many, no more rows move there.
        levels: overloaded replicas give rows to others of their stage, see `is_overloaded`.
        message_s: seconds of a message between replicas, or of a call of the coordinator.
        network: link of each replica, through which its sequences move to others.
        rules: timeouts of the messages by which rows move.
    """

    plan: StagePlan
    by_final_len: bool = False
    is_sorted: bool = True
    arrivals_s: Floats | None = None
    look_every_s: float = 0.25
    refine_every_s: float | None = None
    quality: StepQuality | None = None
    max_standing: int = 16
    levels: bool = True
    message_s: float = 0.001
    network: LinkSpec = field(default_factory=LinkSpec)
    rules: TradeRules = field(default_factory=TradeRules)

    def __post_init__(self) -> None:
        if self.refine_every_s is not None and self.quality is None:
            raise ConfigError(
                "refine_every_s needs step costs to refine the bounds of stages; set quality, or "
                "leave refine_every_s out"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedOutcome:
    """Results of a simulated run; times are simulated seconds from its beginning.

    Args:
        completion_s: time at which the last row was reported.
        ended_s: time at which each row was reported, [R].
        num_handed_over: moves of rows from one replica to another.
        num_messages: messages between replicas.
        bounds: lengths between stages at the end of the run, ascending.
        busy_s: seconds in which each replica computed, [E].
    """

    completion_s: float
    ended_s: Floats
    num_handed_over: int
    num_messages: int
    bounds: tuple[float, ...]
    busy_s: Floats


class _Waiting:
    """Rows of one stage that no replica has, and the tokens that they will come to."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self.work = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, row: int, rank: int, cost: int) -> None:
        heapq.heappush(self._heap, (rank, row))
        self.work += cost

    def take(self, costs: Ints) -> int:
        _, row = heapq.heappop(self._heap)
        self.work -= int(costs[row])
        return row


class StagedPool:
    """Simulates one run of a job on a pool with stages: `run` it."""

    def __init__(self, rows: SimulatedRows, engine: EngineSpec, spec: StagedSpec) -> None:
        self.clock = VirtualClock()
        self._rows, self._engine, self._spec = rows, engine, spec
        self._stage_of = spec.plan.stage_of_replica
        self._bounds: Floats = np.array(spec.plan.bounds, float)
        # in whose range a row begins
        self._first_len: Ints = rows.prompt + (rows.new_tokens if spec.by_final_len else 0)
        num_replicas = len(self._stage_of)
        of_stage = [self._rows_of(stage.up_to) for stage in spec.plan.stages[:-1]] + [rows]
        self.members = [
            SimulatedReplica(
                rank,
                rank,
                of_stage[stage],
                engine,
                self,
                self.clock,
                slowness=1.0,
                message_s=spec.message_s,
            )
            for rank, stage in enumerate(self._stage_of.tolist())
        ]
        self.traders = [Trader(rank, spec.rules) for rank in range(num_replicas)]
        self._networks = [Link(spec.network) for _ in range(num_replicas)]
        self._waiting = [_Waiting() for _ in spec.plan.stages]
        self._demand: dict[int, Credit] = {}
        # KV tokens that replicas hold, as they last said; and lengths of their rows
        self._loads: Floats = np.zeros(num_replicas)
        self._running: list[Ints] = [np.zeros(0, np.int64)] * num_replicas
        # tokens that rows of each replica will have come to
        self._work: Floats = np.zeros(num_replicas)
        self._cost: Ints = rows.prompt + rows.new_tokens
        # of rows that were offered: tokens whose KV goes ahead
        self._length: dict[int, int] = {}
        self._copying: set[Deal] = set()
        self._flying: dict[Deal, MovedSequence] = {}
        self._ended_s: Floats = np.full(len(rows), np.nan)
        self._num_left = len(rows)
        self._num_handed_over = self._num_messages = 0
        self._is_dispatching = False

    def run(self) -> StagedOutcome:
        """Run the job to its end; raise ConfigError if a row does not fit into the KV cache."""
        most = self._engine.cost.limits.kv_tokens
        if self._rows.longest_tokens > most:
            raise ConfigError(
                f"the longest row may have {self._rows.longest_tokens} tokens, but the KV cache of "
                f"the simulated engine holds {most}; use shorter rows or another cost model"
            )
        self._arrive_all()
        for member in self.members:
            member.start()
        self._every(self._spec.look_every_s, self._poll)
        if self._spec.refine_every_s is not None:
            self._every(self._spec.refine_every_s, self._refine)
        self.clock.run(lambda: not self._num_left)
        for member in self.members:
            member.close()
        return StagedOutcome(
            completion_s=self.clock.now,
            ended_s=self._ended_s,
            num_handed_over=self._num_handed_over,
            num_messages=self._num_messages,
            bounds=tuple(self._bounds.tolist()),
            busy_s=np.array([sum(b - a for a, b in member.busy) for member in self.members]),
        )

    def pull(self, replica_id: int, credit: Credit) -> None:
        self._demand[replica_id] = credit
        self._dispatch_soon()

    def report(self, replica_id: int, rows: Sequence[int], _: ReplicaStats) -> None:
        now = self.clock.now
        for row in rows:
            self._send(self.traders[replica_id].end(row, now))
        self._ended_s[list(rows)] = now
        self._work[replica_id] -= self._cost[list(rows)].sum()
        self._num_left -= len(rows)

    def _rows_of(self, up_to: int) -> SimulatedRows:
        """Return the rows as a stage sees them, which none of them leaves with more tokens."""
        rows = self._rows
        if self._spec.by_final_len:
            return rows
        expected = np.clip(up_to - rows.prompt, 1, rows.new_tokens)
        return replace(rows, expected=expected)

    def _arrive_all(self) -> None:
        arrivals_s = self._spec.arrivals_s
        if arrivals_s is None:
            self._arrive(range(len(self._rows)))
            return
        for row, at_s in enumerate(arrivals_s.tolist()):
            self.clock.at(at_s, partial(self._arrive, [row]))

    def _arrive(self, rows: Iterable[int]) -> None:
        for row in rows:
            stage = int(stage_for(self._bounds, self._first_len[row]))
            rank = -int(self._cost[row]) if self._spec.is_sorted else row
            self._waiting[stage].add(row, rank, int(self._cost[row]))
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        """Hand rows out once all that pull at this moment have done so."""
        if not self._is_dispatching:
            self._is_dispatching = True
            self.clock.after(0.0, self._dispatch)

    def _dispatch(self) -> None:
        """Give each row to the replica of its stage with the least to do of those that pull."""
        self._is_dispatching = False
        given: dict[int, list[int]] = {}
        for stage, waiting in enumerate(self._waiting):
            demand = [rank for rank in self._demand if self._stage_of[rank] == stage]
            self._deal(demand, waiting, given)
        if self._spec.by_final_len:
            for rank in sorted(self._demand.keys() - given.keys()):
                self._deal([rank], max(self._waiting, key=lambda line: line.work), given)
        for rank, rows in given.items():
            del self._demand[rank]
            for row in rows:
                self.traders[rank].add(row)
            submit = partial(self.members[rank].submit, rows, [])
            self.clock.after(self._spec.message_s, submit)

    def _deal(self, demand: list[int], waiting: _Waiting, given: dict[int, list[int]]) -> None:
        credit = {rank: [self._demand[rank].rows, self._demand[rank].tokens] for rank in demand}
        heap = [(float(self._work[rank]), rank) for rank in demand]
        heapq.heapify(heap)
        while heap and len(waiting):
            _, rank = heapq.heappop(heap)
            row = waiting.take(self._cost)
            given.setdefault(rank, []).append(row)
            self._work[rank] += self._cost[row]
            credit[rank][0] -= 1
            credit[rank][1] -= int(self._rows.prompt[row])
            if min(credit[rank]) > 0:
                heapq.heappush(heap, (float(self._work[rank]), rank))

    def _every(self, seconds: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.clock.after(seconds, again)

        self.clock.after(seconds, again)

    def _poll(self) -> None:
        for rank, member in enumerate(self.members):
            self._send(self.traders[rank].tick(self.clock.now))
            self._copy(rank)
            if not member.engine.is_idle():
                member.tell(partial(self._note_report, rank))
            else:
                self._note(rank, np.zeros(0, np.int64))

    def _note_report(self, rank: int, _: ReplicaStats, progress: Progress) -> None:
        """Offer the rows of a replica that have outgrown it, or one where it has too many."""
        lengths, ids = progress.rows.num_tokens, progress.rows.request_ids
        self._note(rank, lengths)
        if self._spec.by_final_len:
            return
        stage = int(self._stage_of[rank])
        stages = next_stage(self._bounds, lengths, np.full(len(lengths), stage))
        outgrown = np.flatnonzero(stages > stage)
        for place in outgrown[np.argsort(-lengths[outgrown], kind="stable")].tolist():
            to = self._with_credit(np.flatnonzero(self._stage_of == stages[place]))
            self._offer(rank, int(ids[place]), int(lengths[place]), to)
        if self._spec.levels and not len(outgrown):
            self._rebalance(rank, ids, lengths)

    def _rebalance(self, rank: int, ids: Ints, lengths: Ints) -> None:
        members = np.flatnonzero(self._stage_of == self._stage_of[rank])
        loads = self._loads[members]
        if not is_overloaded(loads)[members == rank].any():
            return
        surplus = self._loads[rank] - loads.mean()
        (fits,) = np.nonzero(lengths <= surplus)
        if len(fits):
            place = fits[lengths[fits].argmax()]
            to = self._with_credit(members[loads + lengths[place] <= self._loads[rank]])
            self._offer(rank, int(ids[place]), int(lengths[place]), to)

    def _offer(self, rank: int, row: int, length: int, to: list[int]) -> None:
        self._length[row] = length
        self._send(self.traders[rank].offer(row, length, to, self.clock.now))

    def _with_credit(self, ranks: Ints) -> list[int]:
        return [
            rank for rank in ranks.tolist() if self._num_standing(rank) < self._spec.max_standing
        ]

    def _num_standing(self, rank: int) -> int:
        waiting = self.members[rank].engine.scheduler.waiting()
        return self.traders[rank].num_won + sum(record.has_started for record in waiting)

    def _note(self, rank: int, lengths: Ints) -> None:
        self._running[rank], self._loads[rank] = lengths, lengths.sum()
        tokens_per_s = self._spec.network.bytes_per_s / max(1.0, self._engine.kv_bytes_per_token)
        self.traders[rank].note_load(float(self._loads[rank]), tokens_per_s)

    def _refine(self) -> None:
        quality = self._spec.quality
        assert quality is not None, "no quality model to refine bounds by"
        running = [
            [self._running[rank] for rank in np.flatnonzero(self._stage_of == stage)]
            for stage in range(len(self._waiting))
        ]
        self._bounds = refine_bounds(self._bounds, running, quality, self._engine.curve)

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._num_messages += 1
            self.clock.after(self._spec.message_s, partial(self._deliver, message))

    def _deliver(self, message: Message) -> None:
        rank, row = message.receiver, message.deal.row_id
        trader = self.traders[rank]
        was_owner = row in trader.epochs
        self._send(trader.receive(message, self.clock.now))
        if row in trader.epochs and not was_owner:
            self._num_handed_over += 1
            self._work[message.sender] -= self._cost[row]
            self._work[rank] += self._cost[row]
            self.members[rank].take_over(self._flying.pop(message.deal))
        self._copy(rank)

    def _copy(self, rank: int) -> None:
        """Let KV go ahead while the row decodes; it stops for the tokens that came meanwhile."""
        deal = self.traders[rank].copying
        if deal is None or deal in self._copying:
            return
        self._copying.add(deal)
        kv_bytes = self._length[deal.row_id] * self._engine.kv_bytes_per_token
        at_s = self._networks[rank].arrival(self.clock.now, kv_bytes)
        self.clock.at(at_s, partial(self._stop, rank, deal))

    def _stop(self, rank: int, deal: Deal) -> None:
        out = partial(self._left, rank, deal)
        self.members[rank].move_out(deal.row_id, with_kv=True, answer=out)

    def _left(self, rank: int, deal: Deal, moved: list[MovedSequence]) -> None:
        self._copying.discard(deal)
        trader, now = self.traders[rank], self.clock.now
        if moved:
            (self._flying[deal],) = moved
            self._send(trader.copied(deal, now))
        else:
            # it has ended meanwhile
            self._send(trader.withdraw(deal.row_id, now))
        self._copy(rank)
