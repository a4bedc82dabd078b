"""What raybatch knows of remote engines, which render, tokenize and fetch images themselves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from raybatch.config import BackendConfig, SpecialTokens
from raybatch.text.detokenizer import TokenDecoder
from raybatch.text.tokenizer import Prompt, Tokenizer


class PromptTokenizer(TokenDecoder, Protocol):
    """Makes the prompts of a stage, see `Tokenizer`.

    For an endpoint the payload of a prompt is what is sent, and its ids serve plans.
    """

    vocab_size: int
    special_token_ids: Mapping[str, int]

    @property
    def bos_id(self) -> int | None: ...

    @property
    def has_chat_template(self) -> bool: ...

    def template_reads(self, name: str, *, chat_template: str | None = None) -> bool: ...

    def count_special(self, text: str) -> int: ...

    def read(self, text: str, *, special_tokens: SpecialTokens = "escape") -> Prompt: ...

    def read_chat(
        self,
        messages: object,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        row_options: Mapping[str, Any] | None = None,
        special_tokens: SpecialTokens = "escape",
        has_images: bool = False,
        cut_from: int | None = None,
    ) -> Prompt: ...

    def decode_batch(
        self,
        batch: Sequence[npt.ArrayLike],
        skip_special_tokens: bool = True,
        *,
        after: Sequence[npt.ArrayLike | None] | None = None,
    ) -> list[str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointType:
    """What a kind of endpoint does instead of the driver; one replica handles hundreds of rows."""

    # folder or hub id of the tokenizer that counts the tokens of plans; None if none is named
    tokenizer: Callable[[BackendConfig], str | None]
    # makes prompts, given that tokenizer
    prompts: Callable[[BackendConfig, Tokenizer | None], PromptTokenizer]
    # raises ConfigError for an option of a stage (a `StageConfig`) that the endpoint lacks
    check_stage: Callable[[Any], None]
