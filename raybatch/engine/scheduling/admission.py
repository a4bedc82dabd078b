"""Who may start now, so that running sequences seldom run out of KV memory; pure arithmetic.

What binds is not the memory in use now but its highest point: just before one of the running
sequences ends and gives its blocks back. A sequence may start if no such point, with it, is above
the pool.
"""

import math
from typing import NamedTuple

import numpy as np

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.shared_prompts import PromptFork, SharedPrompts
from raybatch.engine.sequences.table import EMPTY, Sequence, SequenceTable
from raybatch.policy.lengths import LengthDistribution, product_limit
from raybatch.records.arrays import Bools, Floats, Ints
from raybatch.records.types import Request, TokenLengths

# admission leaves the blocks free that running sequences will need within so many steps; sequences
# that start together grow together, so an average over many would not do
_MAX_SPARE_STEPS = 4
# a sequence comes back from host memory only where nobody has to yield within so many steps, so
# that a move there and back is spread over them
_RESUME_STEPS = 16


def expected_len(request: Request, max_len: int) -> int | None:
    """Return the tokens at which a sequence is likely to end; None where nothing is known."""
    sampling = request.sampling
    if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
        return max_len
    if request.expected_output_len is None:
        return None
    return min(len(request.prompt_token_ids) + request.expected_output_len, max_len)


class OutputLengths:
    """The distribution of output lengths, from outputs that ended and outputs still running.

    A running output counts as one that is longer than it is now, since those that end first are the
    short ones. What is longer than all that ended is taken to reach its upper bound. An engine that
    has seen none end begins with the lengths that come with its rows: a mean of each row in their
    place would hide the tail, and the tail is what memory runs out by.
    """

    def __init__(self, size: int = 512) -> None:
        self._ring: Ints = np.zeros(size, np.int64)
        self._num_noted = 0
        self._distribution = LengthDistribution(self._ring[:0], np.ones(1))

    def begin(self, lengths: TokenLengths) -> None:
        """Count lengths that are known from elsewhere as ended, unless one has ended here."""
        if not self._num_noted:
            for length in lengths:
                self.note(length)

    def note(self, length: int) -> None:
        self._ring[self._num_noted % len(self._ring)] = length
        self._num_noted += 1

    def update(self, running: Ints) -> None:
        """Estimate anew, with the tokens that running sequences have generated so far."""
        ended = np.sort(self._ring[: self._num_noted])
        num_longer = len(running) - np.searchsorted(np.sort(running), ended)
        num_at_risk = len(ended) - np.arange(len(ended)) + num_longer
        longer = product_limit(np.ones(len(ended)), num_at_risk)
        self._distribution = LengthDistribution(ended, longer)

    def expect(self, num_generated: Ints, max_generated: Ints) -> Floats:
        """Return the mean final length of outputs that have `num_generated` tokens now."""
        return self._distribution.expect(num_generated, max_generated)


class KVForecast:
    """Blocks in use over time, if each sequence ends when it is expected to.

    With sequences in order of their remaining steps r, longest first, the pool holds
    `shared + sum(sizes[:i]) + i * r[i - 1] / block_size` just before the i-th of them ends.

    The `shared` blocks are held until the end; `sizes` are those of each sequence now, alone and
    with fractions. A block is as many steps as it has tokens.
    """

    def __init__(self, shared: float, sizes: Floats, remaining: Floats, block_size: int) -> None:
        order = np.argsort(-remaining)
        self._shared = shared
        self._sizes, self._growth = sizes[order], remaining[order] / block_size
        self._block_size = block_size
        self._sum()

    def peak(self, size: float, remaining: float) -> float:
        """Return the highest point with one more sequence of this kind."""
        growth = remaining / self._block_size
        place = int(np.searchsorted(-self._growth, -growth, side="right"))
        before = float(self._sums[place - 1]) if place else 0.0
        its_peak = before + size + growth * (place + 1)
        # that of one that goes on longer is as it was
        others = self._peaks.copy()
        others[place:] += size + self._growth[place:]
        return self._shared + max(its_peak, float(others.max(initial=0.0)))

    def add(self, size: float, remaining: float, num_shared: int) -> None:
        """Count one more sequence in, and `num_shared` more shared blocks."""
        growth = remaining / self._block_size
        place = int(np.searchsorted(-self._growth, -growth, side="right"))
        self._growth = np.insert(self._growth, place, growth)
        self._sizes = np.insert(self._sizes, place, size)
        self._shared += num_shared
        self._sum()

    def _sum(self) -> None:
        self._sums = np.cumsum(self._sizes)
        self._peaks = self._sums + self._growth * np.arange(1, len(self._sums) + 1)


class Need(NamedTuple):
    """Blocks that are there for a sequence, and counts."""

    # blocks of its prefix that hold what it would compute, in order
    hits: list[int]
    # blocks of all its known tokens
    num_total: int
    # of the available blocks, how many it takes
    num_available: int
    # blocks that it uses together with others
    num_shared: int
    # of these, blocks that nobody uses yet
    num_new_shared: int
    # tokens behind the known ones before it takes one more block; infinite where it never does
    room: float
    # with which it starts, if there is one
    fork: PromptFork | None = None


class Admission:
    """Decides whether one more sequence may run, by its blocks and by a forecast.

    A step of less than `full_step_tokens` takes every one that memory has room for now.
    """

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockManager,
        shared: SharedPrompts,
        *,
        full_step_tokens: float,
    ) -> None:
        self.lengths = OutputLengths()
        self.spare_steps = min(_MAX_SPARE_STEPS, max(1, table.block_size // 4))
        self._resume_steps = min(_RESUME_STEPS, table.block_size)
        self._table, self._blocks, self._shared = table, blocks, shared
        self._full_step_tokens = full_step_tokens
        self._num_spare = 0
        # made where it is asked for
        self._forecast: KVForecast | None = None

    def begin_step(self) -> None:
        self._num_spare = self._table.num_needed_blocks(self.spare_steps)
        self._forecast = None

    def need(self, record: Sequence, fork: PromptFork | None) -> Need:
        """Return what a sequence takes; with a fork the blocks of its prompt, the last a copy."""
        if fork is not None:
            num_full, num_behind = divmod(record.num_tokens, self._blocks.block_size)
            # the last token is never fed back, so that one token alone is not written
            is_written = num_behind > 0 and record.max_len > record.num_tokens + 1
            return Need(
                hits=fork.blocks,
                num_total=len(fork.blocks),
                num_available=int(is_written),
                num_shared=num_full,
                num_new_shared=0,
                room=self._room(record, len(fork.blocks)),
                fork=fork,
            )
        hits = self._shared.find(record)
        num_total = -(-record.num_tokens // self._blocks.block_size)
        num_unused = self._blocks.num_unused(hits)
        num_shared = max(record.group.max_blocks if record.group else 0, len(hits))
        return Need(
            hits=hits,
            num_total=num_total,
            num_available=num_total - len(hits) + num_unused,
            num_shared=num_shared,
            num_new_shared=num_shared - len(hits) + num_unused,
            room=self._room(record, num_total),
        )

    def has_room(self, record: Sequence, need: Need) -> bool:
        """Return whether its blocks are there beside those that running sequences take soon."""
        reserve = 0
        if self._table.num_running:
            if record.swapped is None:
                reserve = self._num_spare + (need.room < self.spare_steps)
            else:
                reserve = self._table.num_needed_blocks(self._resume_steps)
                reserve += need.room < self._resume_steps
        return need.num_available + reserve <= self._blocks.num_available

    def accepts(self, record: Sequence, need: Need, *, step_tokens: int) -> bool:
        """Return whether `record` may start in a step that has `step_tokens` without it."""
        if step_tokens < self._full_step_tokens:
            return True
        peak = self._current().peak(*self._measure(record, need.num_shared))
        return peak + need.num_new_shared <= self._blocks.num_blocks

    def add(self, record: Sequence, need: Need) -> None:
        """Count in a sequence that starts."""
        self._num_spare += need.room < self.spare_steps
        if need.fork is not None:
            self._num_spare += need.num_available
        if self._forecast is not None:
            self._forecast.add(*self._measure(record, need.num_shared), need.num_new_shared)

    def _room(self, record: Sequence, num_blocks: int) -> float:
        block_size = self._blocks.block_size
        if record.max_blocks(block_size) <= num_blocks:
            return math.inf
        return num_blocks * block_size - record.num_tokens

    def _current(self) -> KVForecast:
        if self._forecast is not None:
            return self._forecast
        table = self._table
        slots = np.flatnonzero(table.phase != EMPTY)
        num_generated = table.num_tokens[slots] - table.num_prompt[slots]
        self.lengths.update(num_generated)
        num_own = table.num_blocks[slots] + table.num_reserved[slots] - table.num_shared[slots]
        num_taken = self._blocks.num_used + self._blocks.num_reserved
        # a last block is half empty on average
        sizes = table.num_tokens[slots] / table.block_size - table.num_shared[slots] + 0.5
        remaining = self._remaining(
            num_generated,
            table.max_len[slots] - table.num_prompt[slots],
            table.expected_len[slots] - table.num_prompt[slots],
            table.is_expected[slots],
        )
        shared = float(num_taken - num_own.sum())
        self._forecast = KVForecast(shared, sizes, remaining, table.block_size)
        return self._forecast

    def _measure(self, record: Sequence, num_shared: int) -> tuple[float, float]:
        """Return the size of a waiting sequence in blocks, and its remaining steps."""
        num_prompt = len(record.request.prompt_token_ids)
        remaining = self._remaining(
            np.array([len(record.token_ids)]),
            np.array([record.max_len - num_prompt]),
            np.array([(record.expected_len or record.max_len) - num_prompt]),
            np.array([record.expected_len is not None]),
        )
        return record.num_tokens / self._table.block_size - num_shared + 0.5, float(remaining[0])

    def _remaining(
        self, num_generated: Ints, max_generated: Ints, expected: Ints, is_expected: Bools
    ) -> Floats:
        final = self.lengths.expect(num_generated, max_generated)
        # one that outgrew its expectation is taken to go on for a while
        outgrown = np.minimum(num_generated + 1 + num_generated // 8, max_generated)
        final = np.where(is_expected, np.maximum(expected, outgrown), final)
        return np.maximum(final - num_generated, 1.0)
