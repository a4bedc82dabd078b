"""The text of an answer: stop strings found while tokens arrive, and cut off when it is made.

The engine calls a `StopChecker` after every token; whatever makes the text calls `completion_text`.
It goes on from the text of the prompt: both together are what the tokenizer decodes of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy.typing as npt

from raybatch.records.types import Completion, Sampling, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from raybatch.text.tokenizer import Tokenizer

# a character has at most four bytes; after so many tokens a broken one will not become whole
_MAX_HELD_TOKENS = 8
_BROKEN = "\ufffd"


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(
        self,
        token_ids: npt.ArrayLike,
        skip_special_tokens: bool = True,
        *,
        after: npt.ArrayLike | None = None,
    ) -> str: ...


class StopChecker:
    """Watches the text of sequences that have stop strings; others cost nothing.

    Text is made from a short window of tokens, so a token costs the same at any length. A match
    that ends within the first `min_tokens` tokens does not count, as in vLLM.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._watches: dict[int, _Watch] = {}

    def add(
        self,
        slot: int,
        sampling: Sampling,
        prompt: npt.ArrayLike = (),
        generated: npt.ArrayLike = (),
    ) -> None:
        """Watch a slot; `generated` are tokens of a preempted or migrated sequence."""
        self.remove(slot)
        if sampling.stop:
            watch = _Watch(self._tokenizer, sampling, prompt)
            for token_id in generated:  # type: ignore[union-attr]
                watch.append(int(token_id))  # type: ignore[arg-type]
            self._watches[slot] = watch

    def remove(self, slot: int) -> None:
        self._watches.pop(slot, None)

    def check(self, slot: int, token_id: int) -> str | None:
        """Take in the next token and return the stop string that it completed, if any."""
        watch = self._watches.get(slot)
        return watch.append(token_id) if watch is not None else None


class _Watch:
    """Text of one sequence, as far back as a stop string can reach."""

    def __init__(self, tokenizer: Decoder, sampling: Sampling, prompt: npt.ArrayLike) -> None:
        skip = sampling.skip_special_tokens
        self._pieces = Pieces(partial(tokenizer.decode, skip_special_tokens=skip), prompt)
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


class Pieces:
    """Makes text of tokens one by one, each as it goes on from those before it.

    Args:
        decode: of some tokens, as they come `after` others.
        before: tokens of the text so far.
    """

    def __init__(self, decode: Callable[..., str], before: npt.ArrayLike) -> None:
        self._decode = decode
        # tokens whose text is out, as many as decide how it goes on, and those held back
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
    """Return the stop string that begins first in `text`; of equals the first listed."""
    found = ((text.find(s, max(0, end_after - len(s) + 1)), i) for i, s in enumerate(stop))
    first = min((match for match in found if match[0] >= 0), default=None)
    return None if first is None else stop[first[1]]


def visible_token_ids(completion: Completion, sampling: Sampling) -> TokenIds:
    """Return the tokens that belong to the text: without the stop token that ended it."""
    is_ended = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    is_hidden = is_ended and not sampling.include_stop_str_in_output
    return completion.token_ids[:-1] if is_hidden else completion.token_ids


def completion_text(
    completion: Completion, sampling: Sampling, tokenizer: Decoder, prompt: npt.ArrayLike
) -> str:
    """Return the text of a completion as the user sees it behind its prompt."""
    skip = sampling.skip_special_tokens
    text = tokenizer.decode(visible_token_ids(completion, sampling), skip, after=prompt)
    stop = completion.stop_reason
    if not isinstance(stop, str):
        return text
    start = 0
    if sampling.min_tokens:
        # an earlier match may lie among the first min_tokens tokens; the last token ended it
        before = tokenizer.decode(completion.token_ids[:-1], skip, after=prompt).rstrip(_BROKEN)
        start = max(0, len(before) - len(stop) + 1)
    position = text.find(stop, start)
    if position < 0:
        return text
    return text[: position + len(stop) * sampling.include_stop_str_in_output]


class LazyTokenizer:
    """What a `StopChecker` and a grammar need of a tokenizer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def decode(
        self,
        token_ids: npt.ArrayLike,
        skip_special_tokens: bool = True,
        *,
        after: npt.ArrayLike | None = None,
    ) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens, after=after)

    def hugging_face(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer of transformers; it may not be changed."""
        return self._tokenizer.hugging_face

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from raybatch.text.tokenizer import Tokenizer

        return Tokenizer.load(self._path)
