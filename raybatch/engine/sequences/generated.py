"""The tokens that running sequences have generated."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from raybatch.records.arrays import Ints
from raybatch.records.types import TokenIds

_MIN_COLUMNS = 64


class TokenStore(Protocol):
    """Generated tokens by slot; places count from 0, the first token after the prompt."""

    def begin(self, slot: int, token_ids: TokenIds, max_tokens: int) -> None:
        """Give `slot` its tokens so far; it will have `max_tokens` at most."""

    def append(self, slots: Ints, places: Ints, token_ids: Ints) -> None:
        """Give each of the distinct slots [S] the token at its place."""

    def between(self, slot: int, start: int, stop: int) -> TokenIds:
        """Return tokens of `slot`; a view where that is possible."""


class KeptTokens:
    """Tokens as one array, which grows with the longest output that a sequence may have."""

    def __init__(self, max_slots: int) -> None:
        self._tokens: npt.NDArray[np.int32] = np.zeros((max_slots, _MIN_COLUMNS), np.int32)

    def begin(self, slot: int, token_ids: TokenIds, max_tokens: int) -> None:
        num_columns = self._tokens.shape[1]
        if max_tokens > num_columns:
            num_more = max(max_tokens - num_columns, num_columns)
            self._tokens = np.pad(self._tokens, ((0, 0), (0, num_more)))
        self._tokens[slot, : len(token_ids)] = token_ids

    def append(self, slots: Ints, places: Ints, token_ids: Ints) -> None:
        self._tokens[slots, places] = token_ids

    def between(self, slot: int, start: int, stop: int) -> TokenIds:
        return self._tokens[slot, start:stop]
