"""What the stages need of a tokenizer: that of a model, or the stand-in for an endpoint's."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from raybatch.config import SpecialTokens
from raybatch.records.types import TokenIds
from raybatch.text.tokenizer import Encoded


class PromptTokenizer(Protocol):
    """Turns prompts into tokens and tokens into text; see `raybatch.text.tokenizer`."""

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def frame(self) -> tuple[int, int]: ...
    def count_special(self, text: str) -> int: ...
    def template_reads(self, name: str, *, chat_template: str | None = None) -> bool: ...
    def encode(self, text: str, *, special_tokens: SpecialTokens = "escape") -> TokenIds: ...
    def read(self, text: str, *, special_tokens: SpecialTokens = "escape") -> Encoded: ...
    def read_chat(
        self,
        messages: object,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        row_options: Mapping[str, Any] | None = None,
        special_tokens: SpecialTokens = "escape",
        has_images: bool = False,
    ) -> Encoded: ...
    def decode(self, token_ids: npt.ArrayLike, skip_special_tokens: bool = True) -> str: ...
    def decode_batch(
        self, batch: Sequence[npt.ArrayLike], skip_special_tokens: bool = True
    ) -> list[str]: ...
