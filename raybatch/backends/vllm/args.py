"""Options of the vLLM backend: checked without vLLM, and converted to its engine arguments.

`MEANINGS` is one table for this backend and for ray.data.llm's. Names that are not in the table are
passed on to vLLM, count as ones that decide answers, and mean nothing to the native engine.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from raybatch.backends.vllm.versions import LOAD_FORMATS, plugins_have_load_format
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.config.checked import dataclass
from raybatch.config.option import CHECKED, Answers, is_default, options
from raybatch.errors import ConfigError, did_you_mean
from raybatch.records.types import Task

# in place of a value: an option that the native engine reads, and changes nothing by
IGNORED = object()
UNKNOWN = object()


@plain_dataclass(frozen=True, kw_only=True)
class Meaning:
    """What one option of vLLM's `EngineArgs` means."""

    ours: str | None = None  # the option of `EngineConfig` that means the same
    # it is set under our name, and refused under vLLM's; otherwise vLLM has defaults for each
    # device, and ours counts only where it was changed
    is_ours_alone: bool = False
    values: Mapping[str, str] = field(default_factory=dict)  # of vLLM, to our names for them
    only: tuple[Any, ...] = ()  # others ask vLLM for an engine that a replica cannot drive
    elsewhere: str = ""  # what says it in raybatch, for the message that refuses it
    is_speed: bool = False  # it changes speed, memory or logs of a run, and no answer
    multiplies_gpus: bool = False
    native: Any = UNKNOWN  # the one value that the native engine runs with, or `IGNORED`


def _each(names: str, **meaning: Any) -> dict[str, Meaning]:  # noqa: ANN401
    return {name: Meaning(**meaning) for name in names.split()}


_FOLDER = "take a folder with model and tokenizer as the model of the stage"

_DTYPES = {"half": "float16", "float": "float32"}
# the native engine has a scale for each token and KV head; the last name of a value is the one
# that vLLM is given
_KV_DTYPES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
_OVER_HOSTS = "set distributed_executor_backend='ray' for an engine over several hosts"
_ONE_HOST = "all ranks of an engine are on one host; take pool.replicas for more hosts"

MEANINGS: Mapping[str, Meaning] = {
    # of both engines
    "dtype": Meaning(ours="dtype", is_ours_alone=True, values=_DTYPES),
    "max_model_len": Meaning(ours="max_model_len", is_ours_alone=True),
    "kv_cache_memory_bytes": Meaning(ours="kv_cache_bytes", is_ours_alone=True),
    "enable_prefix_caching": Meaning(ours="enable_prefix_caching", is_ours_alone=True),
    "block_size": Meaning(ours="block_size_tokens", is_speed=True),
    "max_num_seqs": Meaning(ours="max_num_seqs", is_speed=True),
    "max_num_batched_tokens": Meaning(ours="max_batched_tokens", is_speed=True),
    "kv_cache_dtype": Meaning(ours="kv_cache_dtype", values=_KV_DTYPES),
    # said by other options of raybatch
    **_each("model model_weights hf_config_path", elsewhere="take the model of the stage"),
    **_each("revision", elsewhere="write it behind the model of the stage: org/name@revision"),
    **_each("tokenizer", elsewhere=_FOLDER),
    **_each(
        """
            data_parallel_address data_parallel_rank data_parallel_rpc_port data_parallel_size_local
            data_parallel_start_rank
            """,
        only=(None,),
        elsewhere=_ONE_HOST,
    ),
    **_each(
        """
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
            """,
        only=(False,),
        elsewhere=_ONE_HOST,
    ),
    "data_parallel_backend": Meaning(only=("mp",), elsewhere=_ONE_HOST),
    "nnodes": Meaning(only=(1,), elsewhere=_OVER_HOSTS),
    "stream_interval": Meaning(only=(1,)),
    "distributed_executor_backend": Meaning(
        only=(None, "mp", "uni", "ray"), is_speed=True, native=IGNORED
    ),
    # GPUs of one engine
    **_each(
        "tensor_parallel_size pipeline_parallel_size data_parallel_size",
        multiplies_gpus=True,
        native=1,
    ),
    **_each("prefill_context_parallel_size", multiplies_gpus=True),
    # what is not built in the native engine
    **_each("enable_lora trust_remote_code", native=False),
    **_each("speculative_config", native=None),
    # what the native engine decides by itself, or what only changes logs and loading
    **_each(
        """
            async_scheduling compilation_config disable_log_stats enable_chunked_prefill
            enable_log_requests gpu_memory_utilization hf_token load_format num_gpu_blocks_override
            scheduling_policy seed swap_space
            """,
        is_speed=True,
        native=IGNORED,
    ),
    **_each(
        """
            disable_log_requests max_logprobs max_num_partial_prefills max_seq_len_to_capture task
            task_type tokenizer_mode
            """,
        native=IGNORED,
    ),
    # of vLLM alone
    **_each(
        """
            aggregate_engine_logging all2all_backend collect_detailed_traces cpu_offload_gb
            cudagraph_capture_sizes cudagraph_metrics download_dir enable_eplb
            enable_expert_parallel enforce_eager eplb_config expert_placement_strategy
            kv_offloading_backend kv_offloading_size log_config_file log_level
            long_prefill_token_threshold max_cudagraph_capture_size max_parallel_loading_workers
            otlp_traces_endpoint safetensors_load_strategy scheduler_reserve_full_isl
            show_hidden_metrics_for_version use_tqdm_on_load watermark
            """,
        is_speed=True,
    ),
}

# options of the native engine alone, and what there is with vLLM instead; those that a config
# refuses without one of these are not among them
NATIVE_ONLY = (
    (
        ("host_kv_bytes", "host_kv_dtype", "kv_offload"),
        "vLLM has other options for KV in host memory, which go into engine_kwargs "
        "(kv_offloading_size)",
    ),
    (
        ("device_weight_bytes", "weight_buffers"),
        "vLLM has another one, which goes into engine_kwargs (cpu_offload_gb)",
    ),
    (("quantization",), "vLLM has other methods, see engine_kwargs.quantization"),
    (("speculative_tokens",), "vLLM has engine_kwargs.speculative_config"),
    (("cuda_graphs",), "vLLM has engine_kwargs.enforce_eager"),
)

# options that cannot be beside engine.weights='shared', and why; an option that is off, or the only
# value that is named, may be there
_OTHER_PLACES = "keeps weights elsewhere"
_SIZES = tuple(name for name, meaning in MEANINGS.items() if meaning.multiplies_gpus)
NOT_SHARED: Mapping[str, str] = {
    **dict.fromkeys(
        _SIZES, "spreads an engine over several devices, and one that shares weights has one"
    ),
    "distributed_executor_backend": "runs workers in separate processes, which have no link to "
    "the other replicas",
    "enforce_eager": "captures steps with the places of weights, which change from step to step",
    **dict.fromkeys(
        ("cpu_offload_gb", "offload_backend", "offload_group_size", "enable_sleep_mode"),
        _OTHER_PLACES,
    ),
    **dict.fromkeys(("enable_dbo", "ubatch_size"), "computes two halves of a step at once"),
    "enable_eplb": "moves experts",
    "enable_lora": "puts adapters around the modules whose weights are shared",
    "quantization": "changes the layout of loaded weights",
    "speculative_config": "has a second model, whose layers would be taken for those of the first",
    "load_format": "loads weights its own way",
}
# values other than those that are off
MAY_BE_SHARED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SIZES, (1,)),
    "distributed_executor_backend": ("uni",),
    "enforce_eager": (True,),
    "load_format": ("auto", "hf", "safetensors"),
    "offload_backend": ("auto",),
}


# names of the newest supported version, written by scripts/vllm_names.py
_NAMES = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
VERSION: str = _NAMES["version"]
ENGINE_ARGS, REASONING_PARSERS, TOOL_PARSERS = (
    frozenset(_NAMES[kind]) for kind in ("engine_args", "reasoning_parsers", "tool_parsers")
)
DENSE_RANKS = (
    "engine_kwargs.data_parallel_size is for mixtures of experts, whose ranks share them; data-"
    "parallel ranks of another model are independent engines: set pool.replicas"
)
# allowed values by the task of the stage
_RUNNERS = {"generate": ("auto", "generate"), "pooling": ("auto", "pooling")}
_CONVERTS = {"generate": ("auto", "none"), "pooling": ("auto", "none", "embed", "classify")}
# conversion of a model for another task; scores allow several
_PLAIN = Meaning()
_CONVERTED = {"embed": "embed", "classify": "classify"}


@options("backend.options.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class VllmOptions:
    """Options of the vLLM backend that `EngineConfig` does not have."""

    engine_kwargs: Answers[Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of vLLM's `EngineArgs`, except those that `engine` has."""
    check_logits: Answers[bool] = True
    """Make rows with NaN logits error rows; if false, vLLM samples from them."""
    reasoning_parser: Answers[str | None] = None
    """vLLM parser that moves reasoning from the text into a column `reasoning`."""
    tool_call_parser: Answers[str | None] = None
    """vLLM parser that moves tool calls from the text into a column `tool_calls`."""

    def __post_init__(self) -> None:
        for name, value in self.engine_kwargs.items():
            _check(name, value)
        if ranks_of(self) > 1 and self.engine_kwargs.get("distributed_executor_backend") == "ray":
            raise ConfigError(
                "engine_kwargs.data_parallel_size needs all ranks of an engine on one host, but "
                "distributed_executor_backend='ray' spreads an engine over hosts; leave one of "
                "them out, and set pool.replicas to use more hosts"
            )
        _check_parsers(self)
        _check_load_format(self.engine_kwargs.get("load_format"))


def place_of(name: str) -> str:
    """Return the end of an error, "; ...", that says where to set the vLLM option `name`.

    It is "" if vLLM's engine has no such option.
    """
    meaning = MEANINGS.get(name, _PLAIN)
    if name not in ENGINE_ARGS:
        return ""
    if meaning.elsewhere:
        return f"; {meaning.elsewhere}"
    if meaning.ours:
        return f"; of vLLM, set 'engine.{meaning.ours}'"
    return f"; of vLLM, set 'backend.options.engine_kwargs.{name}' and backend.kind 'vllm'"


def native_options(engine: EngineConfig) -> tuple[str, ...]:
    """Return the names of options that only the native engine has and that `engine` changes."""
    # an option that is off has no effect in vLLM either, but graphs are on by default
    return tuple(
        name
        for names, _ in NATIVE_ONLY
        for name in names
        if (getattr(engine, name) or name == "cuda_graphs")
        and not is_default(engine, name)
        # vLLM has slots for shared weights too
        and not (name == "weight_buffers" and engine.weights == "shared")
    )


def vllm_options(backend: BackendConfig, engine: EngineConfig) -> VllmOptions:
    """Return the checked options of a vLLM backend; ConfigError for those of the native engine."""
    options = from_mapping(VllmOptions, backend.options, where="backend.options")
    kind = "generate" if backend.task == "generate" else "pooling"
    for name, allowed in (("runner", _RUNNERS[kind]), ("convert", _CONVERTS[kind])):
        value = options.engine_kwargs.get(name, "auto")
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise ConfigError(
                f"engine_kwargs.{name} must be {choices} for task {backend.task!r}, got {value!r}; "
                "the option task of the stage sets the task of its engines"
            )
    has_parser = (options.reasoning_parser, options.tool_call_parser) != (None, None)
    if has_parser and backend.task != "generate":
        raise ConfigError(
            "backend.options.reasoning_parser and tool_call_parser need generated text, and task "
            f"{backend.task!r} generates none; leave them out"
        )
    of_native = frozenset(native_options(engine))
    for names, way_out in NATIVE_ONLY:
        if not of_native.isdisjoint(names):
            changed = " and ".join(f"engine.{name}" for name in names)
            are = "are options" if len(names) > 1 else "is an option"
            raise ConfigError(f"{changed} {are} of the native engine; {way_out}")
    if engine.weights == "shared":
        _check_shared(options.engine_kwargs)
    for name, value in _from_engine(engine).items():
        theirs = options.engine_kwargs.get(name, value)
        if theirs not in (None, value):
            ours = MEANINGS[name].ours
            called = f", which vLLM calls {value!r}," if MEANINGS[name].values else ""
            raise ConfigError(
                f"engine.{ours}={getattr(engine, str(ours))!r}{called} and engine_kwargs.{name}="
                f"{theirs!r} set the same option to different values; leave one of them out"
            )
    return options


def _from_engine(engine: EngineConfig) -> dict[str, Any]:
    """Return the options of vLLM that were changed in the engine's config."""
    values = {}
    for name, meaning in MEANINGS.items():
        ours = meaning.ours
        if ours is not None and (meaning.is_ours_alone or not is_default(engine, ours)):
            values[name] = getattr(engine, ours)
            if meaning.values and not meaning.is_ours_alone:
                # None where vLLM has no name for our value
                values[name] = {our: their for their, our in meaning.values.items()}.get(
                    values[name]
                )
    return values


def engine_args(
    options: VllmOptions, engine: EngineConfig, task: Task = "generate"
) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`, except the model."""
    args: dict[str, Any] = {
        **({} if task == "generate" else {"runner": "pooling"}),
        **({"convert": _CONVERTED[task]} if task in _CONVERTED else {}),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # a constraint applies after the reasoning
        "reasoning_parser": options.reasoning_parser,
        **_from_engine(engine),
    }
    if task != "generate" and engine.enable_prefix_caching:
        # only some pooling models can; vLLM knows which
        del args["enable_prefix_caching"]
    if gpus_per_engine(options) > ranks_of(options):
        # by default processes on this host, which end with the replica
        args["distributed_executor_backend"] = "mp"
    # values that leave the decision to raybatch
    explicit = {
        n: value
        for n, value in options.engine_kwargs.items()
        if n not in args or value not in (None, "auto")
    }
    return {**{n: value for n, value in args.items() if value is not None}, **explicit}


def gpus_per_engine(options: VllmOptions) -> int:
    """Return the number of devices that one engine uses."""
    return devices_of(options.engine_kwargs)


def devices_of(engine_args: Mapping[str, Any]) -> int:
    """Return the number of devices that an engine with these arguments uses."""
    sizes = (int(engine_args.get(n) or 1) for n, m in MEANINGS.items() if m.multiplies_gpus)
    return math.prod(sizes)


def ranks_of(options: VllmOptions) -> int:
    """Return the number of data-parallel ranks of one engine."""
    return int(options.engine_kwargs.get("data_parallel_size") or 1)


def actors_per_engine(options: VllmOptions) -> int:
    """Return how many ranks of one engine are Ray actors; 0 if they are processes of one host."""
    is_ray = options.engine_kwargs.get("distributed_executor_backend") == "ray"
    return gpus_per_engine(options) if is_ray else 0


def answer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `backend.options` that can change the answers of a job."""
    meanings = {n: MEANINGS.get(n, _PLAIN) for n in options.get("engine_kwargs") or ()}
    kept = {
        name: options["engine_kwargs"][name]
        for name, meaning in meanings.items()
        if not meaning.is_speed and not meaning.multiplies_gpus
    }
    others = {name: value for name, value in options.items() if name != "engine_kwargs"}
    return {**others, **({"engine_kwargs": kept} if kept else {})}


def _check(name: str, value: object) -> None:
    meaning = MEANINGS.get(name, _PLAIN)
    if meaning.is_ours_alone:
        raise ConfigError(
            f"engine_kwargs.{name} cannot be set here: set engine.{meaning.ours} instead"
        )
    if meaning.only:
        if value in meaning.only:
            return
        hint = f"; {meaning.elsewhere}" if meaning.elsewhere else ""
        allowed = " or ".join(repr(each) for each in meaning.only)
        raise ConfigError(f"engine_kwargs.{name} must be {allowed} here, got {value!r}{hint}")
    if meaning.elsewhere:
        raise ConfigError(f"engine_kwargs.{name} cannot be set here: {meaning.elsewhere}")
    if name not in ENGINE_ARGS:
        known = [each for each in ENGINE_ARGS if not MEANINGS.get(each, _PLAIN).elsewhere]
        raise ConfigError(
            f"engine_kwargs: vLLM {VERSION} has no option {name!r}{did_you_mean(str(name), known)}"
        )
    if meaning.multiplies_gpus and (type(value) is not int or value < 1):
        raise ConfigError(f"engine_kwargs.{name} must be a number of at least 1, got {value!r}")


def _check_shared(engine_kwargs: Mapping[str, Any]) -> None:
    for name, why in NOT_SHARED.items():
        value = engine_kwargs.get(name)
        # graphs are on by default
        is_off = not value and not (name == "enforce_eager" and value is False)
        if not (is_off or value in MAY_BE_SHARED.get(name, ())):
            raise ConfigError(
                f"engine_kwargs.{name}={value!r} {why}; leave it out, or engine.weights='shared'"
            )


def _check_load_format(value: object) -> None:
    if not (value is None or value in LOAD_FORMATS or plugins_have_load_format(value)):
        raise ConfigError(
            f"engine_kwargs.load_format must be one of {', '.join(LOAD_FORMATS)}, got {value!r}"
            f"{did_you_mean(value, LOAD_FORMATS)}; a format of a plugin needs vLLM and the plugin "
            "on this host"
        )


def _check_parsers(options: VllmOptions) -> None:
    # vLLM adds the names of a plugin at import, so they are unknown here
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
    theirs = options.engine_kwargs.get("reasoning_parser")
    if options.reasoning_parser is not None and theirs not in (None, options.reasoning_parser):
        raise ConfigError(
            f"reasoning_parser={options.reasoning_parser!r} and "
            f"engine_kwargs.reasoning_parser={theirs!r} set the same option to different values; "
            "leave one of them out"
        )
