"""What the scheduler decided for one step, and its counters."""

from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.sequences.table import Sequence
from raybatch.records.arrays import Ints


def _none() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One step: a token and its drafts for each decoding slot, and chunks of prompts.

    A draft is a guess of the token after the ones known. It is computed as one more row behind the
    row of its sequence, and each such row has logits: they show whether the next draft is right.

    Slots of `admitted` were filled for this step, those of `preempted` emptied; `ended` sequences
    cannot fit even alone.
    """

    decode_slots: Ints = field(default_factory=_none)  # [D], ascending
    # [C], started prompts first, then new ones in order of submission
    chunk_slots: Ints = field(default_factory=_none)
    chunk_starts: Ints = field(default_factory=_none)  # [C], first position of each chunk
    chunk_lens: Ints = field(default_factory=_none)  # [C], at least 1
    draft_lens: Ints = field(default_factory=_none)  # [D], or empty where no slot has any
    draft_tokens: Ints = field(default_factory=_none)  # slot after slot
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    ended: tuple[Sequence, ...] = ()
    # slot and request of each sample that starts with a prompt which another one has computed, and
    # of each prompt that ends in this step whose logits others start from, now or later
    forked: tuple[tuple[int, int], ...] = ()
    opened: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + len(self.draft_tokens) + int(self.chunk_lens.sum())

    @property
    def decode_lens(self) -> Ints:
        """Rows of each decoding slot, int64 [D]: one, and one for each draft."""
        if not len(self.draft_lens):
            return np.ones(len(self.decode_slots), np.int64)
        return self.draft_lens + 1

    @property
    def draft_places(self) -> Ints:
        """Which row of its slot each decode row is, int64, from 0."""
        lens = self.decode_lens
        return np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)


@dataclass(kw_only=True, slots=True)
class SchedulerCounters:
    """Tokens and events since the start; meanings as in `raybatch.records.types.ReplicaStats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_chunk_tokens: int = 0
    num_held_steps: int = 0
    num_drafted_tokens: int = 0
    num_copied_blocks: int = 0

    def note_start(self, record: Sequence, num_hits: int, block_size: int) -> None:
        """Note that a sequence starts, or starts again, with so many tokens of its KV there."""
        if record.has_started:
            known = min(record.num_computed_before, record.num_tokens)
            if record.swapped is not None:
                # also what was damaged on its way from another engine
                self.num_recomputed_tokens += max(known - record.swapped.num_tokens, 0)
                known = record.swapped.first_block * block_size
            self.num_recomputed_tokens += max(known - num_hits, 0)
        else:
            record.has_started = True
            record.num_cached_tokens = num_hits
            self.prompt_tokens += len(record.request.prompt_token_ids)
            self.cached_tokens += record.num_cached_tokens
