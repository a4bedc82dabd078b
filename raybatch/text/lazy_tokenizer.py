"""A tokenizer that is loaded when a stop string or a grammar needs it; most engines see none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from raybatch.text.tokenizer import Tokenizer


class LazyTokenizer:
    """What a `StopChecker` and a grammar need of a tokenizer.

    Args:
        path: folder of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer: Tokenizer | None = None

    def decode(self, token_ids: npt.ArrayLike, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._load().decode(token_ids, skip_special_tokens)

    def hugging_face(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer of transformers; it may not be changed."""
        return self._load().hugging_face

    def _load(self) -> Tokenizer:
        if self._tokenizer is None:
            from raybatch.text.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.load(self._path)
        return self._tokenizer
