"""Options of the vLLM backend: checked without vLLM, and turned into those of its engine."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pydantic.dataclasses import dataclass

from raybatch.backends.vllm.names import ENGINE_ARGS, REASONING_PARSERS, TOOL_PARSERS, VERSION
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.config.option import CHECKED, Answers, is_default, options
from raybatch.errors import ConfigError, did_you_mean
from raybatch.records.types import Task

# options of vLLM that have a name in EngineConfig, which the driver reads as well
DECIDED_BY_ENGINE: Mapping[str, str] = {
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "enable_prefix_caching": "enable_prefix_caching",
}
# of these vLLM has defaults for each device, so that ours count only where they were changed
_UNLESS_DEFAULT = {
    "block_size": "block_size_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_batched_tokens",
}
# what vLLM calls KV of 8 bits with a scale for each token and KV head
_KV_CACHE_DTYPES = {"int8": "int8_per_token_head", "fp8": "fp8_per_token_head"}
_ELSEWHERE = {
    "model": "take the model of the stage",
    "model_weights": "take the model of the stage",
    "hf_config_path": "take the model of the stage",
    "revision": "take a folder as the model of the stage",
    "tokenizer": "take a folder with model and tokenizer as the model of the stage",
    "data_parallel_size": "take pool.replicas, each of which is an engine",
    "nnodes": "set distributed_executor_backend='ray' for an engine over several hosts",
}
# what these may be; other values ask for an engine that the replica cannot drive
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "distributed_executor_backend": (None, "mp", "uni", "ray"),
    "data_parallel_size": (1,),
    "nnodes": (1,),
    "stream_interval": (1,),
}
# what these may be says the task of the stage
_RUNNERS = {"generate": ("auto", "generate"), "pooling": ("auto", "pooling")}
_CONVERTS = {"generate": ("auto", "none"), "pooling": ("auto", "none", "embed", "classify")}
# what is made of a model that is none for the task; scores have several ways
_CONVERTED = {"embed": "embed", "classify": "classify"}
# each multiplies the GPUs of one engine
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
# of vLLM's options, those that change the speed of a run, its memory or its logs, and no answer
_SPEED = """
    aggregate_engine_logging async_scheduling block_size collect_detailed_traces compilation_config
    cpu_offload_gb cudagraph_capture_sizes cudagraph_metrics disable_log_stats
    distributed_executor_backend download_dir enable_chunked_prefill enable_log_requests
    enforce_eager gpu_memory_utilization hf_token kv_offloading_backend kv_offloading_size
    load_format log_config_file log_level long_prefill_token_threshold max_cudagraph_capture_size
    max_num_batched_tokens max_num_seqs max_parallel_loading_workers num_gpu_blocks_override
    otlp_traces_endpoint safetensors_load_strategy scheduler_reserve_full_isl scheduling_policy seed
    show_hidden_metrics_for_version swap_space use_tqdm_on_load watermark
"""
_NO_ANSWER = frozenset(_SPEED.split())


@options("backend.options.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class VllmOptions:
    """Options of the vLLM backend, in `backend.options`.

    Raises:
        ConfigError: an option that vLLM does not have (with a suggestion), or one that is decided
            elsewhere or asks for more than a replica can do.
    """

    engine_kwargs: Answers[Mapping[str, Any]] = field(default_factory=dict)
    """Options of vLLM's `EngineArgs` that have no name in `EngineConfig`."""

    check_logits: Answers[bool] = True
    """A row whose logits are not numbers becomes an error row; without it vLLM makes tokens of
    them."""

    reasoning_parser: Answers[str | None] = None
    """Takes the reasoning out of the text, into a column `reasoning`."""

    tool_call_parser: Answers[str | None] = None
    """Takes calls of tools out of the text, into a column `tool_calls`."""

    def __post_init__(self) -> None:
        for name, value in self.engine_kwargs.items():
            _check(name, value)
        _check_parsers(self)


# options of the native engine alone, and what there is with vLLM instead; those that a config
# refuses without one of these are not among them
NATIVE_ONLY = (
    (("kv_admission_fraction",), "vLLM has engine_kwargs.watermark and max_num_active_seqs"),
    (("admission",), "vLLM starts rows in the order in which they come"),
    (("attn_batch_tokens", "moe_batch_tokens"), "leave them out"),
    (
        ("host_kv_bytes", "kv_checkpoint_blocks", "kv_offload"),
        "vLLM has options of its own for KV in host memory, which go into engine_kwargs "
        "(kv_offloading_size)",
    ),
    (
        ("device_weight_bytes", "weight_buffers"),
        "vLLM has one of its own, which goes into engine_kwargs (cpu_offload_gb)",
    ),
    (("quantization",), "vLLM has methods of its own, which engine_kwargs.quantization names"),
    (("speculative_tokens",), "vLLM has engine_kwargs.speculative_config"),
    (("cuda_graphs",), "vLLM has engine_kwargs.enforce_eager"),
)


def native_options(engine: EngineConfig) -> tuple[str, ...]:
    """Return the names of the options that were changed and that only the native engine has."""
    return tuple(name for names, _ in NATIVE_ONLY for name in names if not is_default(engine, name))


def _refuse_native_options(engine: EngineConfig) -> None:
    for names, way_out in NATIVE_ONLY:
        if any(not is_default(engine, name) for name in names):
            told = " and ".join(f"engine.{name}" for name in names)
            are = "are options" if len(names) > 1 else "is an option"
            raise ConfigError(f"{told} {are} of the native engine; {way_out}")


def vllm_options(backend: BackendConfig, engine: EngineConfig) -> VllmOptions:
    """Return the checked options of a vLLM backend.

    Raises:
        ConfigError: see `VllmOptions`; or an option of the engine that only the native one has.
    """
    options = from_mapping(VllmOptions, backend.options, where="backend.options")
    kind = "generate" if backend.task == "generate" else "pooling"
    for name, allowed in (("runner", _RUNNERS[kind]), ("convert", _CONVERTS[kind])):
        value = options.engine_kwargs.get(name, "auto")
        if value not in allowed:
            told = " or ".join(map(repr, allowed))
            raise ConfigError(
                f"engine_kwargs.{name} must be {told} for task {backend.task!r}, got {value!r}; "
                "the option task of the stage says what the engines do"
            )
    has_parser = (options.reasoning_parser, options.tool_call_parser) != (None, None)
    if has_parser and backend.task != "generate":
        raise ConfigError(
            f"parsers read text, and task {backend.task!r} makes none; leave them out"
        )
    _refuse_native_options(engine)
    kv_dtype = options.engine_kwargs.get("kv_cache_dtype")
    if kv_dtype not in (None, _KV_CACHE_DTYPES.get(engine.kv_cache_dtype, kv_dtype)):
        raise ConfigError(
            f"engine.kv_cache_dtype={engine.kv_cache_dtype!r}, which vLLM calls "
            f"{_KV_CACHE_DTYPES[engine.kv_cache_dtype]!r}, and engine_kwargs.kv_cache_dtype="
            f"{kv_dtype!r} are one option; leave one of them out"
        )
    for name, own in _UNLESS_DEFAULT.items():
        given = options.engine_kwargs.get(name)
        if given is not None and not is_default(engine, own) and given != getattr(engine, own):
            raise ConfigError(
                f"engine.{own}={getattr(engine, own)} and engine_kwargs.{name}={given!r} are one "
                "option; leave one of them out"
            )
    return options


def engine_args(
    options: VllmOptions, engine: EngineConfig, task: Task = "generate"
) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`, model excepted."""
    args: dict[str, Any] = {
        **({} if task == "generate" else {"runner": "pooling"}),
        **({"convert": _CONVERTED[task]} if task in _CONVERTED else {}),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # a constraint holds from the end of the reasoning on
        "reasoning_parser": options.reasoning_parser,
        **{name: getattr(engine, own) for name, own in DECIDED_BY_ENGINE.items()},
        **{
            n: getattr(engine, own)
            for n, own in _UNLESS_DEFAULT.items()
            if not is_default(engine, own)
        },
        "kv_cache_dtype": _KV_CACHE_DTYPES.get(engine.kv_cache_dtype),
    }
    if task != "generate" and engine.enable_prefix_caching:
        # not every model that pools can: vLLM knows which
        del args["enable_prefix_caching"]
    if gpus_per_engine(options) > 1:
        # unless it is given: processes on this host, which end with the replica
        args["distributed_executor_backend"] = "mp"
    # of what is decided here, these say that nobody wants it otherwise
    given = {
        n: value
        for n, value in options.engine_kwargs.items()
        if n not in args or value not in (None, "auto")
    }
    return {**{n: value for n, value in args.items() if value is not None}, **given}


def gpus_per_engine(options: VllmOptions) -> int:
    """Return the devices that one engine computes on."""
    number = 1
    for name in _PARALLEL:
        number *= int(options.engine_kwargs.get(name) or 1)
    return number


def actors_per_engine(options: VllmOptions) -> int:
    """Return the ranks of one engine that are actors of Ray, on whatever hosts; 0 for none."""
    is_ray = options.engine_kwargs.get("distributed_executor_backend") == "ray"
    return gpus_per_engine(options) if is_ray else 0


def answer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `backend.options` that take part in the answers of a job."""
    kwargs = options.get("engine_kwargs") or {}
    kept = {n: value for n, value in kwargs.items() if n not in _NO_ANSWER and n not in _PARALLEL}
    others = {name: value for name, value in options.items() if name != "engine_kwargs"}
    return {**others, **({"engine_kwargs": kept} if kept else {})}


def _check(name: str, value: object) -> None:
    own = DECIDED_BY_ENGINE.get(name)
    if own is not None:
        raise ConfigError(f"engine_kwargs.{name}: set engine.{own} instead")
    if name in _ONLY:
        if value in _ONLY[name]:
            return
        hint = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        allowed = " or ".join(repr(each) for each in _ONLY[name])
        raise ConfigError(f"engine_kwargs.{name} must be {allowed} here, got {value!r}{hint}")
    if name in _ELSEWHERE:
        raise ConfigError(f"engine_kwargs.{name}: {_ELSEWHERE[name]}")
    if name not in ENGINE_ARGS:
        known = ENGINE_ARGS.difference(_ELSEWHERE)
        raise ConfigError(
            f"engine_kwargs: vLLM {VERSION} has no option {name!r}{did_you_mean(str(name), known)}"
        )
    if name in _PARALLEL and (type(value) is not int or value < 1):
        raise ConfigError(f"engine_kwargs.{name} must be a number of at least 1, got {value!r}")


def _check_parsers(options: VllmOptions) -> None:
    # of which vLLM imports names that nobody knows here
    has_plugin = bool(options.engine_kwargs.get("reasoning_parser_plugin"))
    for name, known, may_be_unknown in (
        ("reasoning_parser", REASONING_PARSERS, has_plugin),
        ("tool_call_parser", TOOL_PARSERS, False),
    ):
        value = getattr(options, name)
        if value is None or value in known or may_be_unknown:
            continue
        hint = did_you_mean(str(value), known) or f"; it has {', '.join(sorted(known))}"
        raise ConfigError(f"backend.options.{name}: vLLM {VERSION} has no {value!r}{hint}")
    given = options.engine_kwargs.get("reasoning_parser")
    if options.reasoning_parser is not None and given not in (None, options.reasoning_parser):
        raise ConfigError(
            f"reasoning_parser={options.reasoning_parser!r} and "
            f"engine_kwargs.reasoning_parser={given!r} are one option; leave one of them out"
        )
