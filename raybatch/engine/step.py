"""Components of a step: its size, its forward pass, its sampled tokens, and the counters."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import (
    BatchBuilder,
    LateTokens,
    logits_order,
    slots_with_logits,
)
from raybatch.engine.finish_rules import RowLimits
from raybatch.engine.forward.coroutine import (
    StepPart,
    WindowNumbers,
    is_connected,
    split_for_window,
)
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import max_sequence_len
from raybatch.engine.memory.pinned import DeviceQueue, PinnedBufferPool
from raybatch.engine.memory.swap import LearnedRecovery, SwapSpace
from raybatch.engine.sampling.sampler import Sampler, SampleResult
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import EMPTY, ENDING, SequenceTable
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.cost.roofline import link
from raybatch.policy.step_size import MAX_STEP_S, StepSize
from raybatch.records.arrays import Ints
from raybatch.records.types import ReplicaStats

# FLOP/s of a fast core, assumed before any step has run, and the initial step size
_CPU_FLOPS, _LEAST_STEP_TOKENS = 100e9, 512
# fields of `ReplicaStats` that are gauges, or counters of layers that outlive an engine
_OF_NOW = (
    "num_running",
    "num_waiting",
    "kv_used_fraction",
    "kv_tokens",
    "concurrency",
    "num_weight_copies",
    "weight_copy_bytes",
    "num_weight_stalls",
)


def make_scheduler(
    config: EngineConfig,
    runner: ModelRunner,
    blocks: BlockManager,
    table: SequenceTable,
    recovery: LearnedRecovery | None,
) -> Scheduler:
    swap = SwapSpace(
        table.block_size,
        runner.tiers,
        recovery,
        rounding=runner.rounded_tiers,
        write_blocks=runner.write_blocks,
    )
    return Scheduler(
        blocks,
        table,
        max_batched_tokens=config.token_budget,
        enable_prefix_caching=config.enable_prefix_caching,
        full_step_tokens=runner.full_step_tokens,
        swap=swap,
        copy_blocks=runner.copy_blocks,
        max_row_blocks=runner.num_window_blocks or None,
    )


def row_limits(runner: ModelRunner, config: EngineConfig) -> RowLimits:
    """Return the limits of one row; they include the option that raises the limit of KV."""
    num_blocks, option = runner.num_blocks, "engine.kv_cache_bytes"
    if runner.num_window_blocks:
        # one layer of a row's KV must fit into a window buffer
        option = "engine.host_kv_bytes"
        if runner.num_window_blocks < num_blocks:
            num_blocks, option = runner.num_window_blocks, "engine.kv_cache_bytes"
    return RowLimits(
        vocab_size=runner.spec.vocab_size,
        max_model_len=max_sequence_len(config, runner.spec.max_model_len),
        kv_tokens=num_blocks * config.block_size_tokens,
        kv_option=option,
    )


def learned_recovery(runner: ModelRunner, config: EngineConfig) -> LearnedRecovery | None:
    """Return a policy that learns whether to swap or to recompute the KV of preempted rows.

    It measures the copies between device and host while the runner is idle. None if there is no
    swap space. Also None with `host_kv_dtype`: which rows are rounded must not depend on measured
    times.
    """
    if not runner.tiers.num_host_blocks or config.host_kv_dtype != "auto":
        return None
    limits = EngineLimits(
        kv_tokens=runner.num_blocks * config.block_size_tokens,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size_tokens,
        max_batched_tokens=config.token_budget,
    )
    return LearnedRecovery(link(runner.tiers.copy_bytes_per_s()), limits)


def step_size(runner: ModelRunner, config: EngineConfig) -> StepSize | None:
    """Return the controller that adapts the tokens per step to the measured step times.

    None if steps are short anyway.

    Steps are short on a GPU and with small models. Also None with `host_kv_dtype`: which rows are
    rounded must not depend on measured times.
    """
    is_free = config.max_batched_tokens == config.host_kv_dtype == "auto"
    if runner.device.type != "cpu" or not is_free:
        return None
    seconds = config.token_budget * 2 * _products_of_token(runner.spec) / _CPU_FLOPS
    if seconds <= MAX_STEP_S:
        return None
    return StepSize(_LEAST_STEP_TOKENS, config.token_budget)


def _products_of_token(spec: ModelSpec) -> int:
    """Return the number of active weights per token, in the layers."""
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    ffn_dim = spec.ffn_dim if spec.moe is None else spec.moe.top_k * spec.moe.ffn_dim
    return spec.num_layers * spec.model_dim * (attention + 3 * ffn_dim)


def counted(scheduler: Scheduler, runner: ModelRunner, blocks: BlockManager) -> ReplicaStats:
    """Return the counters of scheduler and runner; those of the engine itself are left out."""
    swapped, graphs = scheduler.moves, runner.graph_counts
    weights, window = runner.weight_counters, runner.window_counters
    return ReplicaStats(
        num_waiting=scheduler.num_waiting,
        kv_used_fraction=scheduler.kv_used_fraction,
        **asdict(scheduler.counters),
        num_migrated_kv_tokens=swapped.num_migrated_kv_tokens + scheduler.arrivals.num_tokens,
        num_swapped_tokens=swapped.num_tokens,
        num_rounded_tokens=swapped.num_rounded_tokens,
        num_rounded_sequences=swapped.num_rounded_sequences,
        swapped_bytes=sum(
            counted.saved_bytes + counted.loaded_bytes for counted in (swapped, window)
        ),
        num_failed_copies=sum(counted.num_failures for counted in (swapped, weights, window)),
        num_weight_copies=weights.num_copies,
        weight_copy_bytes=weights.num_bytes,
        num_weight_stalls=weights.num_stalls,
        num_graphs=graphs.num_captured,
        num_graph_steps=graphs.num_steps,
        eager_steps=graphs.eager_steps,
        kv_tokens=blocks.num_blocks * blocks.block_size,
    )


def summed(past: ReplicaStats, now: ReplicaStats) -> ReplicaStats:
    """Return the sum of the counters of successive engines; gauges are those of `now`."""
    sums = {}
    for field in fields(ReplicaStats):
        before, value = getattr(past, field.name), getattr(now, field.name)
        if field.name in _OF_NOW or isinstance(value, str):
            continue
        if isinstance(value, int | float):
            sums[field.name] = before + value
        else:
            keys = {*before, *value}
            sums[field.name] = {key: before.get(key, 0) + value.get(key, 0) for key in keys}
    return replace(now, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnStep:
    """A step whose tokens are sampled, but not appended to the sequences yet."""

    schedule: Schedule
    slots: Ints  # of its rows with logits
    read: Callable[[], SampleResult]
    # tokens on the device, if the next step starts before they are read
    drawn: torch.Tensor | None = None


class StepTokens:
    """Samples the tokens of steps; the host reads them immediately, or while the next step runs.

    `queue` is the queue of a GPU whose tokens the host reads later; None: immediately. The tokens
    of at most one step are unread. Where the tokens of step 1 are:

        host, see `Engine._compute`              device
        schedule 1                               forward 1, draw 1
        advance 1, hold 1: they are unread       `drawn` of 1
        schedule 2                               forward 2 reads `drawn` of 1, draw 2
        `Engine._settle` takes 1: the table's    free
        advance 2, hold 2

    Step 2 is computed as if sequences end only by length, which the host knows (ENDING); rows of
    sequences that ended otherwise are dropped. `_row_of_slot` is the row of each slot with an
    unread token, else -1; `drop` clears it when the sequence leaves. Tokens are taken before
    `schedule` if a preemption is possible, and without a step if nothing is left to compute.
    """

    def __init__(self, sampler: Sampler, table: SequenceTable, queue: DeviceQueue | None) -> None:
        self._sampler = sampler
        self._table = table
        self._queue = queue
        # one is read while the next one is sampled
        self._pinned = None if queue is None else PinnedBufferPool(queue, 2)
        self._row_of_slot: Ints = np.full(len(table.records), -1, np.int64)
        self._step: DrawnStep | None = None

    @property
    def is_ahead(self) -> bool:
        """Return whether steps start before the tokens of the previous step are read."""
        return self._queue is not None

    @property
    def is_unread(self) -> bool:
        """Return whether a step's tokens are not read yet."""
        return self._step is not None and self._step.drawn is not None

    def late(self, slots: Ints) -> LateTokens | None:
        """Return the unread tokens for a step whose first rows are those of `slots`."""
        if self._step is None or self._step.drawn is None:
            return None
        places = self._row_of_slot[slots]
        rows = np.flatnonzero(places >= 0)
        return LateTokens(rows, places[rows], self._step.drawn)

    def num_generated(self, slots: Ints) -> Ints:
        """Return the number of tokens generated so far in each of `slots`, unread ones included."""
        table = self._table
        return table.num_tokens[slots] - table.num_prompt[slots] + (self._row_of_slot[slots] >= 0)

    def draw(
        self, schedule: Schedule, logits: torch.Tensor, slots: Ints, num_generated: Ints
    ) -> DrawnStep:
        if self._queue is None or self._pinned is None or not self._sampler.can_wait(slots):
            result = self._sampler.sample(logits, slots, num_generated)
            return DrawnStep(schedule=schedule, slots=slots, read=lambda: result)
        drawn = self._sampler.draw(logits, slots, num_generated)
        both = torch.stack((drawn.token_ids, drawn.is_finite.long()))
        staged = self._pinned.take_like(both)
        self._queue.copy(staged, both)
        arrived = self._pinned.mark()

        def read() -> SampleResult:
            arrived.synchronize()
            token_ids, is_finite = staged.numpy().copy()
            return SampleResult(token_ids=token_ids, is_finite=is_finite.astype(np.bool_))

        return DrawnStep(schedule=schedule, slots=slots, read=read, drawn=drawn.token_ids)

    def hold(self, step: DrawnStep) -> None:
        """Keep a step that the scheduler has advanced until `take` reads its tokens."""
        self._step = step
        if step.drawn is None:
            return
        table = self._table
        # skip rows of sequences that have already ended
        rows = np.flatnonzero(table.phase[step.slots] != EMPTY)
        slots = step.slots[rows]
        self._row_of_slot[slots] = rows
        table.phase[slots[table.num_tokens[slots] + 1 >= table.max_len[slots]]] = ENDING

    def take(self) -> tuple[Schedule, Ints, SampleResult] | None:
        """Read the tokens of the step given to `hold`; return its schedule, slots and tokens.

        Slots whose sequences have left meanwhile are dropped. None if there is no such step.
        """
        step, self._step = self._step, None
        if step is None:
            return None
        result = step.read()
        if step.drawn is None:
            return step.schedule, step.slots, result
        is_taken = self._row_of_slot[step.slots] == np.arange(len(step.slots))
        slots = step.slots[is_taken]
        self._row_of_slot[slots] = -1
        token_ids, is_finite = result.token_ids[is_taken], result.is_finite[is_taken]
        return step.schedule, slots, SampleResult(token_ids=token_ids, is_finite=is_finite)

    def drop(self, slot: int) -> None:
        """Forget the unread token of a sequence that leaves; it is sampled again later."""
        self._row_of_slot[slot] = -1


class StepForward:
    """Builds the batches of a step and runs the model on them."""

    def __init__(self, runner: ModelRunner, table: SequenceTable) -> None:
        self._runner = runner
        self._table = table
        self._builder = BatchBuilder(table, len(table.users.count), reads=runner.cascade)
        self._numbers = WindowNumbers(table) if runner.num_window_blocks else None
        # logits after prompts whose samples wait, by request
        self._prompt_logits: dict[int, torch.Tensor] = {}

    def run(
        self, schedule: Schedule, late: LateTokens | None, has_fork: Callable[[int], bool]
    ) -> tuple[torch.Tensor | None, Ints]:
        """Run the step; return its logits [S, V], None if no row has any, and the slot of each row.

        Samples that start from the prompt of another sample have rows as well. The logits of a
        prompt are kept while `has_fork` returns True for its request: samples still wait for them.
        """
        slots = slots_with_logits(schedule, self._table)
        logits = self._logits(schedule, late) if schedule.num_tokens else None
        for slot, request_id in schedule.opened:
            assert logits is not None, "a prompt ended without a forward pass"
            # a copy: the next step overwrites these logits
            self._prompt_logits[request_id] = logits[int((slots == slot).argmax())].clone()
        if schedule.forked:
            added = torch.stack([self._prompt_logits[i] for _, i in schedule.forked])
            logits = added if logits is None else torch.cat((logits, added))
            slots = np.concatenate((slots, [slot for slot, _ in schedule.forked]))
        self._prompt_logits = {i: row for i, row in self._prompt_logits.items() if has_fork(i)}
        return logits, slots

    def _logits(self, schedule: Schedule, late: LateTokens | None) -> torch.Tensor:
        if self._numbers is not None:
            return self._run_in_window(schedule, self._numbers)
        batch = self._builder.build(schedule)
        return self._runner.forward(batch if late is None else replace(batch, late=late))

    def _run_in_window(self, schedule: Schedule, numbers: WindowNumbers) -> torch.Tensor:
        num_blocks = self._runner.num_window_blocks
        parts = split_for_window(schedule, self._table, num_blocks=num_blocks)
        follows = len(parts) > 1 and is_connected(schedule, self._table)
        placed = [
            StepPart(*numbers.place(self._builder.build(part), part, follows_writer=follows))
            for part in parts
        ]
        logits = self._runner.forward_parts(placed)
        order = torch.from_numpy(logits_order(schedule, parts, self._table))
        return logits.index_select(0, order.to(logits.device))
