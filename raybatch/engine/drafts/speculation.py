"""Which running sequences get drafts in a step, how many, and which drafts are accepted."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raybatch.engine.drafts.proposals import AnswerIndex, Guesser
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import DECODE, EMPTY, SequenceTable
from raybatch.policy.speculation import MAX_BREAK_EVEN, StepTimes, draft_length

# a sequence that drafts nothing is looked at again after so many tokens, by its last few
_REST_TOKENS = 32
_LOOKED_AT_TOKENS = 8

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Drafter(Protocol):
    """Proposes tokens for the sequences of a table. They are computed, and then kept or refused."""

    def add(self, slot: int) -> None:
        """Take a sequence that was placed in `slot` and may get drafts."""

    def remove(self, slot: int) -> None:
        """Forget a slot, before or after its sequence has left the table; unknown ones too."""

    def propose(self) -> Mapping[int, list[int]]:
        """Return drafts by slot, for decoding sequences alone."""

    def note_step(self, num_rows: int, seconds: float) -> None:
        """Note what a step of decodes alone took; drafts count as rows."""


class LookupDrafter:
    """Looks drafts up in prompts and answers (`Guesser`) as long as that pays (`StepTimes`)."""

    def __init__(self, table: SequenceTable, max_tokens: int) -> None:
        self._table = table
        self._max_tokens = max_tokens
        self._times = StepTimes(1 + max_tokens)
        self._answers = AnswerIndex()
        self._guessers: dict[int, Guesser] = {}
        self._is_known = np.zeros(len(table.records), np.bool_)
        # tokens at which a sequence is looked at next
        self._next_look: npt.NDArray[np.int64] = np.zeros(len(table.records), np.int64)

    def add(self, slot: int) -> None:
        self._is_known[slot] = True
        self._next_look[slot] = 0

    def remove(self, slot: int) -> None:
        if not self._is_known[slot]:
            return
        self._is_known[slot] = False
        guesser = self._guessers.pop(slot, None)
        if self._table.phase[slot] != EMPTY:
            # also the tokens of one that never drafted may help others
            guesser = guesser or self._guesser(slot)
            guesser.skip(self._table.generated_since(slot, guesser.num_fed))
        if guesser is not None:
            guesser.finish()

    def propose(self) -> Mapping[int, list[int]]:
        table = self._table
        slots = np.flatnonzero(table.phase == DECODE)
        if not len(slots):
            return {}
        break_even = self._times.break_even(len(slots))
        if break_even > MAX_BREAK_EVEN:
            return {}
        is_due = self._is_known[slots] & (self._next_look[slots] <= table.num_tokens[slots])
        drafts = {}
        for slot in slots[is_due].tolist():
            guesser = self._look(slot)
            count = draft_length(guesser.acceptance, break_even, self._max_tokens)
            if not count:
                self._next_look[slot] = table.num_tokens[slot] + _REST_TOKENS
                continue
            draft = guesser.draft(count)
            if draft:
                drafts[slot] = draft
        return drafts

    def note_step(self, num_rows: int, seconds: float) -> None:
        self._times.note(num_rows, seconds)

    def _look(self, slot: int) -> Guesser:
        """Return the guesser of a slot, up to date with its tokens."""
        guesser = self._guessers.get(slot)
        if guesser is None:
            guesser = self._guessers[slot] = self._guesser(slot)
        token_ids = self._table.generated_since(slot, guesser.num_fed)
        guesser.skip(token_ids[:-_LOOKED_AT_TOKENS])
        guesser.feed(token_ids[-_LOOKED_AT_TOKENS:])
        return guesser

    def _guesser(self, slot: int) -> Guesser:
        request = self._table.record(slot).request
        # ids of groups may be 0
        group = 0 if request.group_id is None else request.group_id + 1
        return Guesser(request.prompt_token_ids, self._answers, group=group, lag=self._max_tokens)


def accepted_rows(schedule: Schedule, token_ids: Int64s) -> list[Int64s]:
    """Return the rows whose tokens go on a sequence, as rounds with a row per slot at most.

    The first round has the rows that a step without drafts has. A later one has those that were
    computed with a draft as their input which is the token drawn in the round before. `token_ids`
    were drawn for each row with logits, int64 [S].
    """
    lens = schedule.decode_lens
    num_decode_rows = int(lens.sum())
    first_rows = np.cumsum(lens) - lens
    rounds = [np.concatenate((first_rows, np.arange(num_decode_rows, len(token_ids))))]
    if not len(schedule.draft_lens):
        return rounds
    drafts = np.zeros(num_decode_rows, np.int64)
    drafts[schedule.draft_places > 0] = schedule.draft_tokens
    rows, left = first_rows, schedule.draft_lens
    while len(rows):
        has_next = left > 0
        rows, left = rows[has_next] + 1, left[has_next] - 1
        is_right = drafts[rows] == token_ids[rows - 1]
        rows, left = rows[is_right], left[is_right]
        if len(rows):
            rounds.append(rows)
    return rounds


def slots_to_restart(schedule: Schedule, is_finite: Bools) -> Int64s:
    """Return the slots with drafts of which a row has no finite logits.

    A draft that the model cannot stand spoils KV which other rows of its sequence read with weight
    0, and 0 times NaN is NaN. So such a sequence is computed again, without drafts. `is_finite` is
    that of each row with logits, bool [S].
    """
    if not len(schedule.draft_lens) or is_finite.all():
        return np.empty(0, np.int64)
    lens = schedule.decode_lens
    is_spoilt = np.logical_or.reduceat(~is_finite[: lens.sum()], np.cumsum(lens) - lens)
    return schedule.decode_slots[is_spoilt & (schedule.draft_lens > 0)]
