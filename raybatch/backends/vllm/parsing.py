"""Parses reasoning and tool calls out of answers with the parsers of vLLM's server."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from raybatch.backends.vllm.adapter import Adapter
from raybatch.errors import ConfigError, encodable, error_text
from raybatch.records.parsed_text import ParsedText, ToolCall
from raybatch.records.payload import CHAT
from raybatch.records.types import Completion, Request, Sampling
from raybatch.text.detokenizer import TokenDecoder, completion_text

_MAX_SHOWN = 300
# a placeholder: parsers read only the tools and options of a request
_MESSAGES = [{"role": "user", "content": ""}]


class OutputParser:
    """Parses the tokens of an answer into text, reasoning and tool calls; used by one thread.

    A row with messages is parsed as by vLLM's server, which looks for tool calls only if the row
    has tools. For other rows the tools are unknown, so each answer is searched for calls. `decoder`
    is raybatch's form of vLLM's tokenizer. If a parser is None, its part stays in the text; if it
    does not exist or does not fit the tokenizer, ConfigError is raised.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        tokenizer: Any,  # noqa: ANN401 - of vLLM
        model_config: Any,  # noqa: ANN401 - of vLLM
        adapter: Adapter,
        *,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
    ) -> None:
        self._vllm = adapter.load("parsers")
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._model_config = model_config
        # ids of this form count the calls of a conversation; others are random
        self._has_own_ids = self._vllm.get_tool_call_id_type(model_config) == "kimi_k2"
        # the chat template of Mistral refuses longer ids
        self._are_ids_short = tool_call_parser == "mistral"
        try:
            self._make: Any = self._vllm.ParserManager.get_parser(
                tool_parser_name=tool_call_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_call_parser is not None,
                model_name=model_config.model,
                is_harmony=model_config.hf_config.model_type == "gpt_oss",
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"backend.options: {error}") from error
        try:
            parser = self._make(tokenizer)
        except Exception as error:  # each parser has its own errors
            names = " and ".join(filter(None, (reasoning_parser, tool_call_parser)))
            raise ConfigError(
                f"backend.options: {names} cannot be used with the tokenizer of the model: "
                f"{error_text(error)}"
            ) from error
        adapter.check(parser, adapter.read_of_parser, "its parser")
        self._takes_prompts = "set_prompt_token_ids" in adapter.read_of_parser
        self._parser_errors = _ParserErrors(adapter.parser_loggers)
        # many rows share few sets of tools
        self._chat_request = lru_cache(maxsize=256)(self._adjusted_request)

    def __call__(self, request: Request, completion: Completion) -> Completion:
        """Return a completion with its text, reasoning and tool calls.

        An error that a parser raises or logs becomes the error of `parsed`; text that is not parsed
        stays in the text. A completion whose tokens cannot be decoded is returned unchanged: the
        stage reports the same error.
        """
        if completion.error:
            return completion
        try:
            whole = self._text(request, completion, request.sampling)
        except Exception:  # ids that the tokenizer does not know
            return completion
        try:
            with self._parser_errors.captured():
                text, parsed = self._parsed(request, completion, whole)
        except Exception as error:  # parsers may fail on any text of a model
            text, parsed = whole, ParsedText(error=_shown(error_text(error)))
        else:
            parsed = replace(parsed, error=_shown(self._parser_errors.message))
        return replace(completion, text=text, parsed=parsed)

    def _text(self, request: Request, completion: Completion, sampling: Sampling) -> str:
        prompt = request.prompt_token_ids
        return completion_text(completion, sampling, self._decoder, prompt)

    def _parsed(
        self, request: Request, completion: Completion, whole: str
    ) -> tuple[str, ParsedText]:
        chat = request.payload.get(CHAT)
        key = json.dumps([chat, request.sampling.skip_special_tokens], sort_keys=True)
        chat_request = self._chat_request(key)
        if chat_request.skip_special_tokens != request.sampling.skip_special_tokens:
            sampling = replace(
                request.sampling, skip_special_tokens=chat_request.skip_special_tokens
            )
            whole = self._text(request, completion, sampling)
        parser = self._parser(chat_request)
        if self._takes_prompts:
            parser.set_prompt_token_ids(request.prompt_token_ids.tolist())
        reasoning, content, calls = parser.parse(
            whole,
            chat_request,
            enable_auto_tools=True,
            model_output_token_ids=completion.token_ids.tolist(),
        )
        tool_calls = []
        for place, call in enumerate(calls or ()):
            call_id = self._id(call, place, completion, request)
            made = ToolCall(id=call_id, name=call.name, arguments=str(call.arguments))
            tool_calls.append(made)
        return content or "", ParsedText(reasoning=reasoning, tool_calls=tuple(tool_calls))

    def _parser(self, chat_request: Any) -> Any:  # noqa: ANN401 - of vLLM
        return self._make(
            self._tokenizer,
            chat_request.tools,
            chat_template_kwargs=chat_request.chat_template_kwargs or {},
            model_config=self._model_config,
        )

    def _adjusted_request(self, key: str) -> Any:  # noqa: ANN401 - of vLLM
        """Return the request as vLLM's server would see it, adjusted by its parsers."""
        chat, skips_special_tokens = json.loads(key)
        options: Mapping[str, Any] = chat or {}
        chat_request = self._vllm.ChatCompletionRequest(
            messages=_MESSAGES,
            tools=options.get("tools") or None,
            chat_template_kwargs={n: value for n, value in options.items() if n != "tools"},
            skip_special_tokens=skips_special_tokens,
        )
        if chat is None:
            chat_request.tool_choice = "auto"
        return self._parser(chat_request).adjust_request(chat_request)

    def _id(self, call: Any, place: int, completion: Completion, request: Request) -> str:  # noqa: ANN401
        """Return the id of a call, the same in every run."""
        if call.id and self._has_own_ids:
            return str(call.id)
        name = f"{request.row_id}\0{completion.sample_idx}\0{place}"
        digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
        return digest[:9] if self._are_ids_short else f"call_{digest}"


class _ParserErrors(logging.Handler):
    """Captures failures that parsers only log; `message` is the last one in this context."""

    def __init__(self, loggers: Sequence[str]) -> None:
        super().__init__()
        self._loggers = loggers
        self.message = ""

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Replace the handlers of the loggers until the end of this context."""
        self.message = ""
        loggers = [logging.getLogger(name) for name in self._loggers]
        before = [(logger.handlers, logger.propagate) for logger in loggers]
        for logger in loggers:
            # a traceback for every row would drown the log
            logger.handlers, logger.propagate = [self], False
        try:
            yield
        finally:
            for logger, (handlers, propagate) in zip(loggers, before, strict=True):
                logger.handlers, logger.propagate = handlers, propagate

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            logging.getLogger("vllm").handle(record)
            return
        cause = record.exc_info[1] if record.exc_info else None
        self.message = record.getMessage() if cause is None else error_text(cause)


def _shown(text: str) -> str:
    return encodable(" ".join(text.split())[:_MAX_SHOWN])
