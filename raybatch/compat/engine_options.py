"""What ray.data.llm's `engine_kwargs` and placement groups mean here, for either engine."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from raybatch.backends.registry import check_options
from raybatch.backends.vllm.meanings import IGNORED, MEANINGS, UNKNOWN, Meaning
from raybatch.config import BackendConfig, EngineConfig, Strategy, check_bundles
from raybatch.config.option import fields_of
from raybatch.errors import ConfigError, did_you_mean

_EAGER = "enforce_eager"
# of vLLM's server, with requests that nobody sends here
_OF_SERVER = ("enable_log_requests",)
# passed on to vLLM under its own name, which has more values than ours
_OF_VLLM = ("kv_cache_dtype",)
# set here under vLLM's name as well, which names methods that the native engine has too
_AS_OURS = ("quantization",)


def vllm_config(
    engine_kwargs: Mapping[str, Any], backend: BackendConfig, *, model: str
) -> tuple[EngineConfig, BackendConfig, list[str]]:
    """Return the options of an engine of vLLM, and the names of those that have no effect.

    The `engine_kwargs` of the backend win; the options may name the model once more.
    """
    engine_kwargs = {n: v for n, v in engine_kwargs.items() if (n, v) != ("model", model)}
    values, others = dict[str, Any](), dict[str, Any]()
    for name, value in engine_kwargs.items():
        meaning = MEANINGS.get(name, Meaning())
        if meaning.ours is not None and name not in _OF_VLLM:
            values[meaning.ours] = _ours(meaning, value)
        if not meaning.is_ours_alone and name not in _OF_SERVER:
            others[name] = value
    engine = EngineConfig(**{name: value for name, value in values.items() if value is not None})
    others |= backend.options.get("engine_kwargs", {})
    backend = replace(backend, options={**backend.options, "engine_kwargs": others})
    check_options(backend, engine)
    return engine, backend, [f"engine_kwargs.{n}" for n in _OF_SERVER if n in engine_kwargs]


def engine_config(engine_kwargs: Mapping[str, Any]) -> tuple[EngineConfig, list[str]]:
    """Return the options of the native engine, and the names of those that have no effect."""
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in engine_kwargs.items():
        meaning = MEANINGS.get(name, Meaning())
        if meaning.ours is not None:
            if value is not None:
                values[meaning.ours] = _ours(meaning, value)
        elif name in _AS_OURS:
            values[name] = value
        elif name == _EAGER:
            # CUDA graphs are taken where they can be, unless this says no
            values["cuda_graphs"] = False if value else "auto"
        elif meaning.native is IGNORED:
            ignored.append(f"engine_kwargs.{name}")
        elif meaning.native is not UNKNOWN:
            if value is not None and value != meaning.native:
                raise ConfigError(
                    f"engine_kwargs.{name}={value!r} is not supported by the native engine; leave "
                    "it out"
                )
        elif name in fields_of(EngineConfig):
            raise ConfigError(
                f"engine_kwargs has vLLM's names, and {name!r} is an option of raybatch's own "
                f"engine: LLMStage(model, engine={{{name!r}: ...}}) takes it"
            )
        else:
            known = [n for n, m in MEANINGS.items() if m.ours or m.native is not UNKNOWN]
            hint = did_you_mean(name, [*known, *_AS_OURS, _EAGER])
            raise ConfigError(f"engine_kwargs: unknown option {name!r}{hint}")
    return EngineConfig(**values), ignored


def _ours(meaning: Meaning, value: object) -> object:
    """Return our name of a value of vLLM, or the value where both call it the same."""
    return meaning.values.get(value, value) if isinstance(value, str) else value


def reserved_by(group: Mapping[str, Any], *, num_ranks: int, are_actors: bool) -> dict[str, Any]:
    """Return the options of `PoolConfig` that reserve what the bundles of a group say.

    Ranks that are actors of Ray run in these bundles, on whatever hosts. Otherwise all ranks of an
    engine run on one host, in one actor and the processes that end with it: the bundles are added
    up, there is no group, and nothing has to be released; they cannot be spread over hosts.
    """
    where, names = "placement_group_config", ("bundles", "bundle_per_worker", "strategy")
    if not isinstance(group, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {group!r}")
    for name in group:
        if name not in names:
            raise ConfigError(f"{where}: unknown option {name!r}{did_you_mean(str(name), names)}")
    given = [name for name in names[:2] if group.get(name) is not None]
    if len(given) != 1:
        raise ConfigError(f"{where} must have one of bundles and bundle_per_worker")
    (name,) = given
    bundles = group[name] if name == "bundles" else [group[name]] * num_ranks
    check_bundles(bundles, where=f"{where}.{name}", is_zero_allowed=True)
    strategy = group.get("strategy", "PACK")
    if strategy not in get_args(Strategy):
        raise ConfigError(
            f"{where}.strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}"
        )
    if are_actors:
        # Ray refuses bundles of nothing
        kept = [{n: amount for n, amount in bundle.items() if amount} for bundle in bundles]
        return {"bundles": kept, "strategy": strategy}
    if strategy in ("SPREAD", "STRICT_SPREAD") and len(bundles) > 1:
        raise ConfigError(
            f"{where}.strategy {strategy!r} spreads the ranks of one engine over hosts, and these "
            "are processes of one host; set engine_kwargs.distributed_executor_backend='ray', or "
            "leave the strategy out"
        )
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return {
        "num_cpus_per_replica": float(total.pop("CPU", 0)),
        "num_gpus_per_replica": float(total.pop("GPU", 0)),
        "resources": {name: amount for name, amount in total.items() if amount},
    }
