"""State of an engine's sequences: a record each, and arrays over the running ones.

State that changes every step is in arrays indexed by slot; a record is accessed only when its
sequence is admitted, preempted or finished.
"""

import heapq
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.block_manager import SwappedKV, hash_blocks
from raybatch.records.arrays import Ints
from raybatch.records.types import (
    NO_TOKENS,
    Completion,
    FinishReason,
    Request,
    RowProgress,
    SequenceState,
    TokenIds,
    TokenLogprobs,
    Vector,
)

_MIN_COLUMNS = 64


class TokenArray:
    """Stores generated tokens by slot, in one array that grows to the longest possible output.

    Place 0 is the first token after the prompt.
    """

    def __init__(self, max_slots: int) -> None:
        self._tokens: npt.NDArray[np.int32] = np.zeros((max_slots, _MIN_COLUMNS), np.int32)

    def begin(self, slot: int, token_ids: TokenIds, max_tokens: int) -> None:
        """Set the generated tokens so far of `slot`; there will be at most `max_tokens`."""
        num_columns = self._tokens.shape[1]
        if max_tokens > num_columns:
            num_more = max(max_tokens - num_columns, num_columns)
            self._tokens = np.pad(self._tokens, ((0, 0), (0, num_more)))
        self._tokens[slot, : len(token_ids)] = token_ids

    def append(self, slots: Ints, places: Ints, token_ids: Ints) -> None:
        """Store one token for each of the distinct `slots` [S], at its place in the output."""
        self._tokens[slots, places] = token_ids

    def between(self, slot: int, start: int, stop: int) -> TokenIds:
        """Return the generated tokens [start, stop) of `slot`; a view if possible."""
        return self._tokens[slot, start:stop]


class BlockUsers:
    """Tracks the slots that read each KV block: their number, the sums of slots and of keys.

    If one slot reads a block, the slot sum is that slot. Each slot has a random 64-bit key: blocks
    with equal key sums have the same readers (two sets collide with probability 10^-19).
    """

    def __init__(self, num_blocks: int, max_slots: int) -> None:
        generator = np.random.Generator(np.random.PCG64(0x5EED))
        self._keys = generator.integers(0, 2**64, max_slots, dtype=np.uint64)
        self.count, self.slot_sum, self.position = _columns(num_blocks, 3)
        self.key_sum: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self.num_attended: Ints = np.zeros(max_slots, np.int64)
        self.high_water = 0

    def extend(self, slots: Ints, targets: Ints, block_table: npt.NDArray[np.int32]) -> None:
        """Record that each of the distinct `slots` [S] reads the first `targets` [S] of its blocks.

        `block_table` has the blocks of each slot. A target below the one before has no effect.
        """
        grows = self.num_attended[slots] < targets
        slots, targets = slots[grows], targets[grows]
        if not len(slots):
            return
        starts = self.num_attended[slots]
        counts = targets - starts
        owners = np.repeat(slots, counts)
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        position = first + np.arange(len(owners))
        blocks = block_table[owners, position]
        np.add.at(self.count, blocks, 1)
        np.add.at(self.slot_sum, blocks, owners)
        np.add.at(self.key_sum, blocks, self._keys[owners])
        self.position[blocks] = position
        self.num_attended[slots] = targets
        self.high_water = max(self.high_water, int(blocks.max()) + 1)

    def block_sharing(self) -> tuple[int, float]:
        """Return (repeated reads, readers per shared block) of one step.

        The first is the number of block reads beyond the first read of each block; the second is a
        mean, 1 if no block is shared.
        """
        counts = self.count[: self.high_water]
        shared = counts[counts > 1]
        return int((shared - 1).sum()), float(shared.mean()) if len(shared) else 1.0

    def remove(self, slot: int, block_table: npt.NDArray[np.int32]) -> None:
        """Remove `slot` as a reader of its blocks, while they are still in its row of the table."""
        blocks = block_table[slot, : self.num_attended[slot]]
        self.count[blocks] -= 1
        self.slot_sum[blocks] -= slot
        self.key_sum[blocks] -= self._keys[slot]
        self.num_attended[slot] = 0

    def check(self, block_table: npt.NDArray[np.int32]) -> None:
        count, slot_sum = np.zeros_like(self.count), np.zeros_like(self.slot_sum)
        for slot in np.flatnonzero(self.num_attended).tolist():
            blocks = block_table[slot, : self.num_attended[slot]]
            count[blocks] += 1
            slot_sum[blocks] += slot
        if not (np.array_equal(count, self.count) and np.array_equal(slot_sum, self.slot_sum)):
            raise RuntimeError("the recorded users of KV blocks differ from the block tables")


EMPTY: Final = 0
PREFILL: Final = 1
DECODE: Final = 2
# its last token is sampled, but not read yet
ENDING: Final = 3


def completion_of(
    state: SequenceState,
    reason: FinishReason,
    stop_reason: str | int | None = None,
    *,
    error: str = "",
    vector: Vector | None = None,
) -> Completion:
    """Return the completion of a sequence.

    `vector` is the result of a pooling task.
    """
    return Completion(
        request_id=state.request.request_id,
        sample_idx=state.sample_idx,
        token_ids=state.token_ids,
        finish_reason=reason,
        stop_reason=stop_reason,
        # further samples get the prompt from the first one, not from another request
        num_cached_tokens=0 if state.sample_idx else state.num_cached_tokens,
        vector=vector,
        logprobs=state.logprobs,
        error=error,
    )


@dataclass(kw_only=True, slots=True, eq=False)
class PrefixGroup:
    """A group of sequences of one engine that share a prefix."""

    group_id: int
    # shared tokens, whole blocks; read only
    prefix: TokenIds
    max_blocks: int
    # waiting and running sequences
    num_members: int = 0
    # a member was admitted: the others precede new groups
    has_started: bool = False
    # pinned blocks, the first ones of the prefix
    blocks: list[int] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One unfinished sample of a request."""

    request: Request
    sample_idx: int
    # order of submission; the latest is preempted first
    arrival: int
    # token count at which it ends by length, including the prompt
    max_len: int
    # expected final token count; None if unknown
    expected_len: int | None = None
    # generated tokens while it is not running; else they are in the table
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    # set by the scheduler
    group: PrefixGroup | None = None
    # of the full blocks of the prompt; None before the first admission
    block_hashes: list[bytes] | None = None
    # prompt tokens whose KV came from another request
    num_cached_tokens: int = 0
    # tokens whose KV was lost by preemption
    num_computed_before: int = 0
    has_started: bool = False
    logprobs: list[TokenLogprobs] | None = None
    # generated tokens already reported by `begun`
    num_reported: int = 0
    # KV in host memory, until it is restored
    swapped: SwappedKV | None = None
    # false once a draft broke its KV
    may_draft: bool = True
    # its KV was restored from 8 bits at least once, so its tokens may differ
    was_rounded: bool = False

    def prompt_hashes(self, block_size: int, *, has_cache: bool) -> list[bytes]:
        """Return the hashes of the full blocks of its prompt, computed once.

        With `has_cache`, equal blocks of different requests have equal hashes; otherwise only those
        of samples of one request do, and a request with a single sample has none.
        """
        request = self.request
        if self.block_hashes is None and (has_cache or request.sampling.n > 1):
            root = b"" if has_cache else request.request_id.to_bytes(16, "little", signed=True)
            self.block_hashes = hash_blocks(request.prompt_token_ids, block_size, root=root)
        return self.block_hashes or []

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def max_blocks(self, block_size: int) -> int:
        # the last token needs no KV
        return -(-(self.max_len - 1) // block_size)

    def completion(
        self, reason: FinishReason, stop_reason: str | int | None = None, *, error: str = ""
    ) -> Completion:
        return completion_of(self.state(), reason, stop_reason, error=error)

    def state(self) -> SequenceState:
        """Return the state from which another engine can resume a sequence that does not run."""
        return SequenceState(
            request=self.request,
            sample_idx=self.sample_idx,
            token_ids=self.token_ids,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            num_reported=self.num_reported,
        )


def _columns(num_rows: int, count: int) -> list[Ints]:
    return [np.zeros(num_rows, np.int64) for _ in range(count)]


class SequenceTable:
    """Running sequences as arrays over slots; only the scheduler adds and removes them.

    `num_tokens` counts prompt and generated tokens, `num_computed` those with KV. A decoding
    sequence has all but its last token computed.

    Args:
        generated: storage of generated tokens; None makes a `TokenArray`.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        generated: TokenArray | None = None,
    ) -> None:
        max_blocks = min(num_blocks, -(-max_model_len // block_size))
        self.block_size = block_size
        self.phase: npt.NDArray[np.int8] = np.zeros(max_slots, np.int8)
        self.is_expected: npt.NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        # int64 [max_slots] each
        self.arrival, self.num_prompt, self.num_tokens, self.num_computed = _columns(max_slots, 4)
        self.max_len, self.expected_len, self.last_token, self.max_blocks = _columns(max_slots, 4)
        self.num_blocks, self.num_reserved, self.num_shared = _columns(max_slots, 3)
        # leading blocks with exact KV; later ones must not be shared
        (self.num_exact,) = _columns(max_slots, 1)
        # the last block may be shared: copy it before writing
        self.shares_last: npt.NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_slots, max_blocks), np.int32)
        self.records: list[Sequence | None] = [None] * max_slots
        self.users = BlockUsers(num_blocks, max_slots)
        self._generated = TokenArray(max_slots) if generated is None else generated
        self._free_slots = list(range(max_slots))

    @property
    def num_running(self) -> int:
        return len(self.records) - len(self._free_slots)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def record(self, slot: int) -> Sequence:
        """Return the sequence in `slot`; raises KeyError if it is empty."""
        record = self.records[slot]
        if record is None:
            raise KeyError(f"slot {slot} is empty")
        return record

    def place(self, record: Sequence, blocks: list[int]) -> int:
        """Start `record` in the lowest free slot, with `blocks` holding its first tokens."""
        slot = heapq.heappop(self._free_slots)
        num_prompt, num_generated = len(record.request.prompt_token_ids), len(record.token_ids)
        self.records[slot] = record
        self.phase[slot] = PREFILL
        self.arrival[slot] = record.arrival
        self.num_prompt[slot] = num_prompt
        self.num_tokens[slot] = num_prompt + num_generated
        self.num_computed[slot] = len(blocks) * self.block_size
        self.max_len[slot] = record.max_len
        self.max_blocks[slot] = record.max_blocks(self.block_size)
        self.num_blocks[slot] = len(blocks)
        # shared KV is exact, and so is everything computed from it
        self.num_exact[slot] = self.block_table.shape[1]
        self.expected_len[slot] = record.expected_len or record.max_len
        self.is_expected[slot] = record.expected_len is not None
        self.block_table[slot, : len(blocks)] = blocks
        self._generated.begin(slot, record.token_ids, record.max_len - num_prompt)
        return slot

    def remove(self, slot: int) -> Sequence:
        record = self.record(slot)
        record.token_ids = self.generated(slot)
        self.users.remove(slot, self.block_table)
        self.records[slot] = None
        self.phase[slot] = EMPTY
        self.num_reserved[slot] = 0
        self.num_blocks[slot] = 0
        self.shares_last[slot] = False
        heapq.heappush(self._free_slots, slot)
        return record

    def add_blocks(self, slot: int, blocks: list[int]) -> None:
        start = self.num_blocks[slot]
        self.block_table[slot, start : start + len(blocks)] = blocks
        self.num_blocks[slot] = start + len(blocks)

    def replace_last(self, slot: int, block: int) -> None:
        """Replace the last block of `slot` by its copy."""
        num_attended = self.users.num_attended[[slot]]
        self.users.remove(slot, self.block_table)
        self.block_table[slot, self.num_blocks[slot] - 1] = block
        self.users.extend(np.array([slot]), num_attended, self.block_table)

    def skip_to(self, slot: int, num_computed: int) -> None:
        """Record that the blocks of `slot` hold the KV of `num_computed` tokens, without a step.

        A sequence that lacks only the KV of its last generated token decodes from then on.
        """
        self.num_computed[slot] = num_computed
        num_generated = int(self.num_tokens[slot] - self.num_prompt[slot])
        if num_generated and num_computed == self.num_tokens[slot] - 1:
            self.phase[slot] = DECODE
            self.last_token[slot] = self._generated.between(slot, num_generated - 1, num_generated)[
                0
            ]

    def append_tokens(self, slots: Ints, token_ids: Ints) -> None:
        self._generated.append(slots, self.num_tokens[slots] - self.num_prompt[slots], token_ids)
        self.last_token[slots] = token_ids
        self.num_tokens[slots] += 1

    def count_tokens(self, slots: Ints, num_tokens: int) -> None:
        """Add `num_tokens` tokens without ids to each of `slots`, for simulations."""
        self.num_tokens[slots] += num_tokens

    def num_needed_blocks(self, num_steps: int) -> int:
        """Return how many new blocks running sequences need for `num_steps` steps after this one.

        `num_steps` is at most the block size.
        """
        held = self.num_blocks + self.num_reserved
        num_stored = np.where(self.phase == DECODE, self.num_computed + 1, self.num_tokens)
        is_growing = (self.phase != EMPTY) & (held < self.max_blocks)
        room = held * self.block_size - num_stored
        num_grown = np.count_nonzero(is_growing & (room < num_steps))
        return int(num_grown + np.count_nonzero(self.shares_last))

    def running_lengths(self) -> tuple[Ints, Ints]:
        """Return tokens so far and expected remaining tokens of running sequences, by slot."""
        slots = np.flatnonzero(self.phase != EMPTY)
        tokens = self.num_tokens[slots]
        return tokens, np.maximum(1, self.expected_len[slots] - tokens)

    def longest_len(self) -> int:
        """Return the most tokens that a running sequence may have."""
        return int(self.max_len[self.phase != EMPTY].max(initial=0))

    def full_slots(self) -> Ints:
        """Return the decoding slots that need a new block for the token of this step."""
        slots = np.flatnonzero(self.phase == DECODE)
        is_full = self.num_computed[slots] >= self.num_blocks[slots] * self.block_size
        return slots[is_full | self.shares_last[slots]]

    def check(self, *, num_reserved: int) -> None:
        """Raise RuntimeError unless slots reserve `num_reserved` blocks and `users` is right."""
        if num_reserved != int(self.num_reserved.sum()):
            raise RuntimeError(
                "the number of reserved KV blocks differs from the sum of the slots' reservations"
            )
        self.users.check(self.block_table)

    def blocks(self, slot: int) -> npt.NDArray[np.int32]:
        return self.block_table[slot, : self.num_blocks[slot]]

    def generated(self, slot: int) -> TokenIds:
        num_generated = int(self.num_tokens[slot] - self.num_prompt[slot])
        return self._generated.between(slot, 0, num_generated).copy()

    def generated_since(self, slot: int, start: int) -> list[int]:
        stop = int(self.num_tokens[slot] - self.num_prompt[slot])
        token_ids: list[int] = self._generated.between(slot, start, stop).tolist()
        return token_ids

    def progress(self) -> RowProgress:
        """Return the progress of the running sequences, in order of slots."""
        slots = np.flatnonzero(self.phase != EMPTY)
        ids = [self.record(slot).request.request_id for slot in slots.tolist()]
        return RowProgress(
            request_ids=np.array(ids, np.int64),
            num_tokens=self.num_tokens[slots],
            num_generated=self.num_tokens[slots] - self.num_prompt[slots],
        )

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        """Return the states of running sequences with at least `min_new_tokens` new tokens.

        New are those generated since the last call that returned the sequence.
        """
        num_generated = self.num_tokens - self.num_prompt
        long = np.flatnonzero((self.phase != EMPTY) & (num_generated >= min_new_tokens))
        states = []
        for slot in long.tolist():
            record, token_ids = self.record(slot), self.generated(slot)
            if len(token_ids) >= record.num_reported + min_new_tokens:
                record.num_reported = len(token_ids)
                states.append(replace(record.state(), token_ids=token_ids))
        return states

    def tokens(self, slot: int, start: int, stop: int) -> TokenIds:
        """Return the tokens [start, stop) of `slot`; a view if possible."""
        prompt = self.record(slot).request.prompt_token_ids
        num_prompt = len(prompt)
        if stop <= num_prompt:
            return prompt[start:stop]
        generated = self._generated.between(slot, max(start - num_prompt, 0), stop - num_prompt)
        return np.concatenate((prompt[start:num_prompt], generated))
