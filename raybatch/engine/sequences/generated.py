"""Storage of the generated tokens of running sequences."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from raybatch.records.arrays import Ints
from raybatch.records.types import TokenIds

_MIN_COLUMNS = 64


class TokenStore(Protocol):
    """Stores generated tokens by slot; place 0 is the first token after the prompt."""

    def begin(self, slot: int, token_ids: TokenIds, max_tokens: int) -> None:
        """Set the generated tokens so far of `slot`; there will be at most `max_tokens`."""

    def append(self, slots: Ints, places: Ints, token_ids: Ints) -> None:
        """Store one token for each of the distinct `slots` [S], at its place in the output."""

    def between(self, slot: int, start: int, stop: int) -> TokenIds:
        """Return the generated tokens [start, stop) of `slot`; a view if possible."""


class TokenArray:
    """Stores tokens in one array that grows to the longest possible output."""

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
