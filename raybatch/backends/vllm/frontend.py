"""The frontend of vLLM's engine, always in this process: prompts to tokens, tokens to answers.

It works with a scheduler in this process or in others. Requests have a key, a text; vLLM has a
separate id for each. Reasoning and tool calls are parsed with the parsers of vLLM's server.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from raybatch.backends.base import ScoreForm
from raybatch.backends.vllm.adapter import Adapter
from raybatch.backends.vllm.requests import Answer, Progress, RequestRefused, pooling_task
from raybatch.errors import ConfigError, encodable, error_text
from raybatch.models.source import resolve_adapter
from raybatch.records.parsed_text import ParsedText, ToolCall
from raybatch.records.payload import CHAT, IMAGES, LORA, TYPES_AT
from raybatch.records.types import Capacity, Completion, Request, Sampling, Task, TokenLogprobs
from raybatch.text.detokenizer import TokenDecoder, completion_text
from raybatch.text.tokenizer import Tokenizer

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


# an engine lives for days, and a bucket may be back by then; not every row costs an attempt
_REFUSED_FOR_S = 60.0


class VllmAdapters:
    """The LoRA adapters of one engine of vLLM.

    Each is loaded when it is first requested, not in a step, where a failure would end the engine.
    `make` is vLLM's class `LoRARequest`; `load` loads such a request into the engine, and may raise
    anything.
    """

    def __init__(
        self,
        make: Callable[[str, int, str], Any],
        load: Callable[[Any], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._load = load
        self._clock = clock
        # vLLM may hold half of one that has failed: its id is not used again
        self._ids = count(1)
        self._loaded: dict[str, Any] = {}
        # by source: until when, and why
        self._refused: dict[str, tuple[float, str]] = {}

    def find(self, source: str | None) -> Any:  # noqa: ANN401 - vLLM's
        """Return vLLM's `LoRARequest` of an adapter, and load it if needed; None for no adapter.

        Raises RequestRefused if loading fails, or failed within the last minute.
        """
        if source is None:
            return None
        if source in self._loaded:
            return self._loaded[source]
        until, message = self._refused.get(source, (0.0, ""))
        if message and self._clock() < until:
            raise RequestRefused(message)
        try:
            request = self._make(source, next(self._ids), resolve_adapter(source))
            self._load(request)
        except Exception as error:  # whatever reads the files may raise anything
            message = f"the adapter {source!r} cannot be loaded: {error_text(error)}"
            self._refused[source] = self._clock() + _REFUSED_FOR_S, message
            raise RequestRefused(message) from error
        self._refused.pop(source, None)
        self._loaded[source] = request
        return request


class Made(NamedTuple):
    """A request in vLLM's own types."""

    prompt: Any
    params: Any
    adapter: Any  # None for none


class Frontend:
    """Makes requests for an engine of vLLM and converts its outputs.

    `load` loads a `LoRARequest` into the engine.
    """

    def __init__(self, engine: Any, adapter: Adapter, load: Callable[[Any], object]) -> None:  # noqa: ANN401 - of vLLM
        adapter.check(engine, adapter.read, "its engine")
        self._engine = engine
        self._adapter = adapter
        self._vllm = adapter.load("engine")
        self._adapters = VllmAdapters(self._vllm.LoRARequest, load)
        self._pooling_task: str | None = None
        # keys of requests whose logits are not numbers
        self.not_finite: set[str] = set()
        # of all requests, also of those that are gone
        self.generated_tokens = 0
        # what vLLM raises where it does not take one request
        self.refusals = (
            self._vllm.VLLMClientError,
            self._vllm.MultiModalCacheMissError,
            ValueError,
            NotImplementedError,
        )
        # and what it raises where one that it has taken ends so
        self.ends_of_one = (self._vllm.VLLMClientError, self._vllm.GenerationError)
        # that of a request whose images vLLM takes for sent, and its core has not
        self.images_gone = self._vllm.MultiModalCacheMissError

    def pool_for(self, task: Task, form: ScoreForm, supported: Sequence[str]) -> None:
        """Make requests of a pooling task from now on, or raise ConfigError.

        `form` says how the model gets query and document of a score, see `ScoreForm`; `supported`
        are the engine's tasks.
        """
        config = self._engine.vllm_config.model_config
        self._pooling_task = pooling_task(
            task,
            [name for name in supported if name in self._vllm.POOLING_TASKS],
            form=form,
            num_labels=int(getattr(config.hf_config, "num_labels", 0)),
        )
        if task == "score" and form != "apart" and config.use_sep_token != (form == "pair"):
            raise ConfigError(
                "the model config does not say whether a separator token is between query and "
                "document; set engine_kwargs.hf_overrides to "
                f"{{'use_sep_token': {config.use_sep_token}}}"
            )

    def capacity(self) -> Capacity:
        """Return the capacity of the engine, summed over its data-parallel ranks."""
        config = self._engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        num_ranks = config.parallel_config.data_parallel_size
        return Capacity(
            # of which vLLM has the sum
            kv_tokens=cache.num_gpu_blocks * cache.block_size,
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=num_ranks * scheduler.max_num_seqs,
            block_size=cache.block_size,
            max_batched_tokens=num_ranks * scheduler.max_num_batched_tokens,
        )

    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""
        return int(self._engine.vllm_config.model_config.get_vocab_size())

    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids of the model's end tokens."""
        known = self._engine.input_processor.generation_config_fields.get("eos_token_id")
        ids = {*_as_list(known), *self._ends_of_config, self._engine.renderer.get_eos_token_id()}
        return frozenset(token_id for token_id in ids if token_id is not None)

    @property
    def _ends_of_config(self) -> list[int]:
        """End tokens of config.json, which vLLM leaves out beside a generation_config.json."""
        config = self._engine.vllm_config.model_config.hf_text_config
        ids = _as_list(getattr(config, "eos_token_id", None))
        return [token_id for token_id in ids if 0 <= token_id < self.vocab_size()]

    def output_parser(self, **names: str | None) -> OutputParser:
        """Return the parser that takes reasoning and tool calls out of answers.

        `names` are `reasoning_parser` and `tool_call_parser`, see `OutputParser`.
        """
        config = self._engine.vllm_config.model_config
        decoder = Tokenizer.load(config.model)
        tokenizer = self._engine.renderer.get_tokenizer()
        return OutputParser(decoder, tokenizer, config, self._adapter, **names)

    def make(self, token_ids: list[int], options: Mapping[str, Any]) -> Made:
        """Return a request in vLLM's types, or raise RequestRefused or one of `refusals`.

        Args:
            token_ids: prompt; not empty, and all ids in the model's vocabulary.
            options: of `SamplingParams`, or of `PoolingParams` after `pool_for`. Further keys:
                `LORA` is the adapter, `IMAGES` the image files for the prompt's placeholders,
                `TYPES_AT` the position where the second token type begins.
        """
        # first what may be refused: images count as sent once the prompt is made
        own = {n: value for n, value in options.items() if n not in (LORA, IMAGES, TYPES_AT)}
        if self._pooling_task is not None:
            if (types_at := options.get(TYPES_AT)) is not None:
                types = (types_at, len(token_ids)) if self._adapter.types_are_ranges else types_at
                own["extra_kwargs"] = {"compressed_token_type_ids": types}
            params = self._vllm.PoolingParams(task=self._pooling_task, **own)
        else:
            if (constraint := own.get("structured_outputs")) is not None:
                own["structured_outputs"] = self._vllm.StructuredOutputsParams(**constraint)
            if not own.get("ignore_eos"):
                ends = {*own.get("stop_token_ids", ()), *self._ends_of_config}
                own["stop_token_ids"] = sorted(ends)
            params = self._vllm.SamplingParams(
                **own,
                detokenize=bool(own.get("stop")),
                output_kind=self._vllm.RequestOutputKind.FINAL_ONLY,
                # this object is not shared
                skip_clone=True,
            )
        adapter = self._adapters.find(options.get(LORA))
        return Made(self.prompt_of(token_ids, options.get(IMAGES, ())), params, adapter)

    def prompt_of(self, token_ids: list[int], images: Sequence[bytes]) -> Any:  # noqa: ANN401
        """Return a prompt of vLLM with its images; raise ValueError if these cannot be read.

        `token_ids` have one placeholder per image; `images` are the bytes of files. After this call
        vLLM assumes that its core has the images, even if the request is refused: see
        `forget_images`.
        """
        if not images:
            return self._vllm.tokens_input(token_ids)
        if not self._engine.vllm_config.model_config.is_multimodal_model:
            raise ValueError("the row has images, but the model reads only text")
        reader = self._vllm.ImageMediaIO()
        try:
            data = {"image": [reader.load_bytes(image) for image in images]}
            prompt = {"prompt_token_ids": token_ids, "multi_modal_data": data}
            return self._engine.renderer.render_cmpl([prompt])[0]
        except Exception as error:  # processors raise whatever they meet in a file
            raise ValueError(f"the images cannot be read: {error_text(error)}") from error

    def forget_images(self, missing: Any) -> None:  # noqa: ANN401
        """Make vLLM send images again that its core lacks, with prompts made after this call.

        `missing` is the error `images_gone`.
        """
        cache = self._engine.renderer.mm_processor_cache
        for name in missing.mm_hashes:
            cache.invalidate(name)

    def has(self, inner_id: str) -> bool:
        """Return whether vLLM still has the request with this id of vLLM."""
        return inner_id in self._engine.output_processor.request_states

    def progress(self, inner_id: str) -> Progress:
        """Return what the request with this id of vLLM has generated so far."""
        state = self._engine.output_processor.request_states[inner_id]
        if state.detokenizer is None:
            return Progress(num_cached_tokens=state.num_cached_tokens)
        return Progress(
            np.array(state.detokenizer.output_token_ids, np.int32),
            state.num_cached_tokens,
            _logprobs(state.logprobs_processor.logprobs),
        )

    def num_tokens(self, inner_id: str) -> int:
        """Return how many tokens the request with this id of vLLM has generated so far."""
        detokenizer = self._engine.output_processor.request_states[inner_id].detokenizer
        return 0 if detokenizer is None else int(detokenizer.num_output_tokens())

    def check_request(self, inner_id: str) -> None:
        """Raise ConfigError if vLLM's record of a request lacks attributes that raybatch reads."""
        state = self._engine.output_processor.request_states[inner_id]
        paths = self._adapter.read_of_output
        if state.detokenizer is None:
            # a request that is pooled makes no tokens
            made = ("detokenizer.", "logprobs_processor.")
            paths = " ".join(p for p in paths.split() if not p.startswith(made))
        self._adapter.check(state, paths, "its record of an output")

    def count_tokens(self, outputs: Any) -> None:  # noqa: ANN401
        """Add the new tokens of a step to `generated_tokens`, except those of aborted requests."""
        known = self._engine.output_processor.request_states
        self.generated_tokens += sum(
            len(output.new_token_ids) for output in outputs.outputs if output.request_id in known
        )

    def note_not_finite(self, outputs: Any) -> None:  # noqa: ANN401
        """Note requests with NaN logits in `not_finite`; vLLM counts but does not report them."""
        states = self._engine.output_processor.request_states
        for output in outputs.outputs:
            if output.num_nans_in_logits and output.request_id in states:
                self.not_finite.add(states[output.request_id].external_req_id)

    def answer(self, output: Any) -> Answer:  # noqa: ANN401
        """Convert the last output of a request, which has ended."""
        if isinstance(output, self._vllm.PoolingRequestOutput):
            return _pooled(output)
        sample = output.outputs[0]
        tokens = np.array(sample.token_ids, np.int32)
        return Answer(
            output.request_id,
            Progress(tokens, output.num_cached_tokens or 0, _logprobs(sample.logprobs)),
            sample.finish_reason,
            sample.stop_reason,
            is_finite=output.request_id not in self.not_finite,
            num_prompt_tokens=len(output.prompt_token_ids),
        )


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _logprobs(positions: Sequence[Mapping[int, Any]] | None) -> tuple[TokenLogprobs, ...]:
    """Return ids and values of each position, the sampled token first, as vLLM orders them."""
    return tuple(
        (
            np.fromiter(position, np.int32, len(position)),
            np.array([each.logprob for each in position.values()], np.float32),
        )
        for position in positions or ()
    )


def _pooled(output: Any) -> Answer:  # noqa: ANN401
    vector = output.outputs.data.detach().float().cpu().numpy()
    progress = Progress(num_cached_tokens=output.num_cached_tokens or 0)
    reason = "stop" if output.error is None and vector.size else "error"
    is_finite = bool(np.isfinite(vector).all())
    return Answer(output.request_id, progress, reason, None, is_finite, vector)
