"""vLLM's engine inside this process: everything that knows vLLM, and nothing of rows.

Requests have a key, a text. What is read beside vLLM's public interface (tokens so far, what its
scheduler has started) lies here alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from raybatch.backends.vllm_sequence import Answer, Progress, RequestRefused, TokenLogprobs
from raybatch.config import EngineConfig
from raybatch.engine.memory import free_memory_bytes
from raybatch.errors import ConfigError
from raybatch.types import Capacity

__all__ = ["VllmEngine", "start_engine"]

# of the memory that is free before the weights are loaded
_CPU_KV_FRACTION = 0.4
# vLLM takes 128, which shares less
_CPU_BLOCK_SIZE = EngineConfig().block_size_tokens

_logger = logging.getLogger(__name__)


class VllmEngine:
    """An `LLMEngine` whose scheduler lives in this process; owned by one thread.

    Args:
        engine: made without a process of its own for the engine core.
        check_logits: tell requests whose logits are not numbers; needs
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
        if check_logits:
            self._watch_logits()

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
        """Return the model's own end tokens."""
        processor = self._engine.input_processor
        own = processor.generation_config_fields.get("eos_token_id")
        listed = own if isinstance(own, list) else [own]
        found = {*listed, self._engine.renderer.get_eos_token_id()}
        return frozenset(token_id for token_id in found if token_id is not None)

    def add(self, key: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> None:
        """Queue a request behind all others.

        Args:
            key: not among those in the engine.
            prompt_token_ids: not empty, known to the model.
            sampling: options of `SamplingParams`.

        Raises:
            RequestRefused: vLLM does not take these options.
        """
        try:
            params = SamplingParams(
                **_with_constraint(sampling),
                detokenize=bool(sampling.get("stop")),
                output_kind=RequestOutputKind.FINAL_ONLY,
                # nobody else has this object
                skip_clone=True,
            )
            inner_id = self._engine.add_request(key, tokens_input(prompt_token_ids), params)
        except (VLLMClientError, ValueError, NotImplementedError) as error:
            # it may have come half of the way
            self._engine.abort_request([key])
            raise RequestRefused(str(error)) from error
        self._requests[key] = inner_id, self._scheduler.requests[inner_id]

    def step(self) -> list[Answer]:
        """Run one step and return the requests that ended in it.

        Raises:
            Exception: whatever vLLM raises; the engine is not usable after it.
        """
        answers = []
        for output in self._engine.step():
            _, request = self._requests.pop(output.request_id)
            self._num_preemptions += request.num_preemptions
            sample = output.outputs[0]
            progress = Progress(
                np.array(sample.token_ids, np.int32),
                output.num_cached_tokens or 0,
                _logprobs(sample.logprobs),
            )
            is_finite = output.request_id not in self._not_finite
            answers.append(
                Answer(
                    output.request_id, progress, sample.finish_reason, sample.stop_reason, is_finite
                )
            )
        answers += [self._end(key) for key in self._not_finite if key in self._requests]
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
        inner_id, _ = self._requests[key]
        state = self._engine.output_processor.request_states[inner_id]
        return Progress(
            np.array(state.detokenizer.output_token_ids, np.int32),
            state.num_cached_tokens,
            _logprobs(state.logprobs_processor.logprobs),
        )

    def num_tokens(self, key: str) -> int:
        """Return how many tokens a request has so far."""
        inner_id, _ = self._requests[key]
        state = self._engine.output_processor.request_states[inner_id]
        return int(state.detokenizer.num_output_tokens())

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

    def _end(self, key: str) -> Answer:
        """Take a request out whose logits are not numbers."""
        return Answer(key, self.take([key])[key], "error", None, is_finite=False)

    def _watch_logits(self) -> None:
        """Note the requests for which the model gave NaN, which vLLM counts and does not tell."""
        get_output = self._client.get_output

        def watched() -> Any:  # noqa: ANN401 - vLLM's own type
            outputs = get_output()
            bad = {o.request_id for o in outputs.outputs if o.num_nans_in_logits}
            if bad:
                keys = [key for key, (inner_id, _) in self._requests.items() if inner_id in bad]
                self._not_finite.update(keys)
            return outputs

        self._client.get_output = watched


def start_engine(
    model_dir: Path, args: Mapping[str, Any], *, check_logits: bool, num_engines_on_host: int
) -> VllmEngine:
    """Start vLLM in this process.

    Args:
        model_dir: folder of the checkpoint.
        args: options of `EngineArgs`.
        check_logits: see `VllmEngine`.
        num_engines_on_host: engines that share the host's memory.

    Raises:
        ConfigError: an option that the installed vLLM does not have.
    """
    known = {f.name for f in fields(EngineArgs)}
    unknown = sorted(set(args) - known)
    if unknown:
        raise ConfigError(f"engine_kwargs: the vLLM that is installed has no {', '.join(unknown)}")
    args = dict(args)
    if current_platform.is_cpu():
        args = _on_cpu(args, num_engines_on_host)
    config = EngineArgs(model=str(model_dir), **args).create_engine_config(UsageContext.LLM_CLASS)
    engine = LLMEngine(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=not args["disable_log_stats"],
        usage_context=UsageContext.LLM_CLASS,
        multiprocess_mode=False,
    )
    return VllmEngine(engine, check_logits=check_logits)


def _on_cpu(args: dict[str, Any], num_engines_on_host: int) -> dict[str, Any]:
    """Fill in what vLLM chooses for a host of its own, or for one that stays up for days."""
    args.setdefault("enforce_eager", True)
    args.setdefault("block_size", _CPU_BLOCK_SIZE)
    if args.get("dtype", "auto") == "auto":
        args["dtype"] = "float32"
    has_size = {"kv_cache_memory_bytes", "gpu_memory_utilization"}
    if not has_size & set(args) and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        free = free_memory_bytes(torch.device("cpu"))
        args["kv_cache_memory_bytes"] = int(_CPU_KV_FRACTION * free / num_engines_on_host)
    return args


def _with_constraint(sampling: Mapping[str, Any]) -> dict[str, Any]:
    constraint = sampling.get("structured_outputs")
    if constraint is None:
        return dict(sampling)
    return {**sampling, "structured_outputs": StructuredOutputsParams(**constraint)}


def _logprobs(positions: Sequence[Mapping[int, Any]] | None) -> tuple[TokenLogprobs, ...]:
    """Return ids and values of each position, the sampled token first, as vLLM orders them."""
    return tuple(
        (
            np.fromiter(position, np.int32, len(position)),
            np.array([each.logprob for each in position.values()], np.float32),
        )
        for position in positions or ()
    )
