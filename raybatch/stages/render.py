"""From the columns of a row batch to prompt token ids; a row that fails becomes an error value.

One tokenization from template to ids: a chat template writes its own special tokens, a plain prompt
gets those that the tokenizer adds, and nothing is encoded twice.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raybatch.config import SpecialTokens
from raybatch.engine.prompt_errors import InvalidPrompt, PromptError, RenderError
from raybatch.engine.tokenizer import Encoded, Tokenizer
from raybatch.errors import ConfigError, error_text
from raybatch.stages.batches import python_rows, python_values
from raybatch.stages.inputs import check_inputs, column_of, conventional_column
from raybatch.stages.options import OnTooLong, StageConfig
from raybatch.stages.schema import describe_error
from raybatch.stages.template import PromptTemplate
from raybatch.types import TokenIds

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """The prompt of one row, or why there is none.

    Args:
        token_ids: int32; also given where the prompt is too long.
        error: "" or "Type: message".
        is_filtered: the row is left out on purpose (`on_too_long="drop"`) and keeps its place.
        num_special: special tokens of the model in the texts of the row.
    """

    token_ids: TokenIds | None
    error: str = ""
    is_filtered: bool = False
    num_special: int = 0

    @property
    def is_asked(self) -> bool:
        """Whether the row goes to an engine."""
        return not self.error and not self.is_filtered


class PromptReader:
    """Reads the prompts of a stage from row batches; built once per feeder.

    Args:
        config: of the stage. Without `prompt`, `messages` and `tokenized_prompt` the first of
            its `conventional_columns` that is there is taken, `prompt` as a template of its own.
        tokenizer: of the model.

    Raises:
        ConfigError: the stage needs a chat template and the model has none.
    """

    def __init__(self, config: StageConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        has_template = tokenizer.has_chat_template or config.chat_template is not None
        self._is_chat = has_template if config.chat == "auto" else bool(config.chat)
        needs_template = config.messages is not None or config.chat is True or config.system
        if needs_template and not has_template:
            raise ConfigError(
                f"model {config.model!r} has no chat template, which messages, system and "
                "chat=True need; use prompt= with chat=False for plain text"
            )
        is_escaped = config.special_tokens == "escape" and not self._is_chat
        if config.prompt and is_escaped and tokenizer.count_special(config.prompt):
            logger.warning(
                "the prompt template writes special tokens of the model, which become plain text; "
                "set special_tokens='allow' if they are meant as control tokens and the data can "
                "be trusted"
            )

    def read(self, table: pa.Table) -> list[Prompt]:
        """Return the prompt of each row.

        Raises:
            ConfigError: a column that the stage reads is not there, or of no use as a prompt.
        """
        config = self._config
        check_inputs(table.schema, config)
        if config.prompt is not None:
            template = PromptTemplate(config.prompt)
            return self._from_template(template, table, config.special_tokens)
        if config.messages is not None:
            return self._from_messages(table)
        if config.tokenized_prompt is not None:
            return self._from_ids(table, config.tokenized_prompt)
        name = conventional_column(table.schema, config)
        assert name is not None, "check_inputs has refused a table without prompts"
        return self._from_convention(table, name)

    def _from_convention(self, table: pa.Table, name: str) -> list[Prompt]:
        if name == "prompt":
            mode = self._config.prompt_column_special_tokens or self._config.special_tokens
            return self._from_template(PromptTemplate("{prompt}"), table, mode)
        if name == "tokenized_prompt":
            return self._from_ids(table, name)
        return _each(python_values(column_of(table, name)), self._encode_messages)

    def _from_template(
        self, template: PromptTemplate, table: pa.Table, special_tokens: SpecialTokens
    ) -> list[Prompt]:
        own = self._num_special(literal for literal, _ in template.layout)

        def encode(text: str) -> Encoded:
            if self._is_chat:
                return self._encode_messages([{"role": "user", "content": text}], own)
            if not text:  # the tokens that some tokenizers put around it ask nothing
                raise InvalidPrompt("the prompt is empty, and no chat template adds anything to it")
            return self._tokenizer.read(text, special_tokens=special_tokens).without(own)

        texts, errors = template.render_column(table)
        encoded = iter(_each((text for text in texts if text is not None), encode))
        return [Prompt(None, error) if error else next(encoded) for error in errors]

    def _from_messages(self, table: pa.Table) -> list[Prompt]:
        messages = self._config.messages
        if isinstance(messages, str):
            return self._from_column(table, messages)
        if callable(messages):
            make = messages
            return _each(python_rows(table), lambda row: self._encode_messages(make(row)))
        assert messages is not None, "read() asks for messages only where they are set"
        templates = [(m, PromptTemplate(m["content"])) for m in messages]
        fields = sorted(set().union(*(t.fields for _, t in templates)))
        own = self._num_special(literal for _, t in templates for literal, _ in t.layout)
        return _each(
            python_rows(table.select(fields)),
            lambda row: self._encode_messages(
                [{**m, "content": t.render(row)} for m, t in templates], own
            ),
        )

    def _from_column(self, table: pa.Table, name: str) -> list[Prompt]:
        values = python_values(column_of(table, name))
        options = self._config.chat_template_kwargs_column
        if options is None:
            return _each(values, self._encode_messages)

        def encode(row: tuple[Any, Any]) -> Encoded:
            messages, own = row
            return self._encode_messages(messages, template_options=_parse_options(own))

        rows = zip(values, python_values(column_of(table, options)), strict=True)
        return _each(
            (next((v for v in row if isinstance(v, Exception)), row) for row in rows), encode
        )

    def _from_ids(self, table: pa.Table, name: str) -> list[Prompt]:
        return _each(python_values(column_of(table, name)), self._check_ids)

    def _num_special(self, literals: Iterable[str]) -> int:
        """Return the special tokens that texts of the job itself hold."""
        return sum(map(self._tokenizer.count_special, literals))

    def _check_ids(self, value: object) -> Encoded:
        if value is None:
            raise InvalidPrompt("the tokenized prompt is null")
        ids = np.asarray(value)
        if ids.ndim != 1 or not len(ids):
            raise InvalidPrompt("the tokenized prompt must be a list of at least one token id")
        whole = ids.astype(np.int64) if ids.dtype.kind in "iuf" else None
        if whole is None or (whole != ids).any():
            raise InvalidPrompt("the tokenized prompt must hold whole numbers without nulls")
        if whole.min() < 0 or whole.max() >= self._tokenizer.vocab_size:
            raise InvalidPrompt(
                f"a token id of the prompt is outside the vocabulary of "
                f"{self._tokenizer.vocab_size} tokens"
            )
        return Encoded(whole.astype(np.int32))

    def _encode_messages(
        self,
        messages: Any,  # noqa: ANN401 - data of a row
        own: int = 0,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> Encoded:
        """Return the prompt of messages; `own` special tokens in them are the job's."""
        config = self._config
        if isinstance(messages, str):
            messages = _parse_messages(messages)
        if config.system is not None and isinstance(messages, Sequence) and messages:
            first = messages[0]
            if not (isinstance(first, Mapping) and first.get("role") == "system"):
                messages = [{"role": "system", "content": config.system}, *messages]
                own += self._num_special([config.system])
        return self._tokenizer.read_chat(
            messages,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
            row_options=template_options,
            special_tokens=config.special_tokens,
        ).without(own)


def _parse_messages(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidPrompt(f"messages are a text and not JSON: {error}") from error


def _parse_options(value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - data of a row
    if value is None or value == "":
        return {}
    try:
        options = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidPrompt(f"options of the chat template are no JSON: {error}") from error
    if not isinstance(options, Mapping):
        raise InvalidPrompt(f"options of the chat template are no JSON object: {value!r}")
    return {name: option for name, option in options.items() if option is not None}


def fit_prompt(
    prompt: Prompt, *, max_tokens: int, max_model_len: int | None, on_too_long: OnTooLong
) -> Prompt:
    """Return the prompt as it fits the context, cut or refused as the stage asks.

    A prompt fits if one token can follow it; a cut one leaves room for `max_tokens` where the
    context is longer than that.
    """
    ids = prompt.token_ids
    if max_model_len is None or ids is None or prompt.error or len(ids) < max_model_len:
        return prompt
    if on_too_long == "drop":
        return prompt._replace(is_filtered=True)
    if on_too_long == "error":
        error = (
            f"PromptTooLong: {len(ids)} prompt tokens leave no room in a context of "
            f"{max_model_len}; set on_too_long to cut or drop such rows"
        )
        return prompt._replace(error=error)
    room = max_model_len - max_tokens if max_tokens < max_model_len else 1
    cut = ids[-room:] if on_too_long == "truncate_left" else ids[:room]
    return prompt._replace(token_ids=cut)


def _each(values: Iterable[Any], make: Callable[[Any], Encoded]) -> list[Prompt]:
    """Make a prompt of each value; what a row or a user's function raises is the row's error."""
    prompts: list[Prompt] = []
    for value in values:
        try:
            if isinstance(value, Exception):
                raise InvalidPrompt(str(value))
            found = make(value)
            prompts.append(Prompt(found.token_ids, num_special=found.num_special))
        except PromptError as error:
            prompts.append(Prompt(None, error_text(error)))
        except ConfigError:
            raise
        except Exception as error:  # the messages function is the user's
            cause = describe_error(RenderError.__name__, error_text(error))
            prompts.append(Prompt(None, cause))
    return prompts
