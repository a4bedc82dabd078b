"""N-gram speculation: drafts from prompts and earlier answers, their verification and number.

Answers repeat parts of their prompt, and rows of one template give similar answers. The last three
tokens are looked up in the prompt of the sequence, in answers of its prefix group, then in any
answer of the engine; the tokens after the match are the draft. A wrong draft only costs time, so
keys may collide and old answers may be dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import DECODE, EMPTY, SequenceTable
from raybatch.policy.speculation import MAX_BREAK_EVEN, StepTimes, draft_length
from raybatch.records.arrays import Bools, Ints
from raybatch.records.types import TokenIds

# a context is the last tokens, packed into 63 bits; ids beyond 21 bits collide
_NUM_TOKENS = 3
_TOKEN_BITS = 21
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1
_CONTEXT_BITS = _NUM_TOKENS * _TOKEN_BITS
_CONTEXT_MASK = (1 << _CONTEXT_BITS) - 1
# weight of the newest guess in the acceptance rate: of one sequence, and of all
_NEWEST, _NEWEST_OF_ALL = 1 / 8, 1 / 64


class _Place(NamedTuple):
    text: Sequence[int] | TokenIds
    position: int


@dataclass(slots=True)
class AnswerIndex:
    """Maps contexts, the last three tokens as one number, to the latest place after them.

    Places are in answers; drops the oldest: keeps two generations of at most `max_contexts`, and a
    full young generation replaces the old one. A token of an answer with a group counts twice.
    Adding and finding take O(1).
    """

    max_contexts: int = 1 << 16
    _young: dict[int, _Place] = field(default_factory=dict)
    _old: dict[int, _Place] = field(default_factory=dict)
    # acceptance rate over all sequences; the initial value favours drafting
    acceptance: float = 0.5

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, contexts: Sequence[int], text: Sequence[int], start: int, group: int) -> None:
        """Add contexts of an answer: `contexts[i]` precedes the token `text[start + i]`.

        `text` may grow later. `group` is a number above 0, or 0 for an answer without a group.
        """
        places = [_Place(text, start + i) for i in range(len(contexts))]
        self._young.update(zip(contexts, places, strict=True))
        if group:
            salt = group << _CONTEXT_BITS
            self._young.update(zip([salt | c for c in contexts], places, strict=True))
        if len(self._young) >= self.max_contexts:
            self._old, self._young = self._young, {}

    def find(self, context: int, group: int) -> _Place | None:
        """Return the place after a context, if possible in an answer of the group, or None."""
        keys = (group << _CONTEXT_BITS | context, context) if group else (context,)
        for key in keys:
            place = self._young.get(key) or self._old.get(key)
            if place is not None:
                return place
        return None


class PromptIndex:
    """Maps contexts, see `AnswerIndex`, to places in a prompt: one sort, then binary searches."""

    def __init__(self, token_ids: TokenIds) -> None:
        self._token_ids = token_ids
        contexts = _contexts(token_ids)[:-1]
        self._order = np.argsort(contexts, kind="stable")
        self._contexts = contexts[self._order]

    def find(self, context: int) -> _Place | None:
        """Return the place after the last occurrence of this context; None if there is none."""
        i = int(self._contexts.searchsorted(context, side="right")) - 1
        if i < 0 or self._contexts[i] != context:
            return None
        return _Place(self._token_ids, int(self._order[i]) + _NUM_TOKENS)


class Guesser:
    """Drafts tokens for one sequence; `feed` must receive every sampled token.

    It follows a matched text while its tokens are right, so a copied passage is looked up once.
    Each predicted token counts for the acceptance rate, drafted or not: a sequence without drafts
    still learns whether they would pay. Tokens are indexed `lag` tokens late (the most drafts of
    one step), so that a match has that many tokens after it.
    """

    def __init__(self, prompt: TokenIds, answers: AnswerIndex, *, group: int, lag: int) -> None:
        self.acceptance = answers.acceptance
        self._answers = answers
        self._group = group
        self._lag = lag
        self._token_ids = prompt
        self._prompt: PromptIndex | None = None
        self._answer: list[int] = []
        self._context = 0
        for token_id in prompt[-_NUM_TOKENS:].tolist():
            self._context = self._context << _TOKEN_BITS | token_id & _TOKEN_MASK
        # contexts of answer tokens that are not indexed yet
        self._pending = [self._context]
        self._place: _Place | None = None

    @property
    def num_fed(self) -> int:
        return len(self._answer)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the answer and update the acceptance rate."""
        for token_id in token_ids:
            text, position = self._place or ((), 0)
            if position < len(text):
                is_right = bool(text[position] == token_id)
                self.acceptance += (is_right - self.acceptance) * _NEWEST
                of_all = self._answers.acceptance
                self._answers.acceptance += (is_right - of_all) * _NEWEST_OF_ALL
                self._place = _Place(text, position + 1) if is_right else None
            else:
                self._place = None
            self._context = (self._context << _TOKEN_BITS | token_id & _TOKEN_MASK) & _CONTEXT_MASK
            self._answer.append(token_id)
            self._pending.append(self._context)
            if len(self._pending) > self._lag:
                self._publish(1)
            if self._place is None:
                self._place = self._find()

    def skip(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens without checking predictions; much cheaper.

        No drafts are possible until the next `feed`.
        """
        if not token_ids:
            return
        before = [self._context >> _TOKEN_BITS * i & _TOKEN_MASK for i in (2, 1, 0)]
        contexts = _contexts(np.array([*before, *token_ids], np.int64))[1:].tolist()
        self._answer += token_ids
        self._pending += contexts
        self._context = contexts[-1]
        self._publish(len(self._pending) - self._lag)
        self._place = None

    def finish(self) -> None:
        """Index the last tokens of a complete answer, which wait for `lag` further ones."""
        self._publish(len(self._pending) - 1)

    def draft(self, count: int) -> list[int]:
        if self._place is None:
            return []
        text, position = self._place
        return [int(token_id) for token_id in text[position : position + count]]

    def _find(self) -> _Place | None:
        if self._prompt is None:
            self._prompt = PromptIndex(self._token_ids)
        return self._prompt.find(self._context) or self._answers.find(self._context, self._group)

    def _publish(self, count: int) -> None:
        if count > 0:
            start = len(self._answer) + 1 - len(self._pending)
            self._answers.add(self._pending[:count], self._answer, start, self._group)
            del self._pending[:count]


def _contexts(token_ids: npt.NDArray[np.integer]) -> Ints:
    """Return the context at each token from the third on, int64 [P - 2], empty if P < 3."""
    tokens = token_ids.astype(np.int64) & _TOKEN_MASK
    first, second, third = tokens[:-2], tokens[1:-1], tokens[2:]
    return (first << 2 * _TOKEN_BITS) | (second << _TOKEN_BITS) | third


# tokens after which a sequence without drafts is checked again, by its last tokens
_REST_TOKENS = 32
_LOOKED_AT_TOKENS = 8


class LookupDrafter:
    """Proposes up to `max_tokens` drafts for each sequence of a table; the model verifies them.

    Drafts come from prompts and answers (`Guesser`) as long as they pay (`StepTimes`).
    """

    def __init__(self, table: SequenceTable, max_tokens: int) -> None:
        self._table = table
        self._max_tokens = max_tokens
        self._times = StepTimes(1 + max_tokens)
        self._answers = AnswerIndex()
        self._guessers: dict[int, Guesser] = {}
        self._is_known = np.zeros(len(table.records), np.bool_)
        # token counts at which sequences are checked next
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
            # tokens of a sequence that never drafted may help others too
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
            elif draft := guesser.draft(count):
                drafts[slot] = draft
        return drafts

    def note_step(self, num_rows: int, seconds: float) -> None:
        self._times.note(num_rows, seconds)

    def _look(self, slot: int) -> Guesser:
        guesser = self._guessers.get(slot)
        if guesser is None:
            guesser = self._guessers[slot] = self._guesser(slot)
        token_ids = self._table.generated_since(slot, guesser.num_fed)
        guesser.skip(token_ids[:-_LOOKED_AT_TOKENS])
        guesser.feed(token_ids[-_LOOKED_AT_TOKENS:])
        return guesser

    def _guesser(self, slot: int) -> Guesser:
        request = self._table.record(slot).request
        # group ids start at 0
        group = 0 if request.group_id is None else request.group_id + 1
        return Guesser(request.prompt_token_ids, self._answers, group=group, lag=self._max_tokens)


def accepted_rows(schedule: Schedule, token_ids: Ints) -> list[Ints]:
    """Return the rows whose tokens are accepted, in rounds with at most one row per slot.

    Each round is int64 row indices. The first one has the rows that a step without drafts would
    have. Each later one has the rows whose draft equals the token sampled in the row before.
    `token_ids` are the sampled tokens of all rows with logits, int64 [S].
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


def slots_to_restart(schedule: Schedule, is_finite: Bools) -> Ints:
    """Return the slots whose sequences must be recomputed without drafts: a row has NaN logits.

    If the model overflows for a wrong draft, it writes NaN into KV. Other rows of the sequence read
    that with weight 0, and 0 times NaN is NaN. `is_finite` is bool [S], for each row with logits.
    """
    if not len(schedule.draft_lens) or is_finite.all():
        return np.empty(0, np.int64)
    lens = schedule.decode_lens
    is_spoilt = np.logical_or.reduceat(~is_finite[: lens.sum()], np.cumsum(lens) - lens)
    return schedule.decode_slots[is_spoilt & (schedule.draft_lens > 0)]
