"""The waiting queue, and admission from it by a forecast of KV memory; pure arithmetic.

The limit applies not to the memory in use now but to its forecast peaks: just before a running
sequence ends and frees its blocks. A sequence may start if no peak that includes it exceeds the
pool, so preemptions are rare.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.shared_prompts import PromptFork, SharedPrompts
from raybatch.engine.sequences.table import EMPTY, PrefixGroup, Sequence, SequenceTable
from raybatch.policy.lengths import LengthDistribution, product_limit
from raybatch.records.arrays import Bools, Floats, Ints
from raybatch.records.types import Request, TokenLengths


class WaitingQueue:
    """The sequences that wait, in three queues: one is served when those before it are empty.

    resumed: sequences that ran before, here or elsewhere; in order of arrival
    ready:   members of groups that have started, to shorten the life of a prefix
    fresh:   all others in order of arrival, a group at the place of its first member
    """

    def __init__(self) -> None:
        self._resumed: list[tuple[int, Sequence]] = []
        self._ready: deque[PrefixGroup] = deque()
        self._fresh: deque[Sequence | PrefixGroup] = deque()
        self._members: dict[int, deque[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in their current order of admission."""
        for _, record in sorted(self._resumed, key=itemgetter(0)):
            yield record
        for unit in (*self._ready, *self._fresh):
            yield from self._rows(unit)

    def add(self, record: Sequence) -> None:
        """Add a sequence to its queue; group members stay together."""
        self._count += 1
        group = record.group
        if record.has_started:
            heapq.heappush(self._resumed, (record.arrival, record))
            return
        if group is None:
            self._fresh.append(record)
        elif group.group_id in self._members:
            self._members[group.group_id].append(record)
        else:
            self._members[group.group_id] = deque([record])
            (self._ready if group.has_started else self._fresh).append(group)

    def peek(self) -> Sequence:
        if self._resumed:
            return self._resumed[0][1]
        return self._rows(self._next_unit())[0]

    def pop(self) -> Sequence:
        """Remove the next sequence; the group of a fresh one becomes ready."""
        self._count -= 1
        if self._resumed:
            return heapq.heappop(self._resumed)[1]
        unit = self._next_unit()
        (self._ready or self._fresh).popleft()
        if not isinstance(unit, PrefixGroup):
            return unit
        unit.has_started = True
        members = self._members[unit.group_id]
        record = members.popleft()
        if members:
            self._ready.appendleft(unit)
        else:
            del self._members[unit.group_id]
        return record

    def withdraw(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        taken, kept = list[Sequence](), list[Sequence]()
        for record in self:
            (taken if is_wanted(record) else kept).append(record)
        if taken:
            for line in (self._resumed, self._ready, self._fresh, self._members):
                line.clear()
            self._count = 0
            for record in kept:
                self.add(record)
        return sorted(taken, key=lambda record: record.arrival)

    def _next_unit(self) -> Sequence | PrefixGroup:
        return self._ready[0] if self._ready else self._fresh[0]

    def _rows(self, unit: Sequence | PrefixGroup) -> deque[Sequence] | tuple[Sequence]:
        return self._members[unit.group_id] if isinstance(unit, PrefixGroup) else (unit,)


# admission leaves blocks free for the growth of running sequences over this many steps; sequences
# that start together need blocks together, so an average is not enough
_MAX_SPARE_STEPS = 4
# a swapped sequence resumes only if no preemption is due within this many steps, which amortises
# the copies
_RESUME_STEPS = 16


def expected_len(request: Request, max_len: int) -> int | None:
    """Return the expected final token count, prompt included, of a sequence; None if unknown.

    `max_len` is the count at which it ends by length.
    """
    sampling = request.sampling
    if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
        return max_len
    if request.expected_output_len is None:
        return None
    return min(len(request.prompt_token_ids) + request.expected_output_len, max_len)


class OutputLengths:
    """Estimates the distribution of output lengths from finished and running outputs.

    A running output counts as longer than its current length (censored), since short ones finish
    first. Outputs longer than all finished ones are assumed to reach their upper bound. Before any
    output has finished, the length samples of requests are used; a mean per row would hide the tail
    that exhausts memory.
    """

    def __init__(self, size: int = 512) -> None:
        self._ring: Ints = np.zeros(size, np.int64)
        self._num_noted = 0
        self._distribution = LengthDistribution(self._ring[:0], np.ones(1))

    def begin(self, lengths: TokenLengths) -> None:
        """Start with the output lengths of rows that finished in other engines.

        It has no effect once an output of this engine has finished.
        """
        if not self._num_noted:
            for length in lengths:
                self.note(length)

    def note(self, length: int) -> None:
        self._ring[self._num_noted % len(self._ring)] = length
        self._num_noted += 1

    def update(self, running: Ints) -> None:
        """Update the estimate with the current lengths of running outputs."""
        ended = np.sort(self._ring[: self._num_noted])
        num_longer = len(running) - np.searchsorted(np.sort(running), ended)
        num_at_risk = len(ended) - np.arange(len(ended)) + num_longer
        longer = product_limit(np.ones(len(ended)), num_at_risk)
        self._distribution = LengthDistribution(ended, longer)

    def expect(self, num_generated: Ints, max_generated: Ints) -> Floats:
        """Return the expected final lengths of outputs that have `num_generated` tokens.

        They are at most `max_generated`.
        """
        return self._distribution.expect(num_generated, max_generated)


class KVForecast:
    """Forecasts the peaks of block usage if each sequence ends when expected.

    With sequences in descending order of their remaining steps r, the pool holds
    `shared + sum(sizes[:i]) + i * r[i - 1] / block_size` just before the i-th of them ends.

    The `shared` blocks are held until the end; `sizes` are the unshared blocks of each sequence
    now, with fractions. A sequence takes one block every `block_size` steps.
    """

    def __init__(self, shared: float, sizes: Floats, remaining: Floats, block_size: int) -> None:
        order = np.argsort(-remaining)
        self._shared = shared
        self._sizes, self._growth = sizes[order], remaining[order] / block_size
        self._block_size = block_size
        self._sum()

    def peak(self, size: float, remaining: float) -> float:
        """Return the highest peak, in blocks, if one more sequence ran.

        `size` are its unshared blocks, `remaining` its remaining steps.
        """
        growth = remaining / self._block_size
        place = int(np.searchsorted(-self._growth, -growth, side="right"))
        before = float(self._sums[place - 1]) if place else 0.0
        its_peak = before + size + growth * (place + 1)
        # peaks of longer sequences do not change
        others = self._peaks.copy()
        others[place:] += size + self._growth[place:]
        return self._shared + max(its_peak, float(others.max(initial=0.0)))

    def add(self, size: float, remaining: float, num_shared: int) -> None:
        """Add a sequence of `size` unshared blocks and `remaining` steps.

        It also adds `num_shared` blocks to the shared ones.
        """
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
    """Blocks that a sequence needs to start."""

    # cached blocks of its prefix, in order
    hits: list[int]
    # blocks of all its tokens so far
    num_total: int
    # blocks that it takes from the available ones
    num_available: int
    # blocks shared with other sequences
    num_shared: int
    # of these, blocks without a user so far
    num_new_shared: int
    # tokens until it needs one more block; infinite if it never does
    room: float
    # fork from which it starts, if any
    fork: PromptFork | None = None


class Admission:
    """Decides whether one more sequence may start, by free blocks and a forecast of peaks.

    A step of fewer than `full_step_tokens` admits every sequence that fits now.
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
        # computed lazily
        self._forecast: KVForecast | None = None

    def begin_step(self) -> None:
        self._num_spare = self._table.num_needed_blocks(self.spare_steps)
        self._forecast = None

    def need(self, record: Sequence, fork: PromptFork | None) -> Need:
        """Return the blocks that a sequence needs to start.

        A sequence that starts from a `fork` shares the blocks of its prompt, and copies the last
        one if it is partial.
        """
        if fork is not None:
            num_full, num_behind = divmod(record.num_tokens, self._blocks.block_size)
            # the KV of the last token is never written
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
        """Return whether enough blocks are available for `record`.

        Some blocks are kept in reserve for the next tokens of running sequences.
        """
        reserve = 0
        if self._table.num_running:
            if record.swapped is None:
                reserve = self._num_spare + (need.room < self.spare_steps)
            else:
                reserve = self._table.num_needed_blocks(self._resume_steps)
                reserve += need.room < self._resume_steps
        return need.num_available + reserve <= self._blocks.num_available

    def accepts(self, record: Sequence, need: Need, *, step_tokens: int) -> bool:
        """Return whether `record` may start, by the forecast of block usage.

        It always may while the step, which has `step_tokens` so far, is below
        `full_step_tokens`.
        """
        if step_tokens < self._full_step_tokens:
            return True
        peak = self._current().peak(*self._measure(record, need.num_shared))
        return peak + need.num_new_shared <= self._blocks.num_blocks

    def add(self, record: Sequence, need: Need) -> None:
        """Count a sequence that starts, with its need, in the reserve and the forecast."""
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
        # the last block is half empty on average
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
        # beyond its expected length a sequence is assumed to run an eighth longer
        outgrown = np.minimum(num_generated + 1 + num_generated // 8, max_generated)
        final = np.where(is_expected, np.maximum(expected, outgrown), final)
        return np.maximum(final - num_generated, 1.0)
