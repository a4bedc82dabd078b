"""What a step is made of: the scheduler that decides it, and the forward pass that runs it."""

import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import BatchBuilder, logits_order, split_schedule
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.offload_store import OffloadStore
from raybatch.engine.memory.swap import LearnedRecovery, SwapSpace
from raybatch.engine.scheduling.offload_scheduler import OffloadScheduler
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.policy.boundary.records import BoundaryOptions
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.cost.roofline import link


def make_scheduler(
    config: EngineConfig,
    runner: ModelRunner,
    blocks: BlockManager,
    table: SequenceTable,
    recovery: LearnedRecovery | None,
) -> Scheduler | OffloadScheduler:
    if config.kv_offload:
        return OffloadScheduler(
            blocks,
            table,
            OffloadStore(table.block_size, runner.tiers, has_cache=config.enable_prefix_caching),
            num_window_blocks=runner.num_window_blocks,
            max_batched_tokens=config.max_batched_tokens,
            options=BoundaryOptions(
                initial=config.offload_initial_blocks,
                extension=config.offload_extension_blocks,
                interval=config.offload_interval_blocks,
                victims=config.offload_victims,
            ),
        )
    checkpoint_blocks = config.kv_checkpoint_blocks or 0
    swap = SwapSpace(
        table.block_size, runner.tiers, recovery, has_checkpoints=checkpoint_blocks > 0
    )
    return Scheduler(
        blocks,
        table,
        max_batched_tokens=config.max_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        admission=config.admission,
        kv_admission_fraction=config.kv_admission_fraction,
        swap=swap,
        checkpoint_blocks=checkpoint_blocks,
    )


def learned_recovery(runner: ModelRunner, config: EngineConfig) -> LearnedRecovery | None:
    """Measure the copies of an idle runner; None where there is no host memory for KV."""
    if not runner.tiers.num_host_blocks:
        return None
    limits = EngineLimits(
        kv_tokens=runner.num_blocks * config.block_size_tokens,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size_tokens,
        max_batched_tokens=config.max_batched_tokens,
    )
    return LearnedRecovery(link(runner.tiers.copy_bytes_per_s()), limits)


class StepForward:
    """Builds the batches of a step and hands them to the model."""

    def __init__(self, runner: ModelRunner, table: SequenceTable) -> None:
        self._runner = runner
        self._table = table
        self._builder = BatchBuilder(table, len(table.users.count), runner.device)
        self._max_tokens = runner.attn_batch_tokens

    def run(self, schedule: Schedule) -> torch.Tensor:
        if schedule.moves is not None:
            return self._runner.forward_offloaded(self._builder.build(schedule), schedule.moves)
        if self._max_tokens is None:
            return self._runner.forward(self._builder.build(schedule))
        parts = split_schedule(schedule, self._table, self._max_tokens)
        logits = self._runner.forward_parts([self._builder.build(part) for part in parts])
        order = torch.from_numpy(logits_order(schedule, parts, self._table))
        return logits.index_select(0, order.to(logits.device))
