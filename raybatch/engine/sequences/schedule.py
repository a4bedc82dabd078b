"""The scheduler's decision for one step, and its counters."""

from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.sequences.table import Sequence
from raybatch.records.arrays import Ints


def _none() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One step: a token and its drafts for each decoding slot, and prompt chunks.

    Each draft is one more row of the batch, after the row of its sequence. Each of these rows has
    logits, which verify the draft after it.

    `admitted` are the slots that were filled for this step, `preempted` those that were emptied;
    `ended` are sequences whose KV does not fit even if they run alone.
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
    # (slot, request) of each sample that starts from a prompt computed by another sample, and of
    # each prompt that ends in this step and from whose logits other samples start
    forked: tuple[tuple[int, int], ...] = ()
    opened: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + len(self.draft_tokens) + int(self.chunk_lens.sum())

    @property
    def decode_lens(self) -> Ints:
        """Number of rows of each decoding slot, int64 [D]: one, plus one for each draft."""
        if not len(self.draft_lens):
            return np.ones(len(self.decode_slots), np.int64)
        return self.draft_lens + 1

    @property
    def draft_places(self) -> Ints:
        """Index of each decode row among the rows of its slot, int64: 0, or the draft's number."""
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
    num_admission_stalls: int = 0
    num_drafted_tokens: int = 0
    num_copied_blocks: int = 0

    def note_start(self, record: Sequence, num_hits: int, block_size: int) -> None:
        """Count a sequence that starts or restarts with `num_hits` cached tokens."""
        if record.has_started:
            known = min(record.num_computed_before, record.num_tokens)
            if record.swapped is not None:
                # includes KV that was damaged in migration
                self.num_recomputed_tokens += max(known - record.swapped.num_tokens, 0)
                known = record.swapped.first_block * block_size
            self.num_recomputed_tokens += max(known - num_hits, 0)
        else:
            record.has_started = True
            record.num_cached_tokens = num_hits
            self.prompt_tokens += len(record.request.prompt_token_ids)
            self.cached_tokens += record.num_cached_tokens
