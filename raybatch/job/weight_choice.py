"""Whether the replicas of a job share weights, where `engine.weights` is "auto"; and why.

They do where a replica alone has no room, or a simulated job ends 5 % sooner. Rates are those of
`policy.gpu_kinds`, batches and memory within the options of the engine; no row is longer than its
longest, or than 4,096 tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raybatch.actors.executors.local_pools import gpus_of_host
from raybatch.actors.pool import PoolHandle
from raybatch.actors.replicas.placement import (
    ClusterView,
    cluster_now,
    gpus_requested,
    why_no_groups,
)
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import check_options, type_of
from raybatch.errors import ConfigError, RaybatchError
from raybatch.installation import LAB, pool_extension
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch.models.source import resolve_config
from raybatch.policy.gpu_kinds import GPU_KINDS
from raybatch.policy.memory_plan import DEFAULT_UTILISATION, GpuBudget
from raybatch.stages.feeder import StageFeeder

_MOST_TOKENS = 4096

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """What was chosen.

    Args:
        share_group: replicas that share weights; None where each holds all.
    """

    share_group: int | None
    why: str

    def __str__(self) -> str:
        how = "replicated" if self.share_group is None else f"shared by {self.share_group}"
        return f"{how}: {self.why}"


class _ReplicatedError(Exception):
    """Why replicas hold all weights."""


def choose_weights(spec: PoolSpec, cluster: ClusterView, *, is_local: bool) -> WeightChoice:
    """Return whether replicas of a pool share weights on a cluster, with a decided backend.

    Raises:
        ConfigError: a job is to be simulated, and raybatch-lab is not installed.
    """
    try:
        _check_options(spec)
        size = _group_size(spec, cluster, is_local=is_local)
        kind = _kind_of(spec, cluster)
        return _simulated(spec, kind, size)
    except _ReplicatedError as reason:
        return WeightChoice(None, str(reason))


def with_chosen_weights(stage: type[StageFeeder]) -> type[StageFeeder]:
    """Return a stage whose replicas share weights or not; one that says so is returned as it is."""
    if stage.config.engine.weights != "auto" or not stage.config.backend.is_decided:
        return stage
    spec, is_local = stage.pool.spec, stage.pool.is_local
    choice = choose_weights(spec, cluster_now(), is_local=is_local)
    _logger.info("weights are %s", choice)
    spec = _with(spec, choice.share_group)
    config = replace(stage.config, engine=spec.engine, pool=spec.pool)
    pool = PoolHandle(spec, is_local=is_local)
    attributes = {"config": config, "pool": pool, "weights_choice": str(choice)}
    return type(stage.__name__, (stage,), attributes)


def how_weights_are_held(stage: type[StageFeeder]) -> str:
    """Return whether replicas share weights, and why; "" where the stage says that they do not."""
    group = stage.config.pool.share_group
    return stage.weights_choice or ("" if group is None else f"shared by {group} replicas")


def _with(spec: PoolSpec, share_group: int | None) -> PoolSpec:
    return replace(
        spec,
        engine=replace(spec.engine, weights="replicated" if share_group is None else "shared"),
        pool=replace(spec.pool, share_group=share_group),
    )


def _group_size(spec: PoolSpec, cluster: ClusterView, *, is_local: bool) -> int:
    """Return the replicas of a group."""
    num_gpus, hosts = gpus_requested(spec, cluster), cluster.gpus_for(spec.pool)
    if is_local:
        num_gpus = gpus_of_engine(spec.backend, spec.engine) if gpus_of_host() else 0
    if not num_gpus:
        if spec.engine.device == "cuda":
            raise _ReplicatedError("no GPU is known here")
        raise _ReplicatedError("it is the memory of GPUs that this is for, and engines run on CPUs")
    if is_local:
        raise _ReplicatedError("on GPUs a job without Ray has one engine")
    if num_gpus != 1:
        raise _ReplicatedError(f"engines that share weights have one GPU each, not {num_gpus:g}")
    if not hosts:
        raise _ReplicatedError("no host with a GPU is known yet")
    num_replicas = spec.pool.most_replicas or int(sum(hosts))
    size = _largest_group(num_replicas, [int(gpus) for gpus in hosts])
    if size < 2:
        listed = ", ".join(f"{gpus:g}" for gpus in sorted(set(hosts)))
        raise _ReplicatedError(
            f"{num_replicas} replicas on hosts of {listed} GPUs are no groups of two or more, all "
            "alike"
        )
    if why := why_no_groups(size, num_replicas, is_elastic=spec.pool.is_elastic):
        raise _ReplicatedError(why)
    return size


def _largest_group(num_replicas: int, hosts: Sequence[int]) -> int:
    """Return the most replicas that groups may have which are alike and each on one host, or 1."""
    for size in range(min(num_replicas, max(hosts)), 1, -1):
        room = sum(gpus // size for gpus in hosts)
        if num_replicas % size == 0 and room >= num_replicas // size:
            return size
    return 1


def _check_options(spec: PoolSpec) -> None:
    if not type_of(spec.backend).has_weights:
        raise _ReplicatedError(f"engines of the {spec.backend.kind} backend have no weights")
    try:
        # of any group
        shared = _with(spec, 2)
        check_options(shared.backend, shared.engine)
    except RaybatchError as error:
        raise _ReplicatedError(str(error)) from error
    kwargs = _engine_kwargs(spec)
    if spec.engine.quantization is not None or kwargs.get("quantization") is not None:
        raise _ReplicatedError("jobs of quantized weights are not simulated")
    if {spec.engine.kv_cache_dtype, kwargs.get("kv_cache_dtype", "auto")} != {"auto"}:
        raise _ReplicatedError("jobs of quantized KV are not simulated")
    given = spec.engine.kv_cache_bytes, kwargs.get("num_gpu_blocks_override")
    if given != (None, None):
        raise _ReplicatedError("KV has the size that options say, whatever weights leave")


def _engine_kwargs(spec: PoolSpec) -> Mapping[str, Any]:
    return spec.backend.options.get("engine_kwargs") or {}


def _kind_of(spec: PoolSpec, cluster: ClusterView) -> str:
    kinds = cluster.kinds_for(spec.pool)
    if len(kinds) != 1:
        raise _ReplicatedError(f"GPUs are of {len(kinds)} kinds that Ray names; rates are of one")
    (kind,) = kinds
    if kind not in GPU_KINDS:
        raise _ReplicatedError(f"rates of {kind} are not known, only of {', '.join(GPU_KINDS)}")
    return kind


def _simulated(spec: PoolSpec, kind: str, size: int) -> WeightChoice:
    choose = pool_extension("weights")
    if choose is None:
        raise ConfigError(
            f'engine.weights="auto" simulates a job on {kind}, which takes {LAB}; or set '
            'engine.weights to "shared" or "replicated"'
        )
    kwargs = _engine_kwargs(spec)
    share = kwargs.get("gpu_memory_utilization") or DEFAULT_UTILISATION
    try:
        model: ModelSpec = read_model_spec(resolve_config(spec.model))
        longest = spec.engine.max_model_len or model.max_model_len
        group, why = choose(
            model,
            kind,
            budget=GpuBudget(gpu_bytes=GPU_KINDS[kind].memory_bytes, utilisation=share),
            tp=1,
            size=size,
            sequence_tokens=min(longest, _MOST_TOKENS),
            num_slots=spec.engine.given_buffers,
            rates=GPU_KINDS[kind].rates,
            element_bytes=4 if spec.engine.dtype == "float32" else 2,
            shares_tiles=type_of(spec.backend).shares_tiles,
            max_rows=kwargs.get("max_num_seqs") or spec.engine.max_num_seqs,
            max_pass_tokens=kwargs.get("max_num_batched_tokens") or spec.engine.token_budget,
        )
    except RaybatchError as error:
        raise _ReplicatedError(str(error)) from error
    return WeightChoice(group, why)
