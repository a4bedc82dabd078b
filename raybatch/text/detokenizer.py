"""From token ids to text: the text of an answer goes on from that of its prompt.

Tokenizers drop the first blank of a text, and split characters over tokens, so what tokens say
depends on those before them.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from raybatch.text.stopping import Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# a character has at most four bytes
_MAX_CHARACTER_TOKENS = 8


class Detokenizer:
    """Makes text of the tokens of one model.

    Args:
        tokenizer: a fast tokenizer of transformers, read only.
        special_ids: of all its special tokens.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", *, special_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._fast = fast = tokenizer.backend_tokenizer
        self._bos_id = tokenizer.bos_token_id
        self._special_ids = frozenset(special_ids)
        # a decoder that makes characters of a run of bytes, or of none of them
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
        """Return the text of lists of token ids, each as it goes on from the tokens before it.

        These are in `after`; with () a text begins. With None it begins where the ids begin with
        the begin token, and else goes on from any text.
        """
        lists, skip = [_as_list(token_ids) for token_ids in batch], skip_special_tokens
        befores = [
            () if tokens is None and ids[:1] == [self._bos_id] else tokens
            for ids, tokens in zip(lists, after or [None] * len(lists), strict=True)
        ]
        texts = self._texts(lists, skip, befores)
        return [
            self._whole(ids, skip, before) if self._joins_bytes and "\ufffd" in text else text
            for text, ids, before in zip(texts, lists, befores, strict=True)
        ]

    def _whole(self, ids: list[int], skip: bool, after: npt.ArrayLike | None) -> str:
        """Return a text token by token, where one broken character has broken its neighbours."""

        def decode(held: list[int], *, after: npt.ArrayLike | None) -> str:
            return self._texts([held], skip, [after])[0]

        before = self._context(after, skip)[0] if after is None else after
        pieces = Pieces(decode, before)
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
        if "\ufffd" not in before:  # with bytes that are no character, which break others
            return self._text(ids, skip)
        # with the rest of its last character
        pairs = zip(before, whole, strict=False)
        num_same = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(whole))
        )
        return whole[num_same:]

    def _context(self, after: npt.ArrayLike | None, skip: bool) -> tuple[list[int], str]:
        """Return the last tokens that decide how a text goes on, and their own text."""
        if after is None:
            return self._any_text
        size, length = 1, len(after)  # type: ignore[arg-type]
        while True:
            ids = _as_list(after[-size:])  # type: ignore[index]
            text = self._text(ids, skip)
            if size >= length or (text and not text.startswith("\ufffd")):
                return ids, text
            # the bytes of a character one by one, then special tokens that have no text
            size += 1 if size < _MAX_CHARACTER_TOKENS else size

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
