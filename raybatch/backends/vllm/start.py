"""Starts vLLM in this process, once the environment is what vLLM reads when it is imported."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from raybatch.backends.base import EngineStart, ScoreForm
from raybatch.backends.vllm.adapter import Adapter
from raybatch.backends.vllm.args import DENSE_RANKS, devices_of, engine_args, vllm_options
from raybatch.backends.vllm.backend import VllmBackend
from raybatch.backends.vllm.engine import VllmEngine, WeightShare
from raybatch.backends.vllm.model import form_of_scores
from raybatch.backends.vllm.patches import leave_bare_rows_alone
from raybatch.backends.vllm.ranks import VllmRanks
from raybatch.backends.vllm.requests import InnerEngine, Parse, ScorePairs
from raybatch.backends.vllm.versions import adapter as adapter_of_installed
from raybatch.config import BackendConfig, EngineConfig, environment
from raybatch.engine.memory.kv_cache import free_memory_bytes
from raybatch.errors import ConfigError, error_text
from raybatch.installation import weight_sharing
from raybatch.models.source import resolve_model, resolve_tokenizer
from raybatch.records.share import ShareLink

_Kind = TypeVar("_Kind", VllmEngine, VllmRanks)

_ENVIRONMENT = {
    # the engine core in this process: its scheduler is read, and its memory is shared
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # on a CPU: OMP_NUM_THREADS counts, and engines of one host do not meet on its first cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# of the memory that is free before the weights are loaded
_CPU_KV_FRACTION = 0.4
# vLLM takes 128, which shares less
_CPU_BLOCK_SIZE = EngineConfig().block_size_tokens
# values of `load_format` that read no weights of the model's folder
_ELSEWHERE = ("dummy", "tensorizer")
# and those that read them from a bucket, next to which vLLM finds config and tokenizer by itself
_STREAMED = ("runai_streamer", "runai_streamer_sharded")
_BUCKETS = ("s3://", "gs://", "az://")


def create(start: EngineStart) -> VllmBackend:
    """Start vLLM in this process and return a backend that is ready for `submit`.

    Raises ConfigError, or whatever vLLM raises; an engine that has started is stopped then.
    """
    options = vllm_options(start.backend, start.engine)
    parsers = {name: getattr(options, name) for name in ("reasoning_parser", "tool_call_parser")}
    inner = start_inner(
        start.model,
        start.backend,
        start.engine,
        num_engines_on_host=start.num_engines_on_host,
        link=start.share,
    )
    try:
        parse: Parse | None = None
        if any(parsers.values()):
            assert isinstance(inner, VllmEngine | VllmRanks), "what is pooled has no parsers"
            parse = inner.output_parser(**parsers)
        return VllmBackend(inner, start.backend.task, parse)
    except BaseException:
        inner.close()
        raise


def start_inner(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    link: ShareLink | None = None,
) -> InnerEngine:
    """Start vLLM in this process and return the bare engine, for `VllmBackend`.

    Sets environment variables that vLLM reads; most of them only if they are unset.
    """
    options = vllm_options(backend, engine)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = str(int(options.check_logits))
    is_pooling = backend.task != "generate"
    given = model_for(model, options.engine_kwargs)
    form: ScoreForm = "apart"
    if is_pooling:
        folder = resolve_tokenizer(model) if is_streamed(model, options.engine_kwargs) else given
        form = form_of_scores(Path(folder), options.engine_kwargs)
    adapter = adapter_of_installed()
    share: WeightShare | None = None
    if link is not None:
        share = weight_sharing().vllm_share(link, engine, adapter)
    started = _start_engine(
        given,
        engine_args(options, engine, backend.task),
        adapter,
        check_logits=options.check_logits,
        num_engines_on_host=num_engines_on_host,
        share=share,
    )
    if not is_pooling:
        return started
    try:
        started.pool_for(backend.task, form)
    except BaseException:
        started.close()
        raise
    return ScorePairs(started) if backend.task == "score" and form == "apart" else started


def is_streamed(model: str, engine_kwargs: Mapping[str, Any]) -> bool:
    """Return whether vLLM itself reads the model from its bucket."""
    return engine_kwargs.get("load_format") in _STREAMED and model.startswith(_BUCKETS)


def fetches_weights(model: str, engine_kwargs: Mapping[str, Any]) -> bool:
    """Return whether raybatch downloads the weights to the host of an engine."""
    is_elsewhere = engine_kwargs.get("load_format") in _ELSEWHERE
    return not is_elsewhere and not is_streamed(model, engine_kwargs)


def model_for(model: str, engine_kwargs: Mapping[str, Any]) -> str:
    """Download the files of a model that the engine needs; return vLLM's argument `model`."""
    if is_streamed(model, engine_kwargs):
        return model
    resolve = resolve_model if fetches_weights(model, engine_kwargs) else resolve_tokenizer
    return str(resolve(model))


def _start_engine(
    model: str,
    args: Mapping[str, Any],
    adapter: Adapter,
    *,
    check_logits: bool,
    num_engines_on_host: int,
    share: WeightShare | None,
) -> VllmEngine | VllmRanks:
    """Start an engine with options of vLLM's `EngineArgs`."""
    vllm = adapter.load("engine")
    with _refusing():
        args = _with_configs(args, vllm.EngineArgs)
    if vllm.current_platform.is_cpu():
        args = _on_cpu(args, adapter, num_engines_on_host)
    if share is not None:
        args = share.arguments(args)
    with _refusing():
        made = vllm.EngineArgs(model=model, **args)
        config = made.create_engine_config(vllm.UsageContext.LLM_CLASS)
    if share is not None:
        share.settle(config)
    parts = {
        "vllm_config": config,
        "executor_class": vllm.Executor.get_class(config),
        "log_stats": not args["disable_log_stats"],
        "usage_context": vllm.UsageContext.LLM_CLASS,
    }
    is_pooling = config.model_config.runner_type == "pooling"
    check_logits = check_logits and not is_pooling
    if config.parallel_config.data_parallel_size == 1:
        engine = vllm.LLMEngine(**parts, multiprocess_mode=False)
        make = partial(VllmEngine, check_logits=check_logits, share=share)
        return _or_closed(make, engine, adapter)
    if not config.model_config.is_moe:
        raise ConfigError(DENSE_RANKS)
    engine = vllm.AsyncLLM(**parts)
    return _or_closed(partial(VllmRanks, check_logits=check_logits), engine, adapter)


def _or_closed(
    make: Callable[[Any, Adapter], _Kind],
    engine: Any,  # noqa: ANN401 - vLLM's
    adapter: Adapter,
) -> _Kind:
    """Return an engine of vLLM as one of ours, or end it with the error that it meets."""
    try:
        return make(engine, adapter)
    except BaseException:
        engine.engine_core.shutdown()
        raise


@contextmanager
def _refusing() -> Iterator[None]:
    """Make a ConfigError of what vLLM raises where an option cannot be."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        # pydantic writes several lines, of which a log would show one
        message = " ".join(error_text(error).split())
        raise ConfigError(f"vLLM refuses the options of its engine: {message}") from error


def _with_configs(args: Mapping[str, Any], known: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Return options in which a mapping is the config that it stands for, as `LLM` does it."""
    kinds: dict[str, Any] = {f.name: f.default_factory for f in fields(known)}
    if unknown := sorted(set(args) - set(kinds)):
        raise ConfigError(
            f"engine_kwargs: the installed vLLM has no option {', '.join(unknown)}; remove it"
        )
    made = dict(args)
    for name, value in args.items():
        kind = kinds[name]
        if isinstance(value, Mapping) and isinstance(kind, type) and is_dataclass(kind):
            made[name] = kind(**value)
    return made


def _on_cpu(args: dict[str, Any], adapter: Adapter, num_engines_on_host: int) -> dict[str, Any]:
    """Override defaults of vLLM for a dedicated or long-running host.

    ConfigError for what its kernels for CPUs would end with the process at, or later on.
    """
    vllm = adapter.load("cpu")
    if args.get("enable_expert_parallel"):
        raise ConfigError(
            "engine_kwargs.enable_expert_parallel: vLLM has no expert parallelism on CPUs; leave "
            "it out"
        )
    # what ranks exchange before and after their experts; without, the first step fails
    if args.get("data_parallel_size", 1) > 1 and "all_gatherv" not in vars(vllm.CpuCommunicator):
        raise ConfigError(
            "engine_kwargs.data_parallel_size: vLLM has no data parallelism on CPUs; leave it out "
            "and set pool.replicas to run several engines"
        )
    # newer ones do it themselves
    if args.get("enable_lora") and "cpu_lora" in adapter.names:
        leave_bare_rows_alone(adapter.load("cpu_lora"))
    args.setdefault("enforce_eager", True)
    args.setdefault("block_size", _CPU_BLOCK_SIZE)
    if args.get("dtype", "auto") == "auto":
        args["dtype"] = "float32"
    has_size = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(args)
    if not has_size and not environment().get("VLLM_CPU_KVCACHE_SPACE"):
        # the memory node to which vLLM will hold its cache
        node = vllm.get_memory_node_info(vllm.get_allowed_cpu_list()[0].numa_node)
        free = min(free_memory_bytes(torch.device("cpu")), int(node.available_memory))
        # each rank has as much
        num_caches = num_engines_on_host * devices_of(args)
        args["kv_cache_memory_bytes"] = int(_CPU_KV_FRACTION * free / num_caches)
    return args
