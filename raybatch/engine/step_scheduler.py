"""What the step loop needs from a scheduler, and which one an engine gets."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raybatch.config import EngineConfig
from raybatch.engine.memory.kv_checkpoints import CheckpointCounters
from raybatch.engine.memory.offload_store import OffloadStore
from raybatch.engine.memory.swap import RecoveryChoice, SwapCounters, SwapSpace
from raybatch.engine.protocols import Runner
from raybatch.engine.scheduling.offload_scheduler import OffloadScheduler
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.schedule import Schedule, SchedulerCounters
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.policy.boundary.records import BoundaryOptions

Int64s = npt.NDArray[np.int64]


class StepScheduler(Protocol):
    """Decides what each step computes, and owns the sequences of an engine."""

    @property
    def counters(self) -> SchedulerCounters:
        """Tokens and events since the start."""

    @property
    def moves(self) -> SwapCounters:
        """KV that was copied to host memory and back."""

    @property
    def ahead(self) -> CheckpointCounters:
        """KV that was copied to host memory ahead of a preemption."""

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""

    @property
    def kv_used_fraction(self) -> float:
        """Share of the memory in which KV lives that sequences hold."""

    @property
    def num_pinned(self) -> int:
        """Blocks held for prefix groups."""

    def add(self, record: Sequence) -> None:
        """Queue a sequence."""

    def waiting(self) -> list[Sequence]:
        """Return the sequences without a slot."""

    def withdraw(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take the waiting sequences that `is_wanted` accepts out, and return them by arrival."""

    def schedule(self, drafts: Mapping[int, list[int]]) -> Schedule:
        """Decide the next step."""

    def advance(self, schedule: Schedule) -> Int64s:
        """Note that `schedule` is computed, and return the slots of its logits, in row order."""

    def finish(self, slot: int) -> Sequence:
        """Take out a running sequence that has ended by itself."""

    def remove(self, slot: int) -> Sequence:
        """Take a running sequence out for good."""

    def discard(self, slot: int) -> tuple[Sequence, Int64s]:
        """Take a sequence with broken KV out; return also the blocks to be cleared."""

    def restart(self, slot: int) -> tuple[Sequence, Int64s]:
        """Let a sequence be computed again; return also the blocks to be cleared."""

    def check(self) -> None:
        """Raise RuntimeError if the books are inconsistent."""


def make_scheduler(
    config: EngineConfig,
    runner: Runner,
    blocks: BlockManager,
    table: SequenceTable,
    recovery: RecoveryChoice | None,
) -> StepScheduler:
    """Return the scheduler that the options ask for.

    Args:
        config: options of the engine.
        runner: copies between the pools.
        blocks: the device pool's books.
        table: running sequences.
        recovery: how preempted sequences get their KV back.
    """
    if config.kv_offload:
        return OffloadScheduler(
            blocks,
            table,
            OffloadStore(table.block_size, runner, has_cache=config.enable_prefix_caching),
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
    swap = SwapSpace(table.block_size, runner, recovery, has_checkpoints=checkpoint_blocks > 0)
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
