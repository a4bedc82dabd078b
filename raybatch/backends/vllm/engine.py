"""vLLM's engine inside this process: everything that knows vLLM, and nothing of rows.

Requests have a key, a text. What is read beside vLLM's public interface (tokens so far, what its
scheduler has started) lies here alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.multimodal.media.image import ImageMediaIO
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tasks import POOLING_TASKS
from vllm.v1.engine.llm_engine import LLMEngine

from raybatch.backends.base import ScoreForm
from raybatch.backends.vllm.parsing import OutputParser
from raybatch.backends.vllm.patches import leave_room
from raybatch.backends.vllm.requests import Answer, Progress, RequestRefused, pooling_task
from raybatch.errors import ConfigError, error_text
from raybatch.models.source import resolve_adapter
from raybatch.records.payload import IMAGES, LORA
from raybatch.records.types import Capacity, Task, TokenLogprobs
from raybatch.text.tokenizer import Tokenizer

# an engine lives for days, and a bucket may be back by then; not every row costs an attempt
_REFUSED_FOR_S = 60.0


class VllmAdapters:
    """What vLLM knows the adapters of one engine by.

    They are loaded before any step, where a failure would end the engine. `load` gives one to the
    engine, and may raise anything.
    """

    def __init__(
        self, load: Callable[[LoRARequest], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._clock = clock
        # vLLM may hold half of one that has failed: its id is not used again
        self._ids = count(1)
        self._loaded: dict[str, LoRARequest] = {}
        # by source: until when, and why
        self._refused: dict[str, tuple[float, str]] = {}

    def find(self, source: str | None) -> LoRARequest | None:
        """Return what vLLM knows an adapter by, loaded; None for none.

        Raises RequestRefused where it cannot be loaded, or could not a short time ago.
        """
        if source is None:
            return None
        if source in self._loaded:
            return self._loaded[source]
        until, message = self._refused.get(source, (0.0, ""))
        if message and self._clock() < until:
            raise RequestRefused(message)
        try:
            request = LoRARequest(source, next(self._ids), resolve_adapter(source))
            self._load(request)
        except Exception as error:  # whatever reads the files may raise anything
            message = f"the adapter {source!r} cannot be loaded: {error_text(error)}"
            self._refused[source] = self._clock() + _REFUSED_FOR_S, message
            raise RequestRefused(message) from error
        self._refused.pop(source, None)
        self._loaded[source] = request
        return request


# what vLLM raises where it does not take one request
_REFUSALS = (VLLMClientError, ValueError, NotImplementedError, MultiModalCacheMissError)


class VllmEngine:
    """An `LLMEngine` whose scheduler lives in this process; owned by one thread.

    With `check_logits` requests whose logits are not numbers are reported, which needs
    VLLM_COMPUTE_NANS_IN_LOGITS.
    """

    def __init__(self, engine: LLMEngine, *, check_logits: bool) -> None:
        self._engine = engine
        self._client = engine.engine_core
        self._scheduler = self._client.engine_core.scheduler
        # by key: the id inside vLLM, and its scheduler's record of the request
        self._requests: dict[str, tuple[str, Any]] = {}
        self._not_finite: set[str] = set()
        self._num_preemptions = 0
        self._pooling_task: str | None = None
        self._adapters = VllmAdapters(engine.add_lora)
        leave_room(self._scheduler, self.capacity().block_size)
        if check_logits:
            self._watch_logits()

    def pool_for(self, task: Task, form: ScoreForm) -> None:
        """Take requests of a pooling task from here on, or raise ConfigError."""
        config = self._engine.vllm_config.model_config
        self._pooling_task = pooling_task(
            task,
            [name for name in self._engine.get_supported_tasks() if name in POOLING_TASKS],
            form=form,
            num_labels=int(getattr(config.hf_config, "num_labels", 0)),
        )
        if task == "score" and form != "apart" and config.use_sep_token != (form == "pair"):
            raise ConfigError(
                "the config of the model does not say whether query and document are told apart; "
                f"set engine_kwargs.hf_overrides to {{'use_sep_token': {config.use_sep_token}}}"
            )

    def capacity(self) -> Capacity:
        """Return what the engine can hold."""
        config = self._engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        return Capacity(
            kv_tokens=cache.num_gpu_blocks * cache.block_size,
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            block_size=cache.block_size,
            max_batched_tokens=scheduler.max_num_batched_tokens,
        )

    def vocab_size(self) -> int:
        """Return the number of token ids that the model knows."""
        return int(self._engine.vllm_config.model_config.get_vocab_size())

    def eos_token_ids(self) -> frozenset[int]:
        """Return the model's end tokens."""
        processor = self._engine.input_processor
        eos = processor.generation_config_fields.get("eos_token_id")
        listed = eos if isinstance(eos, list) else [eos]
        token_ids = {*listed, self._engine.renderer.get_eos_token_id()}
        return frozenset(token_id for token_id in token_ids if token_id is not None)

    def output_parser(self, **names: str | None) -> OutputParser:
        """Return what takes reasoning and calls of tools out of answers, see `OutputParser`."""
        config = self._engine.vllm_config.model_config
        decoder = Tokenizer.load(config.model)
        return OutputParser(decoder, self._engine.renderer.get_tokenizer(), config, **names)

    def add(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> None:
        """Queue a request behind all others; raise RequestRefused where vLLM does not take it.

        The tokens are not empty, and known to the model. The options are of `SamplingParams`, or of
        `PoolingParams` where the engine pools; under `IMAGES` files of images, for the places that
        the prompt has for them.
        """
        try:
            try:
                inner_id = self._queue(key, prompt_token_ids, params)
            except MultiModalCacheMissError as error:
                # images that vLLM takes for sent and its core has not are sent again
                self._engine.abort_request([key])
                forget_images(self._engine, error)
                inner_id = self._queue(key, prompt_token_ids, params)
        except _REFUSALS as error:
            # it may have come half of the way
            self._engine.abort_request([key])
            raise RequestRefused(str(error)) from error
        self._requests[key] = inner_id, self._scheduler.requests[inner_id]

    def _queue(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> str:
        """Queue a request and return its id inside vLLM."""
        # first what may be refused: images count as sent once the prompt is made
        options = {n: value for n, value in params.items() if n not in (LORA, IMAGES)}
        made: SamplingParams | PoolingParams
        if self._pooling_task is not None:
            made = PoolingParams(task=self._pooling_task, **options)
        else:
            if (constraint := options.get("structured_outputs")) is not None:
                options["structured_outputs"] = StructuredOutputsParams(**constraint)
            made = SamplingParams(
                **options,
                detokenize=bool(options.get("stop")),
                output_kind=RequestOutputKind.FINAL_ONLY,
                # nobody else has this object
                skip_clone=True,
            )
        adapter = self._adapters.find(params.get(LORA))
        prompt = prompt_of(self._engine, prompt_token_ids, params.get(IMAGES, ()))
        return str(self._engine.add_request(key, prompt, made, lora_request=adapter))

    def step(self) -> list[Answer]:
        """Run one step and return the requests that ended in it.

        The engine is not usable after whatever vLLM raises.
        """
        answers = []
        for output in self._engine.step():
            _, request = self._requests.pop(output.request_id)
            self._num_preemptions += request.num_preemptions
            if isinstance(output, PoolingRequestOutput):
                answers.append(_pooled(output))
                continue
            sample = output.outputs[0]
            progress = Progress(
                np.array(sample.token_ids, np.int32),
                output.num_cached_tokens or 0,
                _logprobs(sample.logprobs),
            )
            answer = Answer(
                output.request_id,
                progress,
                sample.finish_reason,
                sample.stop_reason,
                is_finite=output.request_id not in self._not_finite,
                num_prompt_tokens=len(output.prompt_token_ids),
            )
            answers.append(answer)
        # those whose logits are not numbers, and that would go on
        bad = [key for key in self._not_finite if key in self._requests]
        taken = self.take(bad) if bad else {}
        answers += [Answer(key, taken[key], "error", None, is_finite=False) for key in bad]
        self._not_finite.clear()
        return answers

    def take(self, keys: Sequence[str]) -> dict[str, Progress]:
        """Take requests out, free what they hold, and return what each has."""
        taken = {key: self.progress(key) for key in keys}
        self._engine.abort_request(list(keys))
        for key in keys:
            _, request = self._requests.pop(key)
            self._num_preemptions += request.num_preemptions
        return taken

    def progress(self, key: str) -> Progress:
        """Return what a request has so far."""
        state = self._output_state(key)
        if state.detokenizer is None:
            return Progress(num_cached_tokens=state.num_cached_tokens)
        return Progress(
            np.array(state.detokenizer.output_token_ids, np.int32),
            state.num_cached_tokens,
            _logprobs(state.logprobs_processor.logprobs),
        )

    def num_tokens(self, key: str) -> int:
        """Return how many tokens a request has so far."""
        state = self._output_state(key)
        return 0 if state.detokenizer is None else int(state.detokenizer.num_output_tokens())

    def _output_state(self, key: str) -> Any:  # noqa: ANN401 - vLLM's own type
        inner_id, _ = self._requests[key]
        return self._engine.output_processor.request_states[inner_id]

    def has_started(self, key: str) -> bool:
        """Return whether the scheduler has ever given a request room."""
        _, request = self._requests[key]
        return bool(request.status.name == "RUNNING" or request.num_preemptions)

    def num_running(self) -> int:
        """Return the requests that have room now."""
        return len(self._scheduler.running)

    def num_preemptions(self) -> int:
        """Return how often requests that have ended had lost their room."""
        return self._num_preemptions

    def kv_used_fraction(self) -> float:
        """Return the share of the KV cache that running requests hold."""
        return float(self._scheduler.kv_cache_manager.usage)

    def reset(self) -> None:
        """Drop all requests and forget the prefixes that are cached."""
        self.take(list(self._requests))
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """End the engine with the processes that it has started."""
        self._client.shutdown()

    def _watch_logits(self) -> None:
        """Note the requests for which the model gave NaN, which vLLM counts and does not report."""
        get_output = self._client.get_output

        def watched() -> Any:  # noqa: ANN401 - vLLM's own type
            outputs = get_output()
            bad = {o.request_id for o in outputs.outputs if o.num_nans_in_logits}
            if bad:
                keys = [key for key, (inner_id, _) in self._requests.items() if inner_id in bad]
                self._not_finite.update(keys)
            return outputs

        self._client.get_output = watched


def _logprobs(positions: Sequence[Mapping[int, Any]] | None) -> tuple[TokenLogprobs, ...]:
    """Return ids and values of each position, the sampled token first, as vLLM orders them."""
    return tuple(
        (
            np.fromiter(position, np.int32, len(position)),
            np.array([each.logprob for each in position.values()], np.float32),
        )
        for position in positions or ()
    )


def _pooled(output: PoolingRequestOutput) -> Answer:
    vector = output.outputs.data.detach().float().cpu().numpy()
    progress = Progress(num_cached_tokens=output.num_cached_tokens or 0)
    reason = "stop" if output.error is None and vector.size else "error"
    is_finite = bool(np.isfinite(vector).all())
    return Answer(output.request_id, progress, reason, None, is_finite, vector)


def prompt_of(engine: LLMEngine, token_ids: list[int], images: Sequence[bytes]) -> Any:  # noqa: ANN401
    """Return a prompt of vLLM; images are read as its server reads data: URLs, or ValueError.

    The tokens have one mark in the place of each image. From here on vLLM takes the images for
    sent, also where the request is refused afterwards: see `forget_images`.
    """
    if not images:
        return tokens_input(token_ids)
    if not engine.vllm_config.model_config.is_multimodal_model:
        raise ValueError("the model reads text alone, and the row has images")
    reader = ImageMediaIO()
    try:
        data = {"image": [reader.load_bytes(image) for image in images]}
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": data}
        return engine.renderer.render_cmpl([prompt])[0]
    except Exception as error:  # processors raise whatever they meet in a file
        raise ValueError(f"the images cannot be read: {error_text(error)}") from error


def forget_images(engine: LLMEngine, missing: MultiModalCacheMissError) -> None:
    """Have vLLM send images anew that its core has not; a prompt made after this call has them."""
    cache = engine.renderer.mm_processor_cache
    for name in missing.mm_hashes:
        cache.invalidate(name)
