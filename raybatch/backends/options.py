"""What the driver knows of a backend before any engine starts; imports none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raybatch.backends.choice import VllmBuild
from raybatch.backends.kinds import facts_of
from raybatch.backends.openai.options import decisive_options, openai_options
from raybatch.backends.vllm.args import (
    VllmOptions,
    actors_per_engine,
    answer_options,
    gpus_per_engine,
    vllm_options,
)
from raybatch.backends.vllm.model import ScoreForm, form_of_scores, model_length, pooled_length
from raybatch.config import BackendConfig, EngineConfig, PoolConfig, from_mapping
from raybatch.errors import ConfigError
from raybatch.models.config import read_max_positions, read_model_spec
from raybatch.models.source import resolve_model
from raybatch.records.parsed_text import PARSE_ERROR, REASONING, TOOL_CALLS

# of Ray's names of accelerators, the beginnings of those that its resource "GPU" does not count
_OTHER_ACCELERATORS = ("TPU-", "aws-neuron", "Intel-GAUDI", "Ascend", "Apple-", "M1", "M2", "M3")


def score_form(backend: BackendConfig, model: str) -> ScoreForm:
    """Return how a query and a document go into the engines; the fake one takes pairs.

    Raises:
        ConfigError: there is no model that can be read.
    """
    if backend.kind != "vllm":
        return "pair"
    kwargs = from_mapping(VllmOptions, backend.options, where="backend.options").engine_kwargs
    return form_of_scores(resolve_model(model), kwargs)


def may_end_its_process(backend: BackendConfig) -> bool:
    """Return whether a row may take the process of its engine along.

    Args:
        backend: of the engine; the fake one does so only where it is told to.
    """
    if backend.kind == "fake":
        return bool(backend.options.get("crashes")) or backend.options.get("crash_on") is not None
    return not facts_of(backend).is_endpoint


def gpus_of_engine(backend: BackendConfig, engine: EngineConfig) -> int:
    """Return the GPUs that one engine computes on, where there are any."""
    if backend.kind in ("fake", "openai") or engine.device == "cpu":
        return 0
    if backend.kind == "vllm":
        return gpus_per_engine(vllm_options(backend, engine))
    return 1


def gpus_of_replica(
    pool: PoolConfig,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    has_gpus: bool,
    may_grow: bool,
    vllm: VllmBuild | None,
) -> float:
    """Return the GPUs that Ray is asked for with each replica.

    Args:
        pool: of the replicas.
        backend: that they run; "auto" counts like the native one.
        engine: options of their engines.
        has_gpus: there is a GPU in the cluster.
        may_grow: hosts with GPUs may come to the cluster.
        vllm: what is installed on the driver's host.
    """
    if pool.num_gpus_per_replica is not None:
        return pool.num_gpus_per_replica
    if has_gpus or _means_gpus(pool, backend, engine, vllm, may_grow):
        return float(gpus_of_engine(backend, engine))
    return 0.0


def _means_gpus(
    pool: PoolConfig,
    backend: BackendConfig,
    engine: EngineConfig,
    vllm: VllmBuild | None,
    may_grow: bool,
) -> bool:
    """Return whether options ask for GPUs that the cluster is still to get."""
    kind = pool.accelerator_type
    if kind is not None and not kind.startswith(_OTHER_ACCELERATORS):
        return True
    # a driver without vLLM says nothing of the engines' hosts, where it is rarely one for CPUs
    has_replicas = pool.replicas is not None and may_grow and vllm != "cpu"
    return engine.device.startswith("cuda") or (backend.kind == "vllm" and has_replicas)


def actors_of_engine(backend: BackendConfig, engine: EngineConfig) -> int:
    """Return the ranks of one engine that are actors of Ray; 0 where it has none of its own."""
    if backend.kind != "vllm":
        return 0
    return actors_per_engine(vllm_options(backend, engine))


def check_pool(pool: PoolConfig, backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError where options of a pool say nothing of the engines that run in it.

    Args:
        pool: of these engines.
        backend: that they run.
        engine: their options.
    """
    check_share(pool.num_gpus_per_replica or 0, backend, engine)
    num_ranks = actors_of_engine(backend, engine)
    if pool.bundles is not None and not num_ranks:
        raise ConfigError(
            "pool.bundles is for engines whose ranks are actors of Ray, which are those of vLLM "
            "with engine_kwargs.distributed_executor_backend='ray'; set "
            "pool.num_cpus_per_replica, num_gpus_per_replica or resources instead"
        )
    if num_ranks and pool.num_gpus_per_replica is not None:
        raise ConfigError(
            f"pool.num_gpus_per_replica={pool.num_gpus_per_replica!r} has no effect on engines "
            f"whose ranks are actors of Ray: each of the {num_ranks} ranks takes a GPU; leave it "
            "out, or say in pool.bundles what they take"
        )


def check_share(num_gpus: float, backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError where engines share a GPU and nothing bounds the memory of each.

    Args:
        num_gpus: of one engine.
        backend: that they run.
        engine: their options.
    """
    if not 0 < num_gpus < 1 or engine.kv_cache_bytes is not None:
        return
    has_share = False
    if backend.kind == "vllm":
        kwargs = vllm_options(backend, engine).engine_kwargs
        has_share = bool({"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(kwargs))
    if not has_share:
        raise ConfigError(
            f"an engine has {num_gpus:g} of a GPU: engines that share one each need "
            "engine.kv_cache_bytes (engine_kwargs.kv_cache_memory_bytes of a processor) or, of "
            "vLLM, engine_kwargs.gpu_memory_utilization, or the first takes all the memory"
        )


def length_of_model(
    backend: BackendConfig, engine: EngineConfig, model_dir: Path | None
) -> int | None:
    """Return the longest prompt plus output of a model; None if nothing says it.

    Args:
        backend: that runs it.
        engine: options of the engine.
        model_dir: its folder; None where the model is somebody else's.

    Raises:
        ConfigError: the backend cannot run the model, as far as its config tells.
    """
    if model_dir is None or backend.kind in ("fake", "openai"):
        length: int | None = backend.options.get("max_model_len")
        return length
    if backend.kind == "native":
        return read_model_spec(model_dir).max_model_len
    if not backend.is_decided:
        return _length_of_either(model_dir)
    if backend.kind == "vllm":
        kwargs = vllm_options(backend, engine).engine_kwargs
        is_trusted = bool(kwargs.get("trust_remote_code", False))
        length_of = model_length if backend.task == "generate" else pooled_length
        return length_of(model_dir, trust_remote_code=is_trusted)
    is_trusted = bool(backend.options.get("trust_remote_code"))
    return read_max_positions(model_dir, trust_remote_code=is_trusted)


def _length_of_either(model_dir: Path) -> int | None:
    """Return the length of a model that the native engine or vLLM can run."""
    try:
        return read_model_spec(model_dir).max_model_len
    except ConfigError as refusal:
        try:
            return model_length(model_dir, trust_remote_code=False)
        except ConfigError:
            raise refusal from None


def answering_options(backend: BackendConfig, model: str) -> Mapping[str, Any]:
    """Return kind and options of a backend as far as they decide answers.

    Args:
        backend: that answers.
        model: of the stage, which an endpoint is asked for where its options name no other.
    """
    options = backend.options
    if backend.kind == "vllm":
        options = answer_options(options)
    elif backend.kind == "openai":
        options = decisive_options(options, model)
    return {"kind": backend.kind, "options": dict(options)}


def parsed_columns(backend: BackendConfig, engine: EngineConfig) -> tuple[str, ...]:
    """Return the columns of what a backend tells beside the text of an answer."""
    if backend.task != "generate":
        return ()
    if backend.kind == "vllm":
        options = vllm_options(backend, engine)
        asked = {REASONING: options.reasoning_parser, TOOL_CALLS: options.tool_call_parser}
        names = [name for name, parser in asked.items() if parser is not None]
        return tuple([*names, PARSE_ERROR] if names else [])
    if backend.kind == "openai":
        of_endpoint = openai_options(backend.options)
        told = {REASONING: of_endpoint.return_reasoning, TOOL_CALLS: of_endpoint.return_tool_calls}
        return tuple(name for name, is_told in told.items() if is_told)
    return ()
