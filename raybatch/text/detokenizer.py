"""Token ids to text: stop strings are found during generation, and cut off from the text.

The engine calls a `StopChecker` after every token; code that makes the text calls
`completion_text`. The text of an answer depends on its prompt: tokenizers drop the first blank of
a text and split characters over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from raybatch.records.types import Completion, Sampling, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# a character has at most four bytes, so after this many tokens a broken one stays broken
_MAX_HELD_TOKENS = 8
_BROKEN = "\ufffd"


class TokenDecoder(Protocol):
    """A tokenizer, of which only `decode` is needed here."""

    def decode(
        self,
        token_ids: npt.ArrayLike,
        skip_special_tokens: bool = True,
        *,
        after: npt.ArrayLike | None = None,
    ) -> str: ...


class StopChecker:
    """Checks sequences for stop strings: `add` each sequence, `check` each token of it.

    A sequence is named by its slot in the engine; those without stop strings cost nothing. Only
    a short window of tokens is decoded, so the cost per token is constant. As in vLLM, a match that
    ends within the first `min_tokens` tokens does not count.

    Args:
        load: returns the tokenizer; called for the first sequence with stop strings.
    """

    def __init__(self, load: Callable[[], TokenDecoder]) -> None:
        self._load = load
        self._watches: dict[int, _Watch] = {}

    def add(
        self,
        slot: int,
        sampling: Sampling,
        prompt: npt.ArrayLike = (),
        generated: npt.ArrayLike = (),
    ) -> None:
        """Watch the sequence in a slot; `generated` are its tokens if it has begun before."""
        self.remove(slot)
        if sampling.stop:
            watch = _Watch(self._load(), sampling, prompt)
            for token_id in generated:  # type: ignore[union-attr]
                watch.append(int(token_id))  # type: ignore[arg-type]
            self._watches[slot] = watch

    def remove(self, slot: int) -> None:
        self._watches.pop(slot, None)

    def check(self, slot: int, token_id: int) -> str | None:
        """Add the next token; return the stop string that it completes, if any."""
        watch = self._watches.get(slot)
        return watch.append(token_id) if watch is not None else None


class _Watch:
    """The end of one sequence's text, as long as its longest stop string."""

    def __init__(self, tokenizer: TokenDecoder, sampling: Sampling, prompt: npt.ArrayLike) -> None:
        skip = sampling.skip_special_tokens
        self._pieces = TextPieces(partial(tokenizer.decode, skip_special_tokens=skip), prompt)
        self._stop = sampling.stop
        self._min_tokens = sampling.min_tokens
        self._reach = max(map(len, sampling.stop)) - 1
        self._num_tokens = 0
        self._tail = ""

    def append(self, token_id: int) -> str | None:
        self._num_tokens += 1
        new = self._pieces.append(token_id)
        text = self._tail + new
        stop = None
        if new and self._num_tokens > self._min_tokens:
            stop = find_stop(text, self._stop, end_after=len(self._tail))
        self._tail = text[-self._reach :] if self._reach else ""
        return stop


class TextPieces:
    """Decode tokens one by one, in the context of the tokens before.

    Args:
        decode: decodes tokens that come `after` others.
        before: tokens of the text so far.
    """

    def __init__(self, decode: Callable[..., str], before: npt.ArrayLike) -> None:
        self._decode = decode
        # decoded tokens that influence the next text, and tokens held back
        self._before = before
        self._held: list[int] = []

    def append(self, token_id: int) -> str:
        """Return the text that a token adds; empty while a character is incomplete."""
        self._held.append(token_id)
        text = self.held_text()
        if text.endswith(_BROKEN) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._before = [*self._before[-_MAX_HELD_TOKENS:], *self._held]  # type: ignore[index,misc]
        self._held = []
        return text

    def held_text(self) -> str:
        """Return the text of the tokens that are held back."""
        return self._decode(self._held, after=self._before) if self._held else ""


def find_stop(text: str, stop: tuple[str, ...], end_after: int) -> str | None:
    """Return the stop string that begins first in `text`, the first in `stop` of several.

    Only matches that end beyond the first `end_after` characters count; None without any.
    """
    found = ((text.find(s, max(0, end_after - len(s) + 1)), i) for i, s in enumerate(stop))
    first = min((match for match in found if match[0] >= 0), default=None)
    return None if first is None else stop[first[1]]


def visible_token_ids(completion: Completion, sampling: Sampling) -> TokenIds:
    """Return the tokens of a completion without the stop token, unless the output includes it."""
    is_ended = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    is_hidden = is_ended and not sampling.include_stop_str_in_output
    return completion.token_ids[:-1] if is_hidden else completion.token_ids


def completion_text(
    completion: Completion, sampling: Sampling, tokenizer: TokenDecoder, prompt: npt.ArrayLike
) -> str:
    """Return the text of a completion, without hidden special tokens and hidden stop string."""
    skip = sampling.skip_special_tokens
    text = tokenizer.decode(visible_token_ids(completion, sampling), skip, after=prompt)
    stop = completion.stop_reason
    if not isinstance(stop, str):
        return text
    start = 0
    if sampling.min_tokens:
        # earlier matches may be in the first min_tokens tokens; the last token completed the match
        before = tokenizer.decode(completion.token_ids[:-1], skip, after=prompt).rstrip(_BROKEN)
        start = max(0, len(before) - len(stop) + 1)
    position = text.find(stop, start)
    if position < 0:
        return text
    return text[: position + len(stop) * sampling.include_stop_str_in_output]


class Detokenizer:
    """Decode tokens of one model.

    Args:
        tokenizer: a fast tokenizer of transformers, read only.
        special_ids: ids of all its special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, special_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._fast = fast = tokenizer.backend_tokenizer
        self._bos_id = tokenizer.bos_token_id
        self._special_ids = frozenset(special_ids)
        # whether the decoder merges byte tokens into characters
        self._joins_bytes = (
            fast.decoder is not None and b"ByteFallback" in fast.decoder.__getstate__()
        )
        self._cleans_up = (
            bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
            and type(fast.model).__name__ != "BPE"
        )

    def decode_batch(
        self,
        batch: Sequence[npt.ArrayLike],
        skip_special_tokens: bool = True,
        *,
        after: Sequence[npt.ArrayLike | None] | None = None,
    ) -> list[str]:
        """Decode lists of token ids, each in the context of the tokens in `after`.

        An item () of `after` means that the ids begin a text. None means that too if they start
        with the begin token, and else that they are from the middle of a text.
        """
        lists, skip = [_as_list(token_ids) for token_ids in batch], skip_special_tokens
        befores = [
            () if tokens is None and ids[:1] == [self._bos_id] else tokens
            for ids, tokens in zip(lists, after or [None] * len(lists), strict=True)
        ]
        texts = self._texts(lists, skip, befores)
        return [
            self._whole(ids, skip, before) if self._joins_bytes and _BROKEN in text else text
            for text, ids, before in zip(texts, lists, befores, strict=True)
        ]

    def _whole(self, ids: list[int], skip: bool, after: npt.ArrayLike | None) -> str:
        """Decode token by token, if one broken character has corrupted adjacent ones."""

        def decode(held: list[int], *, after: npt.ArrayLike | None) -> str:
            return self._texts([held], skip, [after])[0]

        before = self._context(after, skip)[0] if after is None else after
        pieces = TextPieces(decode, before)
        return "".join(map(pieces.append, ids)) + pieces.held_text()

    def _texts(
        self, lists: list[list[int]], skip: bool, after: Sequence[npt.ArrayLike | None]
    ) -> list[str]:
        befores = [self._context(tokens, skip) for tokens in after]
        both = [[*ids, *more] for (ids, _), more in zip(befores, lists, strict=True)]
        wholes = map(self._clean, self._fast.decode_batch(both, skip_special_tokens=skip))
        parts = zip(wholes, befores, lists, strict=True)
        return [
            whole.removeprefix(before)
            if whole.startswith(before)
            else self._torn(before, whole, ids, skip)
            for whole, (_, before), ids in parts
        ]

    def _torn(self, before: str, whole: str, ids: list[int], skip: bool) -> str:
        """Return the text of tokens that change the text before them."""
        if _BROKEN not in before:  # with bytes that are no character, which break others
            return self._text(ids, skip)
        # including the rest of its last character
        pairs = zip(before, whole, strict=False)
        num_same = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(whole))
        )
        return whole[num_same:]

    def _context(self, after: npt.ArrayLike | None, skip: bool) -> tuple[list[int], str]:
        """Return the last tokens that influence the next text, and their text."""
        if after is None:
            return self._any_text
        size, length = 1, len(after)  # type: ignore[arg-type]
        while True:
            ids = _as_list(after[-size:])  # type: ignore[index]
            text = self._text(ids, skip)
            if size >= length or (text and not text.startswith(_BROKEN)):
                return ids, text
            # byte tokens of a character, then special tokens without text
            size += 1 if size < _MAX_HELD_TOKENS else size

    @cached_property
    def _any_text(self) -> tuple[list[int], str]:
        ids = self._fast.encode("a", add_special_tokens=False).ids
        # a small vocabulary may not have it
        return (ids, self._text(ids, False)) if self._special_ids.isdisjoint(ids) else ([], "")

    def _text(self, ids: list[int], skip: bool) -> str:
        return self._clean(self._fast.decode(ids, skip_special_tokens=skip))

    def _clean(self, text: str) -> str:
        return str(self._tokenizer.clean_up_tokenization(text)) if self._cleans_up else text


def _as_list(token_ids: npt.ArrayLike) -> list[int]:
    return np.asarray(token_ids, np.int64).tolist()  # type: ignore[no-any-return]
