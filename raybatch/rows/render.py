"""From the columns of a row batch to prompt token ids; a row that fails becomes an error value.

One tokenization from template to ids: a chat template writes its own special tokens, a plain prompt
gets those that the tokenizer adds, and nothing is encoded twice.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.backends.registry import type_of
from raybatch.config import SpecialTokens
from raybatch.errors import ConfigError
from raybatch.records.parsed_text import REASONING
from raybatch.records.types import Sampling
from raybatch.rows.batches import nested_values, python_rows, python_values
from raybatch.rows.image_reader import ImageReader, Images
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt import Prompt, make_prompts
from raybatch.rows.prompt_inputs import (
    check_inputs,
    column_of,
    conventional_column,
    ids_column,
    messages_column,
)
from raybatch.rows.row_options import (
    TOOLS,
    Adapters,
    chat_payload,
    read_template_options,
    with_pooling,
)
from raybatch.rows.template import PromptTemplate
from raybatch.text.chat import InvalidPrompt, lacks_system, read_messages
from raybatch.text.pairs import read_pair
from raybatch.text.tokenizer import Encoded, PromptTokenizer, Tokenizer

logger = logging.getLogger(__name__)

_CALLS = "tool_calls"
# stop strings whose tokens are kept; a column may have others in every row
_MAX_STOPS = 1000


class PromptReader:
    """Reads the prompts of a stage from row batches; built once per feeder.

    Without `prompt`, `messages` and `tokenized_prompt` the first of the `conventional_columns` that
    is there is taken, `prompt` as a template of its own. A model that lacks the chat template it
    needs is a ConfigError.
    """

    def __init__(
        self, config: StageConfig, tokenizer: PromptTokenizer, *, max_model_len: int | None = None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._cut_from = max_model_len if config.on_too_long.startswith("truncate") else None
        self._is_endpoint = type_of(config.backend).is_endpoint
        self._stops: dict[str, tuple[int, ...]] = {}
        # of the row before: its options, and what became of them
        self._last_ends = config.sampling, config.sampling
        has_template = tokenizer.has_chat_template or config.chat_template is not None
        self._is_chat = config.is_chat(has_template=has_template)
        needs_template = config.messages is not None or config.chat is True or config.system
        if needs_template and not has_template:
            raise ConfigError(
                f"model {config.model!r} has no chat template, which messages, system and "
                "chat=True need; use prompt= with chat=False for plain text"
            )
        form = type_of(config.backend).score_form
        self._pair_form = None if config.query is None else form(config.backend, config.model)
        self._images = ImageReader(config, tokenizer.vocab_size)
        self._adapters = Adapters(config)
        # the name of a column stands for tools of each row
        tools = None if isinstance(config.tools, str) else config.tools
        self._stage_options = {} if tools is None else {TOOLS: tools}
        self._is_parsed = not type_of(config.backend).is_endpoint and bool(config.output.parsed)
        template = config.chat_template
        if config.tools is not None and not tokenizer.template_reads(TOOLS, chat_template=template):
            raise ConfigError(
                f"the chat template of {config.model!r} has no place for tools; leave tools out, "
                "or give a chat_template that writes them"
            )
        self._drops_calls = has_template and not tokenizer.template_reads(
            _CALLS, chat_template=template
        )
        is_constrained = "structured_outputs" in config.overrides
        is_constrained |= config.sampling.structured_outputs is not None
        if is_constrained and self._thinks():
            logger.warning(
                "the model thinks before it answers, and structured_outputs hold from the first "
                "token of an answer on, so that it does not think: set chat_template_kwargs to "
                "{'enable_thinking': false} if it knows that, or reasoning_parser in the options "
                "of the vLLM backend, with which they begin after the thinking"
            )
        is_escaped = config.special_tokens == "escape" and not self._is_chat
        if config.prompt and is_escaped and tokenizer.count_special(config.prompt):
            logger.warning(
                "the prompt template writes special tokens of the model, which become plain text; "
                "set special_tokens='allow' if they are meant as control tokens and the data can "
                "be trusted"
            )
        self.with_ends(config.sampling)

    def with_ends(self, sampling: Sampling) -> Sampling:
        """Return options in which a stop string that is a special token is a stop token as well.

        Such a token has no text where special tokens are left out. One in the midst of a stop
        string is warned of once.
        """
        if not sampling.stop or not sampling.skip_special_tokens or self._is_endpoint:
            return sampling
        # most rows share one record
        if not self._stops or sampling is not self._last_ends[0]:
            self._last_ends = sampling, self._and_stops(sampling)
        return self._last_ends[1]

    def _and_stops(self, sampling: Sampling) -> Sampling:
        ids = [token_id for text in sampling.stop for token_id in self._stop_ids(text)]
        if not ids:
            return sampling
        return replace(
            sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ids)))
        )

    def _stop_ids(self, text: str) -> tuple[int, ...]:
        if text not in self._stops:
            if len(self._stops) >= _MAX_STOPS:
                self._stops.clear()
            token_id = self._tokenizer.special_token_ids.get(text)
            self._stops[text] = () if token_id is None else (token_id,)
            if token_id is None and self._tokenizer.count_special(text):
                logger.warning(
                    "the stop string %r has a special token in it, which is no text of an answer, "
                    "so it cannot stop one; stop at the token alone, or set "
                    "sampling.skip_special_tokens: false",
                    text,
                )
        return self._stops[text]

    def _warn_of_calls(self, messages: list[Any]) -> None:
        """Warn once where messages have calls that the chat template leaves out."""
        if any(isinstance(message, Mapping) and message.get(_CALLS) for message in messages):
            self._drops_calls = False
            logger.warning(
                "messages have tool_calls, and the chat template of %r leaves them out; give a "
                "chat_template that writes them",
                self._config.model,
            )

    def _thinks(self) -> bool:
        """Return whether the template has a place for thinking that nothing takes out."""
        config = self._config
        if not self._is_chat or REASONING in config.output.parsed:
            return False
        if type_of(config.backend).is_endpoint:
            return False
        is_off = config.chat_template_kwargs.get("enable_thinking") is False
        return not is_off and self._tokenizer.template_reads(
            "<think>", chat_template=config.chat_template
        )

    def read(self, table: pa.Table) -> Sequence[Prompt]:
        """Return the prompt of each row, with its options of pooling and its adapter."""
        config = self._config
        check_inputs(table.schema, config)
        prompts = self._read(table, config, conventional_column(table.schema, config))
        pooling, column = config.pooling, config.pooling_column
        pooled = with_pooling(prompts, table, pooling=pooling, column=column)
        return self._adapters.on(pooled, table)

    def _read(self, table: pa.Table, config: StageConfig, conventional: str | None) -> list[Prompt]:
        if config.prompt is not None:
            return self._from_template(config.prompt, table, config.special_tokens)
        if conventional == "prompt":
            mode = config.prompt_column_special_tokens or config.special_tokens
            return self._from_template("{prompt}", table, mode)
        if config.query is not None and config.document is not None:
            return self._from_pairs(table, config.query, config.document)
        if (name := ids_column(config, conventional)) is not None:
            return self._from_ids(table, name)
        if (name := messages_column(config, conventional)) is not None:
            return self._from_column(table, name)
        return self._from_messages(table)

    def _from_template(self, text: str, table: pa.Table, mode: SpecialTokens) -> list[Prompt]:
        template = PromptTemplate(text)
        num_special = self._count_special(template)

        def encode(row: tuple[str, Images]) -> Encoded:
            text, images = row
            if self._is_chat:
                messages = [{"role": "user", "content": text}]
                return self._encode_messages(messages, num_special, images=images)
            if not text:  # the tokens that some tokenizers put around it ask nothing
                raise InvalidPrompt("the prompt is empty, and no chat template adds anything to it")
            encoded = self._tokenizer.read(text, special_tokens=mode).without(num_special)
            return self._images.put_in(encoded, images)

        rows = zip(template.render_column(table), self._images.of_rows(table), strict=True)
        return make_prompts(rows, encode)

    def _from_pairs(self, table: pa.Table, query: str, document: str) -> list[Prompt]:
        tokenizer, form, mode = self._tokenizer, self._pair_form, self._config.special_tokens
        assert isinstance(tokenizer, Tokenizer), "an endpoint has no task of pairs"
        assert form is not None, "there is a query"
        templates = [PromptTemplate(query), PromptTemplate(document)]
        num_special = self._count_special(*templates)

        def encode(pair: tuple[str, str]) -> Encoded:
            encoded = read_pair(tokenizer, *pair, form=form, special_tokens=mode)
            return encoded.without(num_special)

        return make_prompts(zip(*(t.render_column(table) for t in templates), strict=True), encode)

    def _from_messages(self, table: pa.Table) -> list[Prompt]:
        messages = self._config.messages
        if callable(messages):
            make = messages
            return make_prompts(python_rows(table), lambda row: self._encode_messages(make(row)))
        assert messages is not None, "check_inputs has refused a table without prompts"
        assert not isinstance(messages, str), "a column is read otherwise"
        templates = [(m, PromptTemplate(m["content"])) for m in messages]
        num_special = self._count_special(*(template for _, template in templates))

        def encode(contents: tuple[str, ...]) -> Encoded:
            filled = [
                {**m, "content": text} for (m, _), text in zip(templates, contents, strict=True)
            ]
            return self._encode_messages(filled, num_special)

        columns = [template.render_column(table) for _, template in templates]
        return make_prompts(zip(*columns, strict=True), encode)

    def _from_column(self, table: pa.Table, name: str) -> list[Prompt]:
        def encode(row: tuple[Any, Any, Any]) -> Encoded:
            messages, options, images = row
            return self._encode_messages(messages, template_options=options, images=images)

        values, images = nested_values(column_of(table, name)), self._images.of_rows(table)
        rows = zip(values, read_template_options(table, self._config), images, strict=True)
        return make_prompts(rows, encode)

    def _from_ids(self, table: pa.Table, name: str) -> list[Prompt]:
        rows = zip(python_values(column_of(table, name)), self._images.of_rows(table), strict=True)
        put_in = self._images.put_in
        return make_prompts(rows, lambda row: put_in(self._check_ids(row[0]), row[1]))

    def _count_special(self, *templates: PromptTemplate) -> int:
        """Return the special tokens that texts of the job itself hold."""
        count = self._tokenizer.count_special
        return sum(count(literal) for template in templates for literal, _ in template.layout)

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
        begin = int(whole[0] == self._tokenizer.bos_id)
        return Encoded(whole.astype(np.int32), cuttable=(begin, len(whole)))

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
        messages, images = self._images.take_out(read_messages(messages), images)
        if config.system is not None and lacks_system(messages):
            messages = [{"role": "system", "content": config.system}, *messages]
            num_special += self._tokenizer.count_special(config.system)
        if self._drops_calls and isinstance(messages, list):
            self._warn_of_calls(messages)
        options = {**self._stage_options, **(template_options or {})}
        encoded = self._tokenizer.read_chat(
            messages,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
            row_options=options,
            special_tokens=config.special_tokens,
            has_images=bool(images),
            cut_from=self._cut_from,
        ).without(num_special)
        if self._is_parsed:
            payload = chat_payload({**config.chat_template_kwargs, **options})
            encoded = encoded._replace(payload=payload)
        return self._images.put_in(encoded, images)
