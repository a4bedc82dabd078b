"""Swaps the KV of preempted sequences to host memory where that is cheaper than recomputing it.

Moves are atomic: a failed one leaves the sequence unchanged, and its KV is recomputed. Both give
the same tokens, so the measured times that choose between them affect speed only.

With `host_kv_dtype`, KV that finds no exact block is kept in 8 bits. Exact and 8-bit blocks have
half of the memory each; otherwise exact copies would fill it. The choice then uses no measured
times, as rounding changes tokens.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.block_manager import BlockManager, SwappedKV
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.policy.cost.cost_model import (
    CostModel,
    EngineLimits,
    MeasuredStep,
    fit,
    prompt_pairs,
    recompute_time,
)
from raybatch.policy.cost.roofline import Roofline
from raybatch.records.arrays import Int32s, Ints

logger = logging.getLogger(__name__)

# errors of a copy when memory or the device runs out of resources
COPY_ERRORS = (RuntimeError, MemoryError, OSError)
# steps of each kind that costs are fitted to, and steps between two fits
_NUM_STEPS, _REFIT_STEPS = 128, 64
_FAILURE = "recomputing the KV of a sequence: a copy failed: %s"


class BlockCopies(Protocol):
    """Copies KV blocks between a device pool and a host pool; item i of the arrays is one copy."""

    num_host_blocks: int
    block_bytes: int

    def save_blocks(self, block_ids: Ints, host_ids: Ints) -> None: ...

    def load_blocks(self, host_ids: Ints, block_ids: Ints) -> None: ...


class LearnedRecovery:
    """Chooses between swapping and recomputing KV, by the measured step times of an engine."""

    def __init__(self, link: Roofline, limits: EngineLimits) -> None:
        self._link = link
        self._limits = limits
        # separate queues: decode steps would evict all measurements of prefill steps
        self._prefills: deque[MeasuredStep] = deque(maxlen=_NUM_STEPS)
        self._decodes: deque[MeasuredStep] = deque(maxlen=_NUM_STEPS)
        self._num_new = 0
        self._costs: CostModel | None = None

    def note(self, schedule: Schedule, table: SequenceTable, seconds: float) -> None:
        starts, lens = schedule.chunk_starts, schedule.chunk_lens
        step = MeasuredStep(
            seconds=seconds,
            tokens=schedule.num_tokens,
            rows=len(schedule.decode_slots),
            **prompt_pairs(lens, starts),
            context_reads=float(table.num_computed[schedule.decode_slots].sum()),
        )
        if np.isfinite(seconds) and seconds > 0:
            (self._prefills if len(lens) else self._decodes).append(step)
            self._num_new += 1

    def is_copy_quicker(self, *, num_bytes: int, num_tokens: int, num_shared_tokens: int) -> bool:
        """Return whether copying is at least as fast as recomputing; ties favour the copy.

        `num_bytes` counts both directions; the first `num_shared_tokens` will be cache hits.
        """
        if self._num_new >= _REFIT_STEPS or (self._costs is None and self._num_new):
            steps = [*self._prefills, *self._decodes]
            self._costs, self._num_new = fit(steps, self._limits), 0
        if self._costs is None:
            return True
        whole_s = recompute_time(self._costs, num_tokens)
        recompute_s = max(0.0, whole_s - recompute_time(self._costs, num_shared_tokens))
        return self._link.copy_s(num_bytes) <= recompute_s


@dataclass(kw_only=True, slots=True)
class SwapCounters:
    """Counters of KV copies, and of tokens whose KV was restored."""

    saved_bytes: int = 0
    loaded_bytes: int = 0
    num_tokens: int = 0
    # of these, tokens restored from 8 bits, and the sequences affected
    num_rounded_tokens: int = 0
    num_rounded_sequences: int = 0
    # tokens whose KV migrated from other engines
    num_migrated_kv_tokens: int = 0
    num_failures: int = 0


class _Tier(NamedTuple):
    copier: BlockCopies
    # of the host; without users that share them, and without hashes
    blocks: BlockManager


class SwapSpace:
    """Saves and restores the KV of preempted sequences; owns the host blocks.

    `Sequence.swapped` of a waiting sequence refers to its host blocks.

    Args:
        copier: copies between the pools; None disables swapping.
        choice: between copying and recomputing; None copies whenever there are free blocks.
        rounding: copies to the 8-bit pool when the exact one is full; None never rounds.
        write_blocks: writes migrated KV into blocks of the device.
    """

    def __init__(
        self,
        block_size: int,
        copier: BlockCopies | None = None,
        choice: LearnedRecovery | None = None,
        *,
        rounding: BlockCopies | None = None,
        write_blocks: Callable[[npt.NDArray[Any], Ints], None] = lambda *_: None,
    ) -> None:
        self.counters = SwapCounters()
        self.write_blocks = write_blocks
        self._block_size, self._choice = block_size, choice
        # key: whether the tier rounds
        self._tiers = {
            is_rounded: _Tier(tier, BlockManager(tier.num_host_blocks, block_size))
            for is_rounded, tier in ((False, copier), (True, rounding))
            if tier is not None
        }

    def save(
        self, record: Sequence, blocks: Int32s, *, num_shared: int, num_tokens: int, num_exact: int
    ) -> None:
        """Save the KV of a sequence that is about to lose its blocks, if that pays.

        Does nothing if the sequence has KV in host memory already. The first `num_shared` blocks
        are likely cache hits later; the KV of the first `num_exact` blocks was never rounded.
        """
        own = blocks[num_shared : -(-num_tokens // self._block_size)].astype(np.int64)
        is_rounded = next(
            (k for k, t in self._tiers.items() if len(own) <= t.blocks.num_available), None
        )
        if is_rounded is None or record.swapped is not None or not len(own):
            return
        tier = self._tiers[is_rounded]
        num_bytes = len(own) * tier.copier.block_bytes
        is_worth_it = self._choice is None or self._choice.is_copy_quicker(
            # both directions
            num_bytes=2 * num_bytes,
            num_tokens=num_tokens,
            num_shared_tokens=num_shared * self._block_size,
        )
        if not is_worth_it:
            return
        host_blocks = np.array(tier.blocks.allocate(len(own)), np.int32)
        try:
            tier.copier.save_blocks(own, host_blocks.astype(np.int64))
        except COPY_ERRORS as error:
            tier.blocks.release(host_blocks)
            self.counters.num_failures += 1
            logger.warning(_FAILURE, error)
            return
        record.swapped = SwappedKV(
            first_block=num_shared,
            host_blocks=host_blocks,
            num_tokens=num_tokens,
            is_rounded=is_rounded,
            num_exact=min(num_exact, num_shared) if is_rounded else num_exact,
        )
        self.counters.saved_bytes += num_bytes

    def load(self, record: Sequence, start: int, blocks: list[int]) -> bool:
        """Restore KV into `blocks` and free the host blocks; False if that fails.

        `start` is the index of the first of `blocks` in the sequence, not before the saved part.
        """
        kept = record.swapped
        assert kept is not None, "the sequence has no KV in host memory"
        first = start - kept.first_block
        places, num_tokens = slice(first, first + len(blocks)), kept.num_tokens
        num_tokens -= start * self._block_size
        try:
            if kept.rows is not None:
                self.write_blocks(kept.rows[places], np.array(blocks, np.int64))
            else:
                host_ids = kept.host_blocks[places].astype(np.int64)
                copier = self._tiers[kept.is_rounded].copier
                copier.load_blocks(host_ids, np.array(blocks, np.int64))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            logger.warning(_FAILURE, error)
            return False
        finally:
            self.drop(record)
        if kept.rows is not None:
            self.counters.num_migrated_kv_tokens += num_tokens
            return True
        self.counters.loaded_bytes += len(blocks) * copier.block_bytes
        self.counters.num_tokens += num_tokens
        if kept.is_rounded:
            self.counters.num_rounded_tokens += num_tokens
            self.counters.num_rounded_sequences += not record.was_rounded
            record.was_rounded = True
        return True

    def drop(self, record: Sequence) -> None:
        if record.swapped is not None:
            if record.swapped.rows is None:
                self._tiers[record.swapped.is_rounded].blocks.release(record.swapped.host_blocks)
            record.swapped = None

    def check(self, records: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless the used host blocks are those of `records`, all sequences."""
        kept = [record.swapped for record in records if record.swapped is not None]
        for is_rounded, tier in self._tiers.items():
            owned = [k.host_blocks for k in kept if k.rows is None and k.is_rounded == is_rounded]
            tier.blocks.check(owned)
        for swapped in kept:
            num_blocks = swapped.first_block + swapped.num_blocks
            if num_blocks != -(-swapped.num_tokens // self._block_size):
                raise RuntimeError(
                    "swap space is inconsistent: the host blocks of a sequence do not match the "
                    "number of its tokens"
                )
