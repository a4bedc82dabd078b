"""Resource requests of engines, and queries and downloads on hosts of a Ray cluster."""

import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raybatch.actors.replicas.placement import (
    HOST_LABEL,
    KIND_LABEL,
    Placement,
    accelerators_in,
    cluster_now,
    fits,
    plan_placement,
    requested_of_ray,
)
from raybatch.actors.replicas.runtime import obey_log_level
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import VllmBuild, vllm_build
from raybatch.config import PoolConfig
from raybatch.errors import ConfigError, last_line
from raybatch.models.checkpoint import model_fingerprint
from raybatch.models.prefetch import Prefetched, prefetch
from raybatch.models.source import resolve_model

_Nodes = Sequence[Mapping[str, Any]]

_logger = logging.getLogger(__name__)


def environment_of(pool: PoolConfig, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the option `runtime_env` of Ray tasks and actors of a pool; {} if it has none.

    `variables` are environment variables to add.
    """
    env = dict(pool.runtime_env)
    if variables:
        env["env_vars"] = {**env.get("env_vars", {}), **variables}
    return {"runtime_env": env} if env else {}


def ray_options_of(
    plan: Placement, pool: PoolConfig, *, avoid: Collection[str] = ()
) -> dict[str, Any]:
    """Return the Ray options of an actor or task that needs the resources of an engine.

    `avoid` has the ids of hosts on which it must not run.
    """
    kinds = pool.accelerator_types
    given = {
        "accelerator_type": kinds[0] if len(kinds) == 1 else None,
        "resources": dict(pool.resources),
        "label_selector": labels_of(pool, avoid),
    }
    requested = {"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus, **environment_of(pool)}
    return requested | {name: value for name, value in given.items() if value}


def labels_of(pool: PoolConfig, avoid: Collection[str]) -> dict[str, str]:
    """Return the Ray label selector for hosts of an engine, by accelerator types and `avoid`.

    A single accelerator type is requested as a resource instead, and not selected by label.
    """
    kinds, labels = pool.accelerator_types, {}
    if len(kinds) > 1:
        labels[KIND_LABEL] = f"in({','.join(kinds)})"
    if avoid:
        labels[HOST_LABEL] = f"!in({','.join(sorted(avoid))})"
    return labels


def vllm_of_hosts(pool: PoolConfig) -> VllmBuild | None:
    """Return the vLLM installed on a host for a pool's engines, in their runtime environment.

    None if it has none. If the cluster has no host for engines yet, any host is queried.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 1, **environment_of(pool)}
    if (node_id := host_of_engines(pool, ray.nodes())) is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    try:
        call = ray.remote(vllm_build).options(**options).remote()
        build: VllmBuild | None = ray.get(call, timeout=pool.start_timeout_s)
    except (GetTimeoutError, RayError, ValueError) as error:  # ValueError: a wrong option
        raise ConfigError(
            "backend is not set, and no host could report whether it has vLLM: "
            f"{last_line(error)}; set backend to 'vllm' or 'native'"
        ) from error
    return build


def host_of_engines(pool: PoolConfig, nodes: _Nodes) -> str | None:
    """Return the id of a host with a GPU, if possible of the kind that the pool requests."""
    wanted = frozenset(pool.accelerator_types)
    hosts = [node for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    hosts.sort(key=lambda host: not wanted & accelerators_in(host["Resources"]))
    return str(hosts[0]["NodeID"]) if hosts else None


def weights_of_hosts(spec: PoolSpec) -> str:
    """Return the digest of a model's weights on the first host of its engines that has them.

    If the cluster has no host for an engine yet, this waits for one as an engine would. Initialises
    Ray if needed. Raises ConfigError with the first reason if no host has them.
    """
    if not ray.is_initialized():
        ray.init()
    plan, pool = plan_placement(spec, cluster_now()), spec.pool
    refused = []
    for where in _places(plan, pool, ray.nodes()):
        try:
            call = ray.remote(_weights_or_reason).options(max_retries=1, **where).remote(spec.model)
            digest, reason = ray.get(call, timeout=pool.start_timeout_s)
        except (GetTimeoutError, RayError, ValueError) as error:
            digest, reason = "", last_line(error)
        if digest:
            return str(digest)
        refused.append(reason)
    raise ConfigError(
        f"the model {spec.model!r} has no weights on the driver, nor on any of the {len(refused)} "
        f"hosts for its engines: {refused[0]}. Copy the weights to this path on every such host"
    )


def _weights_or_reason(model: str) -> tuple[str, str]:
    try:
        return model_fingerprint(resolve_model(model)), ""
    except (ConfigError, OSError) as error:
        return "", f"host {socket.gethostname()}: {error}"


def _places(plan: Placement, pool: PoolConfig, nodes: _Nodes) -> list[dict[str, Any]]:
    """Return the options of tasks on each host of engines, or on the first one to join."""
    if plan.bundles:
        ranks = max(plan.bundles, key=lambda bundle: bundle.get("GPU", 0))
        plan = replace(plan, num_cpus=0, num_gpus=ranks.get("GPU", 0), bundles=())
    need = {"CPU": plan.num_cpus, "GPU": plan.num_gpus, **pool.resources}
    alive, kinds = [n for n in nodes if n["Alive"]], frozenset(pool.accelerator_types)
    places = [
        NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
        for node in alive
        if fits(need, kinds, node["Resources"])
    ]
    if places:
        on_host = {"num_cpus": 0, **environment_of(pool)}
        return [{**on_host, "scheduling_strategy": place} for place in places]
    requested = requested_of_ray(plan, pool)
    _logger.info(
        "waiting for a host to join that can check the model's weight files; an engine needs %s",
        requested,
    )
    return [ray_options_of(plan, pool)]


def prefetch_on_every_host(
    source: str, *, with_weights: bool = True, to: Path | None = None
) -> list[Prefetched | str]:
    """Fetch a model on every live host of the cluster in parallel.

    Returns a result for each host: what it fetched, or a text with the error.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(_prefetch)
    calls = {
        node["NodeManagerHostname"]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(source, with_weights, to)
        for node in ray.nodes()
        if node["Alive"]
    }
    return [_prefetched(host, call) for host, call in calls.items()]


def _prefetch(source: str, with_weights: bool, to: Path | None) -> Prefetched | str:
    obey_log_level()
    try:
        return prefetch(source, with_weights=with_weights, to=to)
    except ConfigError as error:
        return str(error)


def _prefetched(host: str, call: "ray.ObjectRef[Prefetched | str]") -> Prefetched | str:
    try:
        result = ray.get(call)
    except RayError as error:
        result = str(error).strip().splitlines()[-1]
    return f"{host}: {result}" if isinstance(result, str) else result
