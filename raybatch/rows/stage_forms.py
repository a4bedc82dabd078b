"""The options of a stage from any form in which users give them."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from raybatch.backends.vllm.args import ENGINE_ARGS, VllmOptions, place_of
from raybatch.config import BackendConfig, EngineConfig, PoolConfig, from_mapping
from raybatch.errors import ConfigError, nearest_name
from raybatch.records.pooling import pooling_of
from raybatch.records.types import Sampling
from raybatch.rows.options import PROMPT_OPTIONS, StageConfig

_OUTER: Mapping[str, Any] = {"sampling": Sampling, "engine": EngineConfig, "pool": PoolConfig}
# what options of other libraries are here
_MEANT = {
    "concurrency": "pool.replicas",
    "batch_size": "engine.max_num_seqs",
    "num_gpus": "pool.num_gpus_per_replica",
    "num_cpus": "pool.num_cpus_per_replica",
}


def build_stage_config(model: str, given: Mapping[str, Any], *, where: str) -> StageConfig:
    """Build the options of a stage; the nested ones may be mappings, and None stands for a default.

    Args:
        given: options of `StageConfig`, `task` and `seed`.
        where: what the options belong to, for error messages.

    Raises:
        ConfigError: an unknown option (with a suggestion) or a value out of range.
    """
    known = {f.name for f in fields(StageConfig)} | {"seed", "task"}
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: unknown option {name!r}{_suggestion(name, known)}")
    values = {name: value for name, value in given.items() if value is not None}
    seed, task = values.pop("seed", None), values.pop("task", "generate")
    if isinstance(values.get("backend"), str):
        values["backend"] = {"kind": values["backend"]}
    for name, cls in {**_OUTER, "backend": BackendConfig}.items():
        value = values.setdefault(name, {})
        if isinstance(value, cls):
            continue
        if not isinstance(value, Mapping):
            what = f"{where}: {name} must be a {cls.__name__} or a mapping"
            raise ConfigError(f"{what}, got {value!r}")
        listed = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
        told = ENGINE_ARGS.union(_MEANT).intersection(listed)
        for key in sorted(told.difference(f.name for f in fields(cls))):
            raise ConfigError(f"{where}: {name}: unknown option {key!r}{_suggestion(key, known)}")
        values[name] = from_mapping(cls, listed, where=f"{where}: {name}")
    if task != "generate":
        values["backend"] = replace(values["backend"], task=task)
    if isinstance(values.get("pooling"), Mapping):
        values["pooling"] = pooling_of(values["pooling"])
    is_score = values["backend"].task == "score"
    if is_score and not any(name in values for name in (*PROMPT_OPTIONS, "query")):
        values |= {"query": "{query}", "document": "{document}"}
    if seed is not None:
        values["sampling"] = replace(values["sampling"], seed=seed)
    return from_mapping(StageConfig, {"model": model, **values}, where=where)


def _suggestion(name: str, known: set[str]) -> str:
    """Say which option may be meant; those that lie deeper are named with where they lie."""
    nested = {f.name: f"{option}.{f.name}" for option, cls in _OUTER.items() for f in fields(cls)}
    nested |= {f.name: f"backend.options.{f.name}" for f in fields(VllmOptions)}
    if ours := _MEANT.get(name):
        return f"; raybatch has {ours!r} for it"
    if name not in nested and (place := place_of(name)):
        return place
    nearest = nearest_name(name, [*nested, *known])
    return "" if nearest is None else f" (did you mean {nested.get(nearest, nearest)!r}?)"
