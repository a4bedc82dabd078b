"""Keeps the KV of preempted sequences in host memory where that is cheaper than computing it again.

A move is whole or it did not happen: one that fails leaves the sequence as if it had never been
tried, and its tokens are computed again. Both ways lead to the same tokens, so the measured times
that choose between them decide about nothing but time.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raybatch.engine.memory.kv_cache import COPY_ERRORS
from raybatch.engine.memory.kv_tiers import KVTiers
from raybatch.engine.sequences.block_manager import HostBlocks, SwappedKV
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.policy.cost.cost_model import (
    CostModel,
    EngineLimits,
    MeasuredStep,
    fit,
    is_copy_quicker,
    prompt_pairs,
    recompute_time,
)
from raybatch.policy.cost.roofline import Roofline
from raybatch.records.arrays import Int32s, Ints

logger = logging.getLogger(__name__)


# steps of each kind that costs are fitted to, and steps after which they are fitted afresh
_NUM_STEPS, _REFIT_STEPS = 128, 64
_FAILURE = "KV of a sequence is computed again, because a copy failed: %s"


class LearnedRecovery:
    """Chooses how a preempted sequence gets its KV back, by what steps of an engine cost."""

    def __init__(self, link: Roofline, limits: EngineLimits) -> None:
        self._link = link
        self._limits = limits
        # kept apart, because long decoding would push out all measurements of prompts
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
        """Return whether copying takes no longer than computing.

        `num_bytes` go there and back; the first `num_shared_tokens` will be found again.
        """
        if self._num_new >= _REFIT_STEPS or (self._costs is None and self._num_new):
            steps = [*self._prefills, *self._decodes]
            self._costs, self._num_new = fit(steps, self._limits), 0
        if self._costs is None:
            return True
        whole_s = recompute_time(self._costs, num_tokens)
        recompute_s = max(0.0, whole_s - recompute_time(self._costs, num_shared_tokens))
        return is_copy_quicker(kv_bytes=num_bytes, link=self._link, recompute_s=recompute_s)


@dataclass(kw_only=True, slots=True)
class SwapCounters:
    """Moves since the start, and tokens whose KV was restored."""

    saved_bytes: int = 0
    loaded_bytes: int = 0
    num_tokens: int = 0
    # tokens whose KV came with sequences from other engines
    num_carried_tokens: int = 0
    num_failures: int = 0


class SwapSpace:
    """Owns the host's blocks; a sequence that waits with some has them in `Sequence.swapped`.

    Args:
        copier: with the pools; None has no host memory.
        choice: between copying and computing; None copies whatever there is room for.
        write_blocks: puts KV that came with a sequence into blocks where it runs.
    """

    def __init__(
        self,
        block_size: int,
        copier: KVTiers | None = None,
        choice: LearnedRecovery | None = None,
        *,
        write_blocks: Callable[[npt.NDArray[Any], Ints], None] = lambda *_: None,
    ) -> None:
        self.counters = SwapCounters()
        self._write_blocks = write_blocks
        self.blocks = HostBlocks(copier.num_host_blocks if copier else 0)
        self._block_size, self._copier, self._choice = block_size, copier, choice

    def save(self, record: Sequence, blocks: Int32s, *, num_shared: int, num_tokens: int) -> None:
        """Keep the KV of a sequence that is about to lose its blocks, if that pays.

        A sequence that has something in host memory keeps that; its first `num_shared` blocks are
        likely to be found again.
        """
        own = blocks[num_shared : -(-num_tokens // self._block_size)].astype(np.int64)
        if self._copier is None or record.swapped is not None or not len(own):
            return
        num_bytes = len(own) * self._copier.block_bytes
        is_worth_it = self._choice is None or self._choice.is_copy_quicker(
            # there and back
            num_bytes=2 * num_bytes,
            num_tokens=num_tokens,
            num_shared_tokens=num_shared * self._block_size,
        )
        if not is_worth_it or len(own) > self.blocks.num_available:
            return
        host_blocks = np.array(self.blocks.allocate(len(own)), np.int32)
        try:
            self._copier.save_blocks(own, host_blocks.astype(np.int64))
        except COPY_ERRORS as error:
            self.blocks.release(host_blocks)
            self.counters.num_failures += 1
            logger.warning(_FAILURE, error)
            return
        record.swapped = SwappedKV(
            first_block=num_shared, host_blocks=host_blocks, num_tokens=num_tokens
        )
        self.counters.saved_bytes += num_bytes

    def load(self, record: Sequence, start: int, blocks: list[int]) -> bool:
        """Bring KV back into `blocks`; False if that fails.

        The host's blocks are given up. `start` is the place of the first of `blocks` in the
        sequence, not before what the host has.
        """
        kept, copier = record.swapped, self._copier
        assert kept is not None, "a sequence without anything in host memory"
        assert copier is not None, "host blocks without a host"
        first = start - kept.first_block
        places, num_tokens = slice(first, first + len(blocks)), kept.num_tokens
        num_tokens -= start * self._block_size
        try:
            if kept.rows is not None:
                self._write_blocks(kept.rows[places], np.array(blocks, np.int64))
            else:
                host_ids = kept.host_blocks[places].astype(np.int64)
                copier.load_blocks(host_ids, np.array(blocks, np.int64))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            logger.warning(_FAILURE, error)
            return False
        finally:
            self.drop(record)
        if kept.rows is not None:
            self.counters.num_carried_tokens += num_tokens
            return True
        self.counters.loaded_bytes += len(blocks) * copier.block_bytes
        self.counters.num_tokens += num_tokens
        return True

    def drop(self, record: Sequence) -> None:
        if record.swapped is not None:
            self.blocks.release(record.swapped.host_blocks)
            record.swapped = None

    def check(self, records: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless these, all there are, hold the host's used blocks."""
        kept = [record.swapped for record in records if record.swapped is not None]
        self.blocks.check([swapped.host_blocks for swapped in kept])
        for swapped in kept:
            num_blocks = swapped.first_block + swapped.num_blocks
            if num_blocks != -(-swapped.num_tokens // self._block_size):
                raise RuntimeError("swap space: host blocks do not end where the tokens do")
