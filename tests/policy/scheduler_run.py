"""The engine's scheduler without a model: rows of known lengths, and what its steps compute."""

from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.records.types import Request, Sampling

_MAX_STEPS = 20_000


@dataclass(kw_only=True)
class SchedulerRun:
    """Counts per step, and of the whole run."""

    decode_rows: list[int] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    num_ended: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0


def run_scheduler(prompts, outputs, limits, *, prefixes=None, groups=None):
    """Run rows until none is left; rows of a group begin with `prefixes` equal tokens."""
    num_rows = len(prompts)
    prefixes = [0] * num_rows if prefixes is None else prefixes
    groups = [None] * num_rows if groups is None else groups
    num_blocks = limits.kv_tokens // limits.block_size
    longest = max(p + o for p, o in zip(prompts, outputs, strict=True))
    table = SequenceTable(
        max_slots=limits.max_num_seqs,
        num_blocks=num_blocks,
        block_size=limits.block_size,
        max_model_len=longest,
    )
    scheduler = Scheduler(
        BlockManager(num_blocks, limits.block_size),
        table,
        max_batched_tokens=limits.max_batched_tokens or sum(prompts) + sum(outputs),
        enable_prefix_caching=True,
    )
    for row in range(num_rows):
        tokens = np.full(prompts[row], row + 1, np.int32)
        if groups[row] is not None:
            tokens[: prefixes[row]] = -1 - groups[row]
        request = Request(
            request_id=row,
            row_id=str(row),
            prompt_token_ids=tokens,
            sampling=Sampling(max_tokens=outputs[row]),
            group_id=groups[row],
            prefix_len=prefixes[row],
        )
        max_len = prompts[row] + outputs[row]
        scheduler.add(Sequence(request=request, sample_idx=0, arrival=row, max_len=max_len))
    return _run(scheduler)


def _run(scheduler):
    run, table = SchedulerRun(), scheduler.table
    while scheduler.num_waiting or table.num_running:
        schedule = scheduler.schedule()
        assert not schedule.ended, "a row fits no pool"
        slots = scheduler.advance(schedule)
        table.append_tokens(slots, np.zeros(len(slots), np.int64))
        done = slots[table.num_tokens[slots] >= table.max_len[slots]].tolist()
        for slot in done:
            scheduler.remove(slot)
        run.decode_rows.append(len(schedule.decode_slots))
        run.prefill_tokens.append(int(schedule.chunk_lens.sum()))
        run.num_ended.append(len(done))
        assert len(run.decode_rows) < _MAX_STEPS
    counters = scheduler.counters
    run.num_preemptions = counters.num_preemptions
    run.recomputed_tokens = counters.num_recomputed_tokens
    run.cached_tokens = counters.cached_tokens
    return run
