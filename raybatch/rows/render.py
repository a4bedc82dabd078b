"""Renders the columns of a row batch to prompt token ids; a failed row becomes an error value.

Each prompt is tokenized once: a chat template writes its own special tokens, a plain prompt gets
those that the tokenizer adds.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raybatch.backends.endpoint import PromptTokenizer
from raybatch.backends.registry import type_of
from raybatch.config import SpecialTokens
from raybatch.errors import ConfigError, error_text
from raybatch.records.parsed_text import REASONING
from raybatch.records.payload import DOCUMENT_AT, TYPES_AT, add_payload
from raybatch.records.types import Sampling
from raybatch.rows.image_files import ImageReader, Images
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import RowInputs, RowReader
from raybatch.rows.row_options import (
    TOOLS,
    Adapters,
    PoolingOptions,
    chat_payload,
    read_template_options,
)
from raybatch.rows.schema import describe_error
from raybatch.text.chat import InvalidPrompt, PromptError, RenderError, lacks_system, read_messages
from raybatch.text.tokenizer import Prompt, Tokenizer, encoding_of

logger = logging.getLogger(__name__)

_CALLS = "tool_calls"
# size of the caches for stop strings and for sampling options with stop strings
_MAX_STOPS = 1000


class PromptReader:
    """Read the prompts of a stage from row batches; built once per feeder.

    Raises:
        ConfigError: the model lacks a chat template that the options need.
    """

    def __init__(
        self, config: StageConfig, tokenizer: PromptTokenizer, *, max_model_len: int | None = None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        # reader for the schema of the last row batch
        self._rows: RowReader | None = None
        self._cut_from = max_model_len if config.on_too_long.startswith("truncate") else None
        self._is_endpoint = type_of(config.backend).is_endpoint
        # a column may set different stop strings in every row
        self._and_stops = lru_cache(maxsize=_MAX_STOPS)(self._find_stops)
        self._stop_id = lru_cache(maxsize=_MAX_STOPS)(self._find_stop_id)
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
        self._pooling = PoolingOptions(config)
        # a text is the column with the tools of each row
        tools = None if isinstance(config.tools, str) else config.tools
        self._stage_options = {} if tools is None else {TOOLS: tools}
        self._is_parsed = not type_of(config.backend).is_endpoint and bool(config.output.parsed)
        template = config.chat_template
        if config.tools is not None and not tokenizer.template_reads(TOOLS, chat_template=template):
            raise ConfigError(
                f"the chat template of {config.model!r} does not support tools; leave tools out, "
                "or set a chat_template that writes them"
            )
        self._drops_calls = has_template and not tokenizer.template_reads(
            _CALLS, chat_template=template
        )
        is_constrained = "structured_outputs" in config.overrides
        is_constrained |= config.sampling.structured_outputs is not None
        if is_constrained and self._thinks():
            logger.warning(
                "structured_outputs apply from the first token of an answer, so this reasoning "
                "model cannot think: set chat_template_kwargs to {'enable_thinking': false} if "
                "the model supports it, or set reasoning_parser in the options of the vLLM "
                "backend to constrain only the text after the thinking"
            )
        is_escaped = config.special_tokens == "escape" and not self._is_chat
        if config.prompt and is_escaped and tokenizer.count_special(config.prompt):
            logger.warning(
                "the prompt template contains special tokens of the model, which become plain "
                "text; set special_tokens='allow' if they are control tokens and the data is "
                "trusted"
            )
        self.with_ends(config.sampling)

    def with_ends(self, sampling: Sampling) -> Sampling:
        """Return options in which a stop string that is a special token is also a stop token.

        Special tokens that are skipped have no text, so the string would never match. If it is part
        of a longer stop string, a warning is logged once.
        """
        if not sampling.stop or not sampling.skip_special_tokens or self._is_endpoint:
            return sampling
        return self._and_stops(sampling)

    def _find_stops(self, sampling: Sampling) -> Sampling:
        ids = [token_id for token_id in map(self._stop_id, sampling.stop) if token_id is not None]
        if not ids:
            return sampling
        return replace(
            sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ids)))
        )

    def _find_stop_id(self, text: str) -> int | None:
        token_id = self._tokenizer.special_token_ids.get(text)
        if token_id is None and self._tokenizer.count_special(text):
            logger.warning(
                "the stop string %r contains a special token, which is not in the text of an "
                "answer, so it never matches; stop at the token alone, or set "
                "sampling.skip_special_tokens: false",
                text,
            )
        return token_id

    def _warn_of_calls(self, messages: list[Any]) -> None:
        """Warn once if messages have tool calls that the chat template drops."""
        if any(isinstance(message, Mapping) and message.get(_CALLS) for message in messages):
            self._drops_calls = False
            logger.warning(
                "the chat template of %r drops the tool_calls of messages; set a chat_template "
                "that writes them",
                self._config.model,
            )

    def _thinks(self) -> bool:
        """Return whether the template makes the model think and no parser removes it."""
        config = self._config
        if not self._is_chat or REASONING in config.output.parsed:
            return False
        if type_of(config.backend).is_endpoint:
            return False
        is_off = config.chat_template_kwargs.get("enable_thinking") is False
        return not is_off and self._tokenizer.template_reads(
            "<think>", chat_template=config.chat_template
        )

    def read(self, table: pa.Table) -> list[Prompt]:
        """Return the prompt of each row, with its pooling options and adapter."""
        rows = self._rows
        if rows is None or not rows.schema.equals(table.schema):
            rows = self._rows = RowReader.open(table.schema, self._config)
        # special tokens in texts of the job itself
        literals = (literal for template in rows.templates for literal, _ in template.layout)
        num_special = sum(map(self._tokenizer.count_special, literals))
        prompts: list[Prompt] = []
        known: dict[str, dict[str, Any] | str] = {}
        unknown_adapters: dict[str, str] = {}
        for row in rows.read(table):
            prompt = self._pooling.on(self._prompt(rows, row, num_special), row.pooling, known)
            prompts.append(self._adapters.on(prompt, row.adapter, unknown_adapters))
        return prompts

    def _prompt(self, rows: RowReader, row: RowInputs, num_special: int) -> Prompt:
        """Return the prompt of a row; exceptions of the row or a user's function are its error."""
        try:
            images, options = self._checked_parts(row)
            return self._encode(rows, row, images, options, num_special)
        except PromptError as error:
            return Prompt(None, error_text(error))
        except ConfigError:
            raise
        except Exception as error:  # the messages function is the user's
            return Prompt(None, describe_error(RenderError.__name__, error_text(error)))

    def _checked_parts(self, row: RowInputs) -> tuple[Images, Mapping[str, Any]]:
        """Return images and template options of a row; InvalidPrompt: a value is not readable."""
        try:
            for part in row.prompt:
                if isinstance(part, Exception):
                    raise part
            options = read_template_options(row)
            return self._images.images_of(row.images), options
        except PromptError:
            raise
        except Exception as error:  # a value pickled by Ray may raise any error
            raise InvalidPrompt(str(error)) from error

    def _encode(
        self,
        rows: RowReader,
        row: RowInputs,
        images: Images,
        options: Mapping[str, Any],
        num_special: int,
    ) -> Prompt:
        value, given = row.prompt[0], self._config.messages
        if rows.form == "ids":
            return self._images.put_in(self._check_ids(value), images)
        if rows.form == "pair":
            return self._encode_pair(*row.prompt).without(num_special)
        if rows.form == "text" and not self._is_chat:
            if not value:  # some tokenizers would still add begin or end tokens
                raise InvalidPrompt("the prompt is empty, and there is no chat template")
            encoded = self._tokenizer.read(value, special_tokens=rows.special_tokens)
            return self._images.put_in(encoded.without(num_special), images)
        if rows.form == "text":
            value = [{"role": "user", "content": value}]
        elif callable(given):
            value = given(value)
        elif rows.form == "contents":
            assert not isinstance(given, str | None), "it is a list of messages"
            pairs = zip(given, row.prompt, strict=True)
            value = [{**message, "content": text} for message, text in pairs]
        return self._encode_messages(value, num_special, options=options, images=images)

    def _encode_pair(self, query: str, document: str) -> Prompt:
        tokenizer, form, mode = self._tokenizer, self._pair_form, self._config.special_tokens
        assert isinstance(tokenizer, Tokenizer), "an endpoint has no task of pairs"
        assert form is not None, "there is a query"
        return read_pair(tokenizer, query, document, form=form, special_tokens=mode)

    def _check_ids(self, value: object) -> Prompt:
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
        return Prompt(whole.astype(np.int32), cuttable=(begin, len(whole)))

    def _encode_messages(
        self,
        messages: Any,  # noqa: ANN401 - data of a row
        num_special: int,
        *,
        options: Mapping[str, Any],
        images: Images,
    ) -> Prompt:
        """Return the prompt of messages, with `num_special` special tokens of the job's texts."""
        config = self._config
        messages, images = self._images.take_out(read_messages(messages), images)
        if config.system is not None and lacks_system(messages):
            messages = [{"role": "system", "content": config.system}, *messages]
            num_special += self._tokenizer.count_special(config.system)
        if self._drops_calls and isinstance(messages, list):
            self._warn_of_calls(messages)
        options = {**self._stage_options, **options}
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


def read_pair(
    tokenizer: Tokenizer,
    query: str,
    document: str,
    *,
    form: Literal["pair", "joined", "apart"],
    special_tokens: SpecialTokens = "escape",
) -> Prompt:
    """Tokenize a query and a document; only tokens of the document may be cut.

    `form`: "pair" is one sequence in the tokenizer's form for two texts, "joined" one sequence of
    the concatenated texts, "apart" two sequences.

    Raises:
        InvalidPrompt: a text is empty.
        TokenizeError: the tokenizer failed.
    """
    for name, text in (("query", query), ("document", document)):
        if not text:
            raise InvalidPrompt(f"the {name} is empty")
    if form == "apart":
        both = [tokenizer.read(text, special_tokens=special_tokens) for text in (query, document)]
        border, (before, after) = len(both[0].known_ids), tokenizer.frame
        ids = np.concatenate([one.known_ids for one in both])
        return Prompt(
            ids,
            num_special=sum(one.num_special for one in both),
            payload=add_payload(None, {DOCUMENT_AT: border}),
            cuttable=(border + before, len(ids) - after),
        )
    fast, num_special = tokenizer.fast_for(query + document, special_tokens)
    if form == "joined":
        encoding = encoding_of(fast, query + document)
        places = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if not places:
            raise InvalidPrompt("prompt is empty")
        stop = places[-1] + 1
        start = next((i for i in places if encoding.offsets[i][0] >= len(query)), stop)
        return Prompt(
            np.asarray(encoding.ids, np.int32), num_special=num_special, cuttable=(start, stop)
        )
    encoding = encoding_of(fast, query, document)
    types = np.asarray(encoding.type_ids)
    places = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    if not places:
        raise InvalidPrompt("the document is empty")
    has_types = tokenizer.has_types and types.any()
    payload = add_payload(None, {TYPES_AT: int(np.argmax(types))} if has_types else {})
    ids, cuttable = np.asarray(encoding.ids, np.int32), (places[0], places[-1] + 1)
    return Prompt(ids, num_special=num_special, payload=payload, cuttable=cuttable)
