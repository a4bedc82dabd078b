"""From the columns of a row batch to prompt token ids; a row that fails becomes an error value.

One tokenization from template to ids: a chat template writes its own special tokens, a plain prompt
gets those that the tokenizer adds, and nothing is encoded twice.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.backends.registry import type_of
from raybatch.config import SpecialTokens
from raybatch.errors import ConfigError
from raybatch.rows.batches import python_rows, python_values
from raybatch.rows.image_reader import ImageReader, Images
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt import Prompt, make_prompts
from raybatch.rows.prompt_inputs import check_inputs, column_of, conventional_column
from raybatch.rows.row_options import (
    TOOLS,
    Adapters,
    chat_payload,
    read_template_options,
    stage_template_options,
    template_columns,
    with_pooling,
)
from raybatch.rows.template import PromptTemplate
from raybatch.text.chat import InvalidPrompt
from raybatch.text.pairs import read_pair, with_frame
from raybatch.text.tokenizer import Encoded, PromptTokenizer, Tokenizer

logger = logging.getLogger(__name__)


class PromptReader:
    """Reads the prompts of a stage from row batches; built once per feeder.

    Args:
        config: of the stage. Without `prompt`, `messages` and `tokenized_prompt` the first of
            its `conventional_columns` that is there is taken, `prompt` as a template of its own.

    Raises:
        ConfigError: the stage needs a chat template and the model has none.
    """

    def __init__(self, config: StageConfig, tokenizer: PromptTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        has_template = tokenizer.has_chat_template or config.chat_template is not None
        # what is pooled is the text itself
        is_auto = has_template and config.task == "generate"
        self._is_chat = is_auto if config.chat == "auto" else bool(config.chat)
        needs_template = config.messages is not None or config.chat is True or config.system
        if needs_template and not has_template:
            raise ConfigError(
                f"model {config.model!r} has no chat template, which messages, system and "
                "chat=True need; use prompt= with chat=False for plain text"
            )
        self._read_pair = None if config.query is None else _pair_reader(config, tokenizer)
        self._images = ImageReader(config, tokenizer.vocab_size)
        self._adapters = Adapters(config)
        self._stage_options = stage_template_options(config)
        self._is_parsed = not type_of(config.backend).is_endpoint and bool(config.output.parsed)
        template = config.chat_template
        if config.tools is not None and not tokenizer.template_reads(TOOLS, chat_template=template):
            raise ConfigError(
                f"the chat template of {config.model!r} has no place for tools; leave tools out, "
                "or give a chat_template that writes them"
            )
        is_escaped = config.special_tokens == "escape" and not self._is_chat
        if config.prompt and is_escaped and tokenizer.count_special(config.prompt):
            logger.warning(
                "the prompt template writes special tokens of the model, which become plain text; "
                "set special_tokens='allow' if they are meant as control tokens and the data can "
                "be trusted"
            )

    def read(self, table: pa.Table) -> Sequence[Prompt]:
        """Return the prompt of each row, with its options of pooling and its adapter.

        Raises:
            ConfigError: a column that the stage reads is not there, or of no use as a prompt.
        """
        config = self._config
        check_inputs(table.schema, config)
        prompts = self._read(table)
        prompts = with_pooling(prompts, table, pooling=config.pooling, column=config.pooling_column)
        return self._adapters.on(prompts, table)

    def _read(self, table: pa.Table) -> Sequence[Prompt]:
        config = self._config
        if config.prompt is not None:
            template = PromptTemplate(config.prompt)
            return self._from_template(template, table, config.special_tokens)
        if self._read_pair is not None and config.query is not None and config.document is not None:
            return self._from_pairs(table, config.query, config.document, self._read_pair)
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
        return self._from_column(table, name)

    def _from_template(
        self, template: PromptTemplate, table: pa.Table, special_tokens: SpecialTokens
    ) -> list[Prompt]:
        num_special = self._count_special(literal for literal, _ in template.layout)

        def encode(row: tuple[str, Images]) -> Encoded:
            text, images = row
            if self._is_chat:
                messages = [{"role": "user", "content": text}]
                return self._encode_messages(messages, num_special, images=images)
            if not text:  # the tokens that some tokenizers put around it ask nothing
                raise InvalidPrompt("the prompt is empty, and no chat template adds anything to it")
            encoded = self._tokenizer.read(text, special_tokens=special_tokens).without(num_special)
            if self._config.task != "generate":
                encoded = with_frame(encoded, self._tokenizer)
            return self._images.put_in(encoded, images)

        texts, errors = template.render_column(table)
        images = self._images.of_rows(table)
        rows = ((text, of_row) for text, of_row in zip(texts, images, strict=True))
        encoded = iter(
            make_prompts((_or_failed(row) for row in rows if row[0] is not None), encode)
        )
        return [Prompt(None, error) if error else next(encoded) for error in errors]

    def _from_pairs(
        self, table: pa.Table, query: str, document: str, read: Callable[[str, str], Encoded]
    ) -> list[Prompt]:
        templates = [PromptTemplate(query), PromptTemplate(document)]
        num_special = self._count_special(literal for t in templates for literal, _ in t.layout)
        (queries, errors), (documents, others) = (t.render_column(table) for t in templates)
        errors = [one or other for one, other in zip(errors, others, strict=True)]

        pairs = zip(queries, documents, strict=True)
        good = ((one, other) for one, other in pairs if one is not None and other is not None)
        encoded = iter(make_prompts(good, lambda pair: read(*pair).without(num_special)))
        return [Prompt(None, error) if error else next(encoded) for error in errors]

    def _from_messages(self, table: pa.Table) -> list[Prompt]:
        messages = self._config.messages
        if isinstance(messages, str):
            return self._from_column(table, messages)
        if callable(messages):
            make = messages
            return make_prompts(python_rows(table), lambda row: self._encode_messages(make(row)))
        assert messages is not None, "read() asks for messages only where they are set"
        templates = [(m, PromptTemplate(m["content"])) for m in messages]
        fields = sorted(set().union(*(t.fields for _, t in templates)))
        num_special = self._count_special(literal for _, t in templates for literal, _ in t.layout)
        return make_prompts(
            python_rows(table.select(fields)),
            lambda row: self._encode_messages(
                [{**m, "content": t.render(row)} for m, t in templates], num_special
            ),
        )

    def _from_column(self, table: pa.Table, name: str) -> list[Prompt]:
        values = python_values(column_of(table, name))
        if not template_columns(self._config) and not self._images.has_column(table):
            return make_prompts(values, self._encode_messages)

        def encode(row: tuple[Any, Any, Any]) -> Encoded:
            messages, options, images = row
            return self._encode_messages(messages, template_options=options, images=images)

        images = self._images.of_rows(table)
        rows = zip(values, read_template_options(table, self._config), images, strict=True)
        return make_prompts((_or_failed(row) for row in rows), encode)

    def _from_ids(self, table: pa.Table, name: str) -> list[Prompt]:
        values = python_values(column_of(table, name))
        if not self._images.has_column(table):
            return make_prompts(values, self._check_ids)
        rows = zip(values, self._images.of_rows(table), strict=True)
        return make_prompts(
            (_or_failed(row) for row in rows),
            lambda row: self._images.put_in(self._check_ids(row[0]), row[1]),
        )

    def _count_special(self, literals: Iterable[str]) -> int:
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
        num_special: int = 0,
        *,
        template_options: Mapping[str, Any] | None = None,
        images: Images = (),
    ) -> Encoded:
        """Return the prompt of messages; `num_special` special tokens in them are the job's own."""
        config = self._config
        if isinstance(messages, str):
            messages = _parse_messages(messages)
        messages, images = self._images.take_out(messages, images)
        if config.system is not None and isinstance(messages, Sequence) and messages:
            first = messages[0]
            if not (isinstance(first, Mapping) and first.get("role") == "system"):
                messages = [{"role": "system", "content": config.system}, *messages]
                num_special += self._count_special([config.system])
        options = {**self._stage_options, **(template_options or {})}
        encoded = self._tokenizer.read_chat(
            messages,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
            row_options=options,
            special_tokens=config.special_tokens,
            has_images=bool(images),
        ).without(num_special)
        if self._is_parsed:
            payload = chat_payload({**config.chat_template_kwargs, **options})
            encoded = encoded._replace(payload=payload)
        return self._images.put_in(encoded, images)


def _or_failed(row: tuple[Any, ...]) -> Any:  # noqa: ANN401 - data of a row
    """Return the values of a row, or the first of them that is an exception."""
    return next((value for value in row if isinstance(value, Exception)), row)


def _pair_reader(config: StageConfig, tokenizer: PromptTokenizer) -> Callable[[str, str], Encoded]:
    """Return what makes one prompt of a query and a document, as the model reads them."""
    assert isinstance(tokenizer, Tokenizer), "an endpoint has no task of pairs"
    form = type_of(config.backend).score_form(config.backend, config.model)
    return partial(read_pair, tokenizer, form=form, special_tokens=config.special_tokens)


def _parse_messages(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidPrompt(f"messages are a text and not JSON: {error}") from error
