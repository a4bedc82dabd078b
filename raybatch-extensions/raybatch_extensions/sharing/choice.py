"""Decides whether replicas share weights if `engine.weights` is "auto".

They do if one replica alone does not fit its GPU, or if a simulated job ends 5 % sooner. Rates are
those of `sharing.decode_times`; batches and memory follow the engine's options; rows have at most
`max_model_len` or 4,096 tokens.
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
from raybatch.stages.feeder import StageFeeder
from raybatch_extensions.sharing.decode_times import GPU_KINDS

_MOST_TOKENS = 4096

_logger = logging.getLogger("raybatch.extensions.sharing.choice")


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """The chosen weight mode.

    Args:
        share_group: number of replicas in each group that shares weights; None if each replica
            holds all weights.
        why: reason for the choice.
    """

    share_group: int | None
    why: str

    def __str__(self) -> str:
        how = "replicated" if self.share_group is None else f"shared by {self.share_group}"
        return f"{how}: {self.why}"


class _ReplicatedError(Exception):
    """The reason why replicas hold all weights."""


def choose_weights(spec: PoolSpec, cluster: ClusterView, *, is_local: bool) -> WeightChoice:
    """Return whether the replicas of a pool share weights, and why.

    The backend of `spec` is decided. `is_local`: the job runs without Ray, on this host.

    Raises:
        ConfigError: the choice needs a simulation, and raybatch-lab is not installed.
    """
    try:
        _check_options(spec)
        size = _group_size(spec, cluster, is_local=is_local)
        kind = _kind_of(spec, cluster)
        return _simulated(spec, kind, size)
    except _ReplicatedError as reason:
        return WeightChoice(None, str(reason))


def with_chosen_weights(stage: type[StageFeeder]) -> type[StageFeeder]:
    """Return a stage in which engine.weights="auto" is replaced by a decided weight mode."""
    spec, is_local = stage.pool.spec, stage.pool.is_local
    choice = choose_weights(spec, cluster_now(), is_local=is_local)
    _logger.info("weights are %s", choice)
    spec = _with(spec, choice.share_group)
    config = replace(stage.config, engine=spec.engine, pool=spec.pool)
    pool = PoolHandle(spec, is_local=is_local)
    attributes = {"config": config, "pool": pool, "weights_choice": str(choice)}
    return type(stage.__name__, (stage,), attributes)


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
            raise _ReplicatedError("this host has no GPU")
        raise _ReplicatedError("engines run on CPUs, and sharing saves GPU memory only")
    if is_local:
        raise _ReplicatedError(
            "without Ray a job on GPUs runs only one engine, so there is none to share weights with"
        )
    if num_gpus != 1:
        raise _ReplicatedError(
            f"replicas that share weights use one GPU each, but those of this job {num_gpus:g}"
        )
    if not hosts:
        raise _ReplicatedError(
            "the cluster has no host with a GPU yet, so groups that share weights cannot be planned"
        )
    num_replicas = spec.pool.most_replicas or int(sum(hosts))
    size = _largest_group(num_replicas, [int(gpus) for gpus in hosts])
    if size < 2:
        listed = ", ".join(f"{gpus:g}" for gpus in sorted(set(hosts)))
        raise _ReplicatedError(
            f"weights are shared by equal groups of two or more replicas on one host, which "
            f"{num_replicas} replicas on hosts of {listed} GPUs cannot form"
        )
    if why := why_no_groups(size, num_replicas, is_elastic=spec.pool.is_elastic):
        raise _ReplicatedError(why)
    return size


def _largest_group(num_replicas: int, hosts: Sequence[int]) -> int:
    """Return the largest size of equal groups, each on one host, or 1."""
    for size in range(min(num_replicas, max(hosts)), 1, -1):
        room = sum(gpus // size for gpus in hosts)
        if num_replicas % size == 0 and room >= num_replicas // size:
            return size
    return 1


def _check_options(spec: PoolSpec) -> None:
    if not type_of(spec.backend).has_weights:
        raise _ReplicatedError(
            f"engines of the {spec.backend.kind} backend have no weights to share"
        )
    try:
        # the size of the group does not matter
        shared = _with(spec, 2)
        check_options(shared.backend, shared.engine)
    except RaybatchError as error:
        raise _ReplicatedError(str(error)) from error
    kwargs = _engine_kwargs(spec)
    if spec.engine.quantization is not None or kwargs.get("quantization") is not None:
        raise _ReplicatedError(
            "the simulation that chooses weight sharing does not support quantized weights"
        )
    if {spec.engine.kv_cache_dtype, kwargs.get("kv_cache_dtype", "auto")} != {"auto"}:
        raise _ReplicatedError(
            "the simulation that chooses weight sharing does not support a quantized KV cache"
        )
    fixed = spec.engine.kv_cache_bytes, kwargs.get("num_gpu_blocks_override")
    if fixed != (None, None):
        raise _ReplicatedError(
            "options fix the size of the KV cache, so it cannot use memory that sharing would free"
        )


def _engine_kwargs(spec: PoolSpec) -> Mapping[str, Any]:
    return spec.backend.options.get("engine_kwargs") or {}


def _kind_of(spec: PoolSpec, cluster: ClusterView) -> str:
    wanted = frozenset(spec.pool.accelerator_types)
    here = frozenset[str]().union(*(host.kinds for host in cluster.hosts if host.num_gpus))
    kinds = (here & wanted or wanted) if wanted else here
    if len(kinds) != 1:
        raise _ReplicatedError(
            f"the simulation that chooses weight sharing needs hosts with one kind of GPU, but Ray "
            f"reports {len(kinds)} kinds"
        )
    (kind,) = kinds
    if kind not in GPU_KINDS:
        raise _ReplicatedError(
            f"the simulation that chooses weight sharing does not know the GPU {kind}, only "
            f"{', '.join(GPU_KINDS)}"
        )
    return kind


def _simulated(spec: PoolSpec, kind: str, size: int) -> WeightChoice:
    choose = pool_extension("weights")
    if choose is None:
        raise ConfigError(
            f'engine.weights="auto" simulates a job on {kind}, which needs {LAB}; or set '
            'engine.weights to "shared" or "replicated"'
        )
    kwargs = _engine_kwargs(spec)
    try:
        model: ModelSpec = read_model_spec(resolve_config(spec.model))
        longest = spec.engine.max_model_len or model.max_model_len
        group, why = choose(
            model,
            kind,
            gpu_bytes=GPU_KINDS[kind].memory_bytes,
            utilisation=kwargs.get("gpu_memory_utilization"),
            tp=1,
            size=size,
            sequence_tokens=min(longest, _MOST_TOKENS),
            num_slots=spec.engine.explicit_buffers,
            rates=GPU_KINDS[kind].rates,
            element_bytes=4 if spec.engine.dtype == "float32" else 2,
            shares_shards=type_of(spec.backend).shares_shards,
            max_rows=kwargs.get("max_num_seqs") or spec.engine.max_num_seqs,
            max_pass_tokens=kwargs.get("max_num_batched_tokens") or spec.engine.token_budget,
        )
    except RaybatchError as error:
        raise _ReplicatedError(str(error)) from error
    return WeightChoice(group, why)
