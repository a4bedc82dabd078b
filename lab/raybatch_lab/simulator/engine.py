"""A simulated engine: schedules like a real one, and prices steps instead of computing them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.row_states import ALONE
from raybatch.engine.scheduling.admission import expected_len
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences import table as sequences
from raybatch.engine.sequences.block_manager import BlockManager, SwappedKV
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import EMPTY, SequenceTable, TokenArray
from raybatch.policy.cost.cost_model import CostModel, MeasuredStep
from raybatch.records.arrays import Floats, Ints
from raybatch.records.types import Capacity, ReplicaStats, TokenIds
from raybatch_lab.simulator.quiet_steps import count_quiet_steps, run_quiet_steps
from raybatch_lab.simulator.rows import SimulatedRows
from raybatch_lab.simulator.step_counts import count_step, decode_reads
from raybatch_lab.simulator.vllm_scheduler import VllmScheduler
from raybatch_lab.stages.heterogeneity import FLAT, MixCurve, variation


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What all simulated engines of a pool have in common.

    Args:
        cost: seconds of a step by its contents, and the limits of a batch.
        full_step_tokens: see `raybatch.policy.cost.layers.full_step_tokens`.
        kv_bytes_per_token: bytes to transfer per token when a sequence moves with its KV.
        is_vllm: engines schedule as vLLM does, see `VllmScheduler`.
        curve: how much longer attention takes for a batch of unequal lengths.
        tp_ratios: by number of ranks, step time of a TP group relative to that of its driver
            alone; empty where engines form none.
        tp_switch_s: seconds to form a TP group, and again to end it, in which its driver pauses.
    """

    cost: CostModel
    full_step_tokens: float = math.inf
    is_vllm: bool = False
    enable_prefix_caching: bool = True
    kv_bytes_per_token: float = 0.0
    curve: MixCurve = FLAT
    tp_ratios: Mapping[int, float] = field(default_factory=dict)
    tp_switch_s: float = 0.0

    @property
    def token_budget(self) -> int:
        limits = self.cost.limits
        return limits.max_batched_tokens or limits.kv_tokens


class MovedSequence(NamedTuple):
    """A running sequence that moves from one engine to another.

    Args:
        num_generated: tokens generated so far.
        num_kv_tokens: tokens whose KV moves along; 0 if all KV is recomputed at the target.
    """

    row: int
    num_generated: int
    num_kv_tokens: int = 0


class CountedTokens(TokenArray):
    """A store of generated tokens that keeps none: every token reads as 0.

    A simulation needs only their number, which the caller knows.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def begin(self, slot: int, token_ids: TokenIds, max_tokens: int) -> None:
        del slot, token_ids, max_tokens

    def append(self, slots: Ints, places: Ints, token_ids: Ints) -> None:
        del slots, places, token_ids

    def between(self, slot: int, start: int, stop: int) -> TokenIds:
        del slot
        return np.broadcast_to(np.int32(0), (max(0, stop - start),))


class SimulatedEngine:
    """Simulates `raybatch.engine.engine.Engine` with the same scheduler, table and blocks.

    Call `begin` to decide steps and `compute` to do them. Rows have one sample each, and generate
    the output lengths in `rows`. A `slowness` of 2 doubles the seconds of each step.
    """

    def __init__(self, rows: SimulatedRows, spec: EngineSpec, *, slowness: float = 1.0) -> None:
        limits = spec.cost.limits
        num_blocks = limits.kv_tokens // limits.block_size
        max_slots = min(limits.max_num_seqs, spec.token_budget)
        self.table = SequenceTable(
            max_slots=max_slots,
            num_blocks=num_blocks,
            block_size=limits.block_size,
            max_model_len=rows.longest_tokens,
            generated=CountedTokens(),
        )
        make = VllmScheduler if spec.is_vllm else Scheduler
        self.scheduler = make(
            BlockManager(num_blocks, limits.block_size),
            self.table,
            max_batched_tokens=spec.token_budget,
            enable_prefix_caching=spec.enable_prefix_caching,
            full_step_tokens=spec.full_step_tokens,
        )
        self._rows, self._spec, self._slowness = rows, spec, slowness
        # factor on the seconds of its steps now; and seconds before the next one
        self._slowdown, self._pause_s = 1.0, 0.0
        self._end_len: Ints = np.zeros(max_slots, np.int64)
        self._group: Ints = np.full(max_slots, ALONE, np.int64)
        self._num_arrivals = self.num_steps = self.num_generated = 0
        self._engine_s = 0.0
        # when the steps end that `begin` decided, without a pause before them
        self._ends: Floats = np.zeros(0)
        # of the first step that `begin` decided last; seconds are 0
        self.counts = MeasuredStep(seconds=0.0, tokens=0.0, rows=0.0)
        # a step that is scheduled and not computed yet, None where the next ones are quiet
        self._schedule: Schedule | None = None

    def capacity(self) -> Capacity:
        limits = self._spec.cost.limits
        return Capacity(
            kv_tokens=limits.kv_tokens,
            max_model_len=self._rows.longest_tokens,
            max_num_seqs=len(self.table.records),
            block_size=limits.block_size,
            max_batched_tokens=limits.max_batched_tokens,
            kv_token_bytes=round(self._spec.kv_bytes_per_token),
            tp_sizes=tuple(sorted(self._spec.tp_ratios)),
        )

    def stats(self) -> ReplicaStats:
        """Return the counters of the engine."""
        counters = self.scheduler.counters
        return ReplicaStats(
            num_running=self.table.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_steps=self.num_steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=self.num_generated,
            num_preemptions=counters.num_preemptions,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_chunk_tokens=counters.num_chunk_tokens,
            num_migrated_kv_tokens=self.scheduler.moves.num_migrated_kv_tokens,
            engine_s=self._engine_s,
            kv_used_fraction=self.scheduler.kv_used_fraction,
        )

    def set_slowdown(self, slowdown: float, pause_s: float) -> None:
        """Multiply the seconds of all further steps by `slowdown`, until the next call.

        If the engine has rows, the next step starts `pause_s` seconds later.
        """
        self._slowdown = slowdown
        if not self.is_idle():
            self._pause_s += pause_s

    def is_idle(self) -> bool:
        return not self.scheduler.num_waiting and not self.table.num_running

    def add(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._queue(MovedSequence(row, 0), has_started=False)

    def restore(self, moved: Iterable[MovedSequence]) -> None:
        """Queue sequences that ran on other engines; they resume before unstarted rows start."""
        for sequence in moved:
            self._queue(sequence, has_started=True)

    def drain(self) -> list[int]:
        """Remove and return unstarted rows, in order of submission."""
        taken = self.scheduler.withdraw(lambda record: not record.has_started)
        return [record.request.request_id for record in taken]

    def checkpoint(self, min_new_tokens: int) -> list[MovedSequence]:
        """Return the running sequences with at least `min_new_tokens` tokens since the last call.

        They keep running.
        """
        states = self.table.checkpoint(min_new_tokens)
        return [MovedSequence(s.request.request_id, len(s.token_ids)) for s in states]

    def export(self, rows: Sequence[int], *, with_kv: bool) -> list[MovedSequence]:
        """Remove and return the unfinished sequences of `rows`, in order of arrival.

        `with_kv` keeps their KV. To be called between two steps.
        """
        wanted = set(rows)
        places = self.scheduler.kv_places(wanted) if with_kv else {}
        records = self.scheduler.withdraw(lambda record: record.request.request_id in wanted)
        for slot in np.flatnonzero(self.table.phase != EMPTY).tolist():
            if self.table.record(slot).request.request_id in wanted:
                records.append(self.scheduler.remove(slot))
        records.sort(key=lambda record: record.arrival)
        moved = []
        for record in records:
            place = places.get(record.arrival)
            num_kv_tokens = 0 if place is None else place.num_tokens
            row = record.request.request_id
            moved.append(MovedSequence(row, len(record.token_ids), num_kv_tokens))
        return moved

    def recompute(self) -> None:
        """Drop the KV of all running sequences, and queue them to recompute it."""
        slots = np.flatnonzero(self.table.phase != EMPTY).tolist()
        rows = [self.table.record(slot).request.request_id for slot in slots]
        self.restore(self.export(rows, with_kv=False))

    def begin(self) -> Floats:
        """Decide the next steps; return the end of each, in seconds from now, [N].

        N is above 1 if the engine only decodes the same sequences in these steps; `compute` does
        the first ones, any number. N is 0 if the engine has no rows.
        """
        if self.is_idle():
            return np.zeros(0)
        table, cost = self.table, self._spec.cost
        slots = np.flatnonzero(table.phase != EMPTY)
        left = int((self._end_len[slots] - table.num_tokens[slots]).min(initial=1 << 30))
        num_quiet = count_quiet_steps(self.scheduler, left) if len(slots) else 0
        if num_quiet:
            self.counts = _count_decodes(table, slots, self._group)
            # each row reads one token more with every step
            steps = np.arange(num_quiet)
            more_s = cost.context_s * len(slots) * steps + self._mix_seconds(slots, steps)
            return self._timed(cost.predict(self.counts) + more_s)
        self._schedule = schedule = self.scheduler.schedule()
        for slot in schedule.admitted:
            row = table.record(slot).request.request_id
            self._end_len[slot] = self._rows.prompt[row] + self._rows.output[row]
            # each row of vLLM reads its shared tokens itself
            self._group[slot] = ALONE if self._spec.is_vllm else self._rows.group[row]
        self.counts = count_step(table, schedule, self._group)
        seconds = cost.predict(self.counts) if schedule.num_tokens else 0.0
        mix_s = self._mix_seconds(schedule.decode_slots, np.zeros(1))
        return self._timed(seconds + mix_s)

    def _timed(self, seconds: npt.ArrayLike) -> Floats:
        """Note when steps end that would take so long alone on a usual device."""
        self._ends = np.cumsum(self._slowness * self._slowdown * np.asarray(seconds, float))
        # a pause is no step
        ends, self._pause_s = self._pause_s + self._ends, 0.0
        return ends

    def compute(self, num_steps: int) -> list[int]:
        """Do the first `num_steps` steps that `begin` decided; return the rows that finished."""
        table, schedule = self.table, self._schedule
        self._schedule = None
        if schedule is None:
            slots = run_quiet_steps(self.scheduler, num_steps)
        else:
            slots = self.scheduler.advance(schedule)
        self.num_steps += num_steps
        self._engine_s += float(self._ends[num_steps - 1])
        self.num_generated += num_steps * len(slots)
        table.count_tokens(slots, num_steps)
        ended = [] if schedule is None else [r.request.request_id for r in schedule.ended]
        for slot in slots[table.num_tokens[slots] >= self._end_len[slots]].tolist():
            ended.append(self.scheduler.finish(slot).request.request_id)
        return ended

    def _mix_seconds(self, slots: Ints, steps: Floats | Ints) -> Floats:
        """Return what unlike lengths add to steps from here on, by their numbers from 0, [N]."""
        if self._spec.curve is FLAT or not len(slots):
            return np.zeros(len(steps))
        lens = self.table.num_tokens[slots].astype(float)
        num_rows, total, squares = np.full(len(steps), len(lens)), lens.sum(), (lens**2).sum()
        totals = total + num_rows * steps
        mix = variation(num_rows, totals, squares + 2 * total * steps + num_rows * steps**2)
        # shared tokens are read once, whatever the mix
        reads = self.counts.context_reads + num_rows * steps
        more_s: Floats = self._spec.cost.context_s * (self._spec.curve.at(mix) - 1.0) * reads
        return more_s

    def _queue(self, moved: MovedSequence, *, has_started: bool) -> None:
        request = self._rows.request(moved.row)
        num_prompt = len(request.prompt_token_ids)
        max_len = num_prompt + request.sampling.max_tokens
        num_computed = moved.num_kv_tokens or num_prompt + moved.num_generated
        self._num_arrivals += 1
        self.scheduler.add(
            sequences.Sequence(
                request=request,
                sample_idx=0,
                arrival=self._num_arrivals,
                max_len=max_len,
                expected_len=expected_len(request, max_len),
                token_ids=CountedTokens().between(0, 0, moved.num_generated),
                num_computed_before=num_computed if has_started else 0,
                has_started=has_started,
                swapped=self._carried(moved.num_kv_tokens),
                num_reported=moved.num_generated,
            )
        )

    def _carried(self, num_kv_tokens: int) -> SwappedKV | None:
        if not num_kv_tokens:
            return None
        num_blocks = -(-num_kv_tokens // self.table.block_size)
        return SwappedKV(
            first_block=0,
            host_blocks=np.empty(0, np.int32),
            num_tokens=num_kv_tokens,
            rows=np.empty((num_blocks, 0)),
        )


def _count_decodes(table: SequenceTable, slots: Ints, group_of: Ints) -> MeasuredStep:
    reads = decode_reads(table, slots, group_of)
    return MeasuredStep(seconds=0.0, tokens=len(slots), rows=len(slots), **reads)


def alone_seconds(rows: SimulatedRows, spec: EngineSpec) -> float:
    """Return the simulated seconds of one engine for all rows, submitted together."""
    engine, seconds = SimulatedEngine(rows, spec), 0.0
    engine.add(range(len(rows)))
    while len(ends := engine.begin()):
        engine.compute(len(ends))
        seconds += float(ends[-1])
    return seconds
