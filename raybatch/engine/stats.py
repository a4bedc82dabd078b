"""Counters of an engine's parts, under the names that all backends share."""

from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.records.types import ReplicaStats


def counted(scheduler: Scheduler, runner: ModelRunner, blocks: BlockManager) -> ReplicaStats:
    """Return what scheduler and runner have counted; the engine's own counts are missing."""
    counters, swapped = scheduler.counters, scheduler.moves
    weights, window = runner.weight_counters, runner.window_counters
    graphs = runner.graph_counts
    return ReplicaStats(
        num_waiting=scheduler.num_waiting,
        kv_used_fraction=scheduler.kv_used_fraction,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        num_preemptions=counters.num_preemptions,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_carried_tokens=swapped.num_carried_tokens,
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
        num_held_steps=counters.num_held_steps,
        num_copied_blocks=counters.num_copied_blocks,
        num_drafted_tokens=counters.num_drafted_tokens,
        num_graphs=graphs.num_captured,
        num_graph_steps=graphs.num_steps,
        eager_steps=graphs.eager_steps,
        kv_tokens=blocks.num_blocks * blocks.block_size,
    )
