"""A tokenizer that is loaded when the first stop string needs text; most engines never see one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy.typing as npt

if TYPE_CHECKING:
    from raybatch.engine.tokenizer import Tokenizer

__all__ = ["LazyTokenizer"]


class LazyTokenizer:
    """The part of a tokenizer that a `StopChecker` needs.

    Args:
        path: folder of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer: Tokenizer | None = None

    def decode(self, token_ids: npt.ArrayLike, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if self._tokenizer is None:
            from raybatch.engine.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.load(self._path)
        return self._tokenizer.decode(token_ids, skip_special_tokens)
