"""What the options of ray.data.llm's vLLM processor mean here, for either engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raybatch.backends.registry import check_options
from raybatch.backends.vllm.args import DECIDED_BY_ENGINE
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError, did_you_mean

_RENAMED = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_batched_tokens",
    "dtype": "dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "block_size": "block_size_tokens",
}
_DTYPES = {"half": "float16", "float": "float32"}
# the native engine has a scale for each token and KV head, which is finer than one for all
_KV_CACHE_DTYPES = {
    "fp8_e4m3": "fp8",
    "fp8_per_token_head": "fp8",
    "int8_per_token_head": "int8",
}

# Options that tune what this engine decides by itself, or that only change logs and loading.
_NO_EFFECT = frozenset(
    {
        "async_scheduling",
        "compilation_config",
        "disable_log_requests",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_log_requests",
        "gpu_memory_utilization",
        "hf_token",
        "load_format",
        "max_logprobs",
        "max_num_partial_prefills",
        "max_seq_len_to_capture",
        "num_gpu_blocks_override",
        "scheduling_policy",
        "seed",
        "swap_space",
        "task",
        "task_type",
        "tokenizer_mode",
    }
)
_EAGER = "enforce_eager"
# of vLLM's server, with requests that nobody sends here
_OF_SERVER = ("enable_log_requests",)
# Options whose value must be the one that changes nothing, because more is not built yet.
_ONLY: Mapping[str, Any] = {
    "data_parallel_size": 1,
    "enable_lora": False,
    "pipeline_parallel_size": 1,
    "speculative_config": None,
    "tensor_parallel_size": 1,
    "trust_remote_code": False,
}


def vllm_config(
    engine_kwargs: Mapping[str, Any], backend: BackendConfig, *, model: str
) -> tuple[EngineConfig, BackendConfig, list[str]]:
    """Return the options of an engine of vLLM, and the names of those that have no effect.

    Args:
        engine_kwargs: as ray.data.llm takes them.
        backend: of kind "vllm"; its own `engine_kwargs` win.
        model: of the processor, which the options may name once more.

    Raises:
        ConfigError: an unknown option (with a suggestion), or one that is decided elsewhere.
    """
    told = {"task_type": backend.task, "model": model}
    engine_kwargs = {
        n: value for n, value in engine_kwargs.items() if n not in told or value != told[n]
    }
    values = {_RENAMED[name]: v for name, v in engine_kwargs.items() if name in _RENAMED}
    values["dtype"] = _DTYPES.get(values.get("dtype", "auto"), values.get("dtype", "auto"))
    engine = EngineConfig(**{name: v for name, v in values.items() if v is not None})
    decided = (*DECIDED_BY_ENGINE, *_OF_SERVER)
    others = {n: value for n, value in engine_kwargs.items() if n not in decided}
    options = {
        **backend.options,
        "engine_kwargs": {**others, **backend.options.get("engine_kwargs", {})},
    }
    backend = replace(backend, options=options)
    check_options(backend, engine)
    return engine, backend, [f"engine_kwargs.{n}" for n in _OF_SERVER if n in engine_kwargs]


def engine_config(engine_kwargs: Mapping[str, Any]) -> tuple[EngineConfig, list[str]]:
    """Return the engine options, and the names of those that have no effect.

    Raises:
        ConfigError: an unknown option (with a suggestion), or one that asks for more than there is.
    """
    known = [*_RENAMED, "kv_cache_dtype", "quantization", *_NO_EFFECT, *_ONLY, _EAGER]
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in engine_kwargs.items():
        if name in _RENAMED:
            if value is not None:
                values[_RENAMED[name]] = _renamed(_DTYPES, value) if name == "dtype" else value
        elif name == "kv_cache_dtype":
            if value is not None:
                values[name] = _renamed(_KV_CACHE_DTYPES, value)
        elif name == "quantization":
            values[name] = value
        elif name in _ONLY:
            if value is not None and value != _ONLY[name]:
                raise ConfigError(
                    f"engine_kwargs.{name}={value!r} is not supported by the native engine; leave "
                    "it out"
                )
        elif name == _EAGER:
            # CUDA graphs are taken where they can be, unless this says no
            values["cuda_graphs"] = False if value else None
        elif name in _NO_EFFECT:
            ignored.append(f"engine_kwargs.{name}")
        elif name in EngineConfig.__dataclass_fields__:
            raise ConfigError(
                f"engine_kwargs has vLLM's names, and {name!r} is an option of raybatch's own "
                f"engine: LLMStage(model, engine={{{name!r}: ...}}) takes it"
            )
        else:
            raise ConfigError(f"engine_kwargs: unknown option {name!r}{did_you_mean(name, known)}")
    return EngineConfig(**values), ignored


def _renamed(names: Mapping[str, str], value: object) -> object:
    return names.get(value, value) if isinstance(value, str) else value
