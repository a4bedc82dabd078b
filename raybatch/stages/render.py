"""From the columns of a row batch to prompt token ids; a row that fails becomes an error value.

One tokenization from template to ids: a chat template writes its own special tokens, a plain prompt
gets those that the tokenizer adds, and nothing is encoded twice.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from raybatch.engine.tokenizer import Tokenizer
from raybatch.errors import ConfigError, did_you_mean
from raybatch.stages.batches import python_rows, python_values
from raybatch.stages.options import Message, OnTooLong, StageConfig
from raybatch.stages.schema import describe_error
from raybatch.stages.template import PromptTemplate
from raybatch.types import Sampling, TokenIds

_ROLES = ("system", "user", "assistant", "tool", "developer")
_CONVENTION = ("messages", "tokenized_prompt", "prompt")

_T = TypeVar("_T")


class Prompt(NamedTuple):
    """The prompt of one row, or why there is none.

    Args:
        token_ids: int32; also given where the prompt is too long.
        error: "" or "Type: message".
        is_filtered: the row is left out on purpose (`on_too_long="drop"`) and keeps its place.
    """

    token_ids: TokenIds | None
    error: str = ""
    is_filtered: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether the row goes to an engine."""
        return not self.error and not self.is_filtered


class Inputs:
    """Where the prompts of a stage come from; built once per feeder.

    Without `prompt`, `messages` and `tokenized_prompt` the first column named messages,
    tokenized_prompt or prompt is taken.
    """

    def __init__(self, config: StageConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = None if config.prompt is None else PromptTemplate.parse(config.prompt)
        self._is_chat = (
            tokenizer.has_chat_template if config.chat == "auto" else bool(config.chat)
        )

    def prompts(self, table: pa.Table) -> list[Prompt]:
        """Return the prompt of each row.

        Raises:
            ConfigError: a column that the stage reads is not there.
        """
        raise NotImplementedError
