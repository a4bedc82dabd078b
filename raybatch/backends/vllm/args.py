"""Options of the vLLM backend: checked without vLLM, and converted to its engine arguments."""

import json
import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from raybatch.backends.vllm.meanings import (
    MAY_BE_SHARED,
    MEANINGS,
    NATIVE_ONLY,
    NOT_SHARED,
    Meaning,
)
from raybatch.backends.vllm.versions import LOAD_FORMATS, plugins_have_load_format
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.config.option import CHECKED, Answers, is_default, options
from raybatch.errors import ConfigError, did_you_mean
from raybatch.records.types import Task

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
