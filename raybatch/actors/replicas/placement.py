"""Sizes a pool: number of replicas, backend, resources that Ray reserves, and waits for them.

It also places the feeders of its rows.
"""

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import (
    BackendChoice,
    VllmBuild,
    check_pool,
    check_share,
    choose_backend,
    gpus_of_replica,
    unproven_on_gpus,
    vllm_build,
)
from raybatch.backends.registry import type_of
from raybatch.backends.vllm.args import native_options
from raybatch.config import PoolConfig, environment
from raybatch.errors import ConfigError

# interval at which a waiting replica makes other pools release engines
_ASK_AFTER_S = 5.0
_WARN_AFTER_S = 30.0
# amount of a resource that marks a kind of host
_SOME = 0.001
_KIND = "accelerator_type:"
# labels of hosts in Ray: kind of accelerator, and id
KIND_LABEL = "ray.io/accelerator-type"
HOST_LABEL = "ray.io/node-id"
# GPU engines on its host that one feeder keeps busy
_ENGINES_PER_FEEDER = 4
# share of a host's free CPUs for all its feeders, as read tasks need whole CPUs; a feeder alone
# uses about one
_PART_OF_HOST = 1 / 8
_MOST_CPUS = 0.5
_CPUS_TO_SHARE = 2

Resources = Mapping[str, float]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Number of replicas, and the resources that Ray reserves for each.

    Args:
        num_replicas: number of replicas; the maximum if the pool is autoscaled.
        num_cpus, num_gpus: reserved for each replica.
        num_engines_on_host: largest number of replicas that are expected to share a host.
        bundles: bundles of the placement group of a replica whose ranks are separate actors; then
            the replica actor itself needs no resources.
        num_first: initial number of replicas if autoscaled; None starts all at once.
    """

    num_replicas: int
    num_cpus: float
    num_gpus: float
    num_engines_on_host: int
    bundles: tuple[Mapping[str, float], ...] = ()
    num_first: int | None = None

    def total(self) -> dict[str, float]:
        """Return CPUs, GPUs and other bundle resources of one replica with its ranks."""
        names = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        if not self.bundles:
            return names
        names |= dict.fromkeys((name for bundle in self.bundles for name in bundle), 0.0)
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in names}


def requested_of_ray(plan: Placement, pool: PoolConfig) -> str:
    total = plan.total()
    group = f" in a placement group of {len(plan.bundles)} bundles" if plan.bundles else ""
    parts = [f"{total['CPU']:g} CPUs and {total['GPU']:g} GPUs{group}"]
    parts += [f"{amount:g} {name}" for name, amount in pool.resources.items()]
    if pool.accelerator_types:
        parts.append(f"a host with {' or '.join(pool.accelerator_types)}")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostView:
    """A host of a cluster, with its accelerator types."""

    host_id: str = ""
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    kinds: frozenset[str] = frozenset()

    def has_gpus_for(self, pool: PoolConfig) -> bool:
        """Return whether it has GPUs for engines of a pool."""
        wanted = frozenset(pool.accelerator_types)
        return bool(self.num_gpus) and (not wanted or bool(wanted & self.kinds))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What a placement needs to know of a cluster and its driver.

    Args:
        cores_of_driver: cores that the driver may use.
        vllm: the vLLM installed where the driver runs.
        may_grow: hosts may join; False if the driver has started Ray itself.
    """

    hosts: tuple[HostView, ...] = ()
    cores_of_driver: int = 1
    vllm: VllmBuild | None = None
    may_grow: bool = True

    @property
    def num_gpus(self) -> float:
        return sum(host.num_gpus for host in self.hosts)

    def gpus_for(self, pool: PoolConfig) -> list[float]:
        """Return the number of GPUs of each host that has GPUs for engines of a pool."""
        return [host.num_gpus for host in self.hosts if host.has_gpus_for(pool)]


def accelerators_in(resources: Mapping[str, float]) -> frozenset[str]:
    """Return the accelerator types of a host, by the names of its Ray resources."""
    return frozenset(name.removeprefix(_KIND) for name in resources if name.startswith(_KIND))


def connected_ray() -> ModuleType | None:
    """Return the module of Ray if this process is connected to a cluster, without importing it."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def is_connected() -> bool:
    """Return whether this process is connected to a Ray cluster, or RAY_ADDRESS is set."""
    return bool(environment().get("RAY_ADDRESS") or connected_ray())


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cluster_now() -> ClusterView:
    """Return a view of the current cluster; it has no hosts if this process is not connected."""
    ray = connected_ray()
    nodes = [] if ray is None else [node for node in ray.nodes() if node["Alive"]]
    own = None if ray is None else ray._private.worker._global_node
    return ClusterView(
        hosts=tuple(
            HostView(
                host_id=node["NodeID"],
                num_cpus=float(node["Resources"].get("CPU", 0)),
                num_gpus=float(node["Resources"].get("GPU", 0)),
                kinds=accelerators_in(node["Resources"]),
            )
            for node in nodes
        ),
        cores_of_driver=usable_cores(),
        vllm=vllm_build(),
        may_grow=own is None or not own.is_head(),
    )


def gpus_requested(spec: PoolSpec, cluster: ClusterView) -> float:
    """Return the GPUs requested for each replica, including its ranks."""
    if bundles := _bundles_of(spec):
        return sum(bundle.get("GPU", 0) for bundle in bundles)
    return gpus_of_replica(
        spec.pool,
        spec.backend,
        spec.engine,
        has_gpus=cluster.num_gpus > 0,
        may_grow=cluster.may_grow,
        vllm=cluster.vllm,
    )


def plan_placement(spec: PoolSpec, cluster: ClusterView) -> Placement:
    """Return the number and the resources of a pool's replicas, by its options and the cluster.

    Options that imply GPUs request them even if the cluster has none yet, because clusters
    autoscale. Then the number of GPUs is not checked, as later hosts are unknown.

    Raises:
        ConfigError: engines would share a GPU without a memory limit, or no host has the GPUs of
            one engine.
    """
    pool, bundles = spec.pool, _bundles_of(spec)
    num_gpus, with_gpus = gpus_requested(spec, cluster), cluster.gpus_for(pool)
    # ranks that are actors may run on several hosts
    places = [sum(with_gpus)] if bundles else with_gpus
    if pool.most_replicas is not None:
        num_replicas = pool.most_replicas
    elif type_of(spec.backend).is_endpoint:
        num_replicas = 1
    elif num_gpus:
        num_replicas = max(1, sum(num_fitting(num, num_gpus) for num in places))
    else:
        num_replicas = max(1, cluster.cores_of_driver // spec.engine.num_threads)
    num_replicas = max(num_replicas, pool.min_replicas or 1)
    check_share(num_gpus, spec.backend, spec.engine)
    check_groups(pool, num_replicas)
    of_group = num_gpus * (pool.share_group or 1)
    if with_gpus and num_gpus <= max(with_gpus) < of_group:
        raise ConfigError(
            f"pool.share_group={pool.share_group} needs {of_group:g} GPUs on one host, and the "
            f"largest host of the cluster has {max(with_gpus):g}; lower pool.share_group"
        )
    of_group = (pool.num_cpus_per_replica or 0) * (pool.share_group or 1)
    most_cpus = max((host.num_cpus for host in cluster.hosts), default=of_group)
    if pool.share_group is not None and of_group > most_cpus:
        raise ConfigError(
            f"pool.share_group={pool.share_group} needs {of_group:g} CPUs on one host, and the "
            f"largest host of the cluster has {most_cpus:g}; lower pool.share_group or "
            "pool.num_cpus_per_replica"
        )
    if bundles and with_gpus and num_gpus > sum(with_gpus):
        raise ConfigError(
            f"one engine needs {num_gpus:g} GPUs and the cluster has {sum(with_gpus):g}: "
            "lower tensor_parallel_size and pipeline_parallel_size"
        )
    if not bundles and with_gpus and num_gpus > max(1, *with_gpus):
        raise ConfigError(
            f"one engine needs {num_gpus:g} GPUs and the largest host of the cluster has "
            f"{max(with_gpus):g}: set engine_kwargs.distributed_executor_backend='ray' for a "
            "vLLM engine over several hosts, or lower tensor_parallel_size, "
            "pipeline_parallel_size, data_parallel_size or pool.num_gpus_per_replica"
        )
    if num_gpus:
        slots = [num_fitting(num, num_gpus) for num in with_gpus]
    else:
        slots = [num_replicas for host in cluster.hosts if host.num_cpus]
    return Placement(
        num_replicas=num_replicas,
        num_cpus=pool.num_cpus_per_replica,
        num_gpus=num_gpus,
        num_engines_on_host=most_on_a_host(num_replicas, slots),
        bundles=bundles,
        num_first=first_of(pool),
    )


def check_groups(pool: PoolConfig, num_replicas: int) -> None:
    """Raise ConfigError if the replicas cannot form whole weight-sharing groups."""
    if why := why_no_groups(pool.share_group, num_replicas, is_elastic=pool.is_elastic):
        raise ConfigError(f"pool.share_group={pool.share_group}: {why}")


def why_no_groups(size: int | None, num_replicas: int, *, is_elastic: bool) -> str | None:
    """Return why the replicas cannot form weight-sharing groups of `size`; None if they can.

    `is_elastic` if the pool is autoscaled.
    """
    if size is None:
        return None
    if is_elastic:
        return (
            "groups start and stop as a unit, so the number of engines must not change "
            "(pool.min_replicas, max_replicas); set pool.replicas"
        )
    if num_replicas % size:
        fitting = max(1, num_replicas // size) * size
        return (
            f"{num_replicas} replicas do not divide into groups of {size}; set pool.replicas to "
            f"a multiple of {size}, such as {fitting}"
        )
    return None


def first_of(pool: PoolConfig) -> int | None:
    """Return the initial number of replicas; None if all start at once."""
    return (pool.min_replicas or 1) if pool.is_elastic else None


def num_fitting(num_gpus: float, per_engine: float) -> int:
    # absorbs rounding of fractions such as 0.1
    return int(num_gpus / per_engine + 1e-6)


def spread(num_engines: int, slots: Sequence[int]) -> list[int]:
    """Return the number of engines of each host, spread evenly.

    `slots` has the number of engines that each host can hold; engines beyond their sum are left
    out.
    """
    engines = [0] * len(slots)
    for _ in range(min(num_engines, sum(slots))):
        free = (host for host in range(len(slots)) if engines[host] < slots[host])
        engines[min(free, key=engines.__getitem__)] += 1
    return engines


def most_on_a_host(num_engines: int, slots: Sequence[int]) -> int:
    """Return the largest number of engines on one host, if they are spread as by `spread`.

    Engines beyond the slots of all hosts may all get one new host.
    """
    engines = spread(num_engines, slots)
    return max(num_engines - sum(engines), *engines, 0)


def gpu_warnings(spec: PoolSpec, plan: Placement, cluster: ClusterView) -> list[str]:
    if not plan.num_gpus:
        return []
    warnings = unproven_on_gpus(spec.backend)
    if not cluster.gpus_for(spec.pool):
        kinds = " or ".join(spec.pool.accelerator_types)
        warnings.append(
            f"the cluster has no {kinds or 'GPU'} now, and each engine needs "
            f"{requested_of_ray(plan, spec.pool)}: engines start when hosts with GPUs join; set "
            "engine.device='cpu' to run on CPUs"
        )
    return warnings


def some_of_kind(kind: str) -> dict[str, float]:
    """Return the Ray resources that a bundle requests to be on a host with an accelerator type."""
    return {f"{_KIND}{kind}": _SOME}


def _bundles_of(spec: PoolSpec) -> tuple[Mapping[str, float], ...]:
    """Return the bundles of the ranks of one engine, if they are actors; the first has extras."""
    pool, num_ranks = spec.pool, type_of(spec.backend).num_actors(spec.backend, spec.engine)
    check_pool(pool, spec.backend, spec.engine)
    if not num_ranks:
        return ()
    kinds = pool.accelerator_types
    with_gpu = some_of_kind(kinds[0]) if len(kinds) == 1 else {}
    if pool.bundles is not None:
        return tuple({**(with_gpu if "GPU" in b else {}), **b} for b in pool.bundles)
    rank = {"GPU": 1.0, **with_gpu}
    first = {**rank, "CPU": pool.num_cpus_per_replica, **pool.resources}
    return ({n: value for n, value in first.items() if value}, *[rank] * (num_ranks - 1))


def settled(
    spec: PoolSpec,
    cluster: ClusterView,
    *,
    vllm: Callable[[], VllmBuild | None],
    began_with: str | None = None,
) -> tuple[PoolSpec, BackendChoice | None]:
    """Return a spec with a decided backend, and the choice; None if the user named a backend.

    Args:
        vllm: returns the vLLM on the engines' hosts, None if there is none.
        began_with: backend kind of earlier rows of the same output.
    """
    if spec.backend.is_decided:
        return spec, None
    num_gpus = gpus_requested(spec, cluster)
    choice = choose_backend(
        num_gpus=num_gpus,
        vllm=vllm,
        native_options=native_options(spec.engine),
        shares_weights=spec.engine.weights == "shared",
        began_with=began_with,
    )
    # on CPUs there is no choice
    level = logging.INFO if num_gpus or not choice.is_usual else logging.DEBUG
    _logger.log(level, "using backend %s", choice)
    return replace(spec, backend=replace(spec.backend, kind=choice.kind)), choice


class WaitForRay:
    """Decides what to do while engines of a pool wait for resources of Ray.

    That is when idle pools should release resources (`is_due`), and when to warn (`message`).
    """

    def __init__(self, pool: PoolConfig, plan: Placement) -> None:
        self.requested = requested_of_ray(plan, pool)
        self._last_request_s = -math.inf
        self._has_warned = False

    def is_due(self, waits_s: float, now_s: float) -> bool:
        """Return whether to ask idle pools of the driver to release resources now.

        Args:
            waits_s: seconds of the longest wait so far.
            now_s: time of the monotonic clock.
        """
        if waits_s <= _ASK_AFTER_S or now_s - self._last_request_s <= _ASK_AFTER_S:
            return False
        self._last_request_s = now_s
        return True

    def message(self, num_waiting: int, waits_s: float) -> str:
        """Return the warning about a long wait the first time that it is due; else ""."""
        if waits_s <= _WARN_AFTER_S or self._has_warned:
            return ""
        self._has_warned = True
        engines = "1 engine" if num_waiting == 1 else f"{num_waiting} engines"
        return f"waiting for {engines}: each needs {self.requested} ({waits_s:.0f} s so far)"


def shortage(
    plan: Placement, pool: PoolConfig, hosts: Sequence[Resources], infeasible: Iterable[Resources]
) -> str:
    """Return why engines may wait forever and what to do; "" if some host could hold an engine.

    Args:
        hosts: total resources of each host of the cluster.
        infeasible: resource requests that no node type of the autoscaler can hold.
    """
    needs = plan.bundles or ({"CPU": plan.num_cpus, "GPU": plan.num_gpus, **pool.resources},)
    kinds = frozenset(pool.accelerator_types)
    lacking = [need for need in needs if not any(fits(need, kinds, host) for host in hosts)]
    if not lacking:
        return ""
    out = "lower the resources of an engine (pool, tensor_parallel_size), or "
    if any(_is_part(need, request) for need in lacking for request in infeasible):
        return (
            "no node type of the cluster's autoscaler could hold it: "
            f"{out}add such a type to the cluster's configuration"
        )
    return (
        "no host of the cluster could hold it; the job continues when one joins. If the cluster "
        f"does not autoscale: {out}add a host"
    )


def fits(need: Resources, kinds: frozenset[str], host: Resources) -> bool:
    """Return whether a host could hold a request if nothing else ran there.

    Args:
        need: requested resources.
        kinds: accelerator types, one of which the host must have if GPUs are requested.
        host: total resources of the host.
    """
    if kinds and need.get("GPU") and not kinds & accelerators_in(host):
        return False
    return _is_part(need, host)


def _is_part(need: Resources, of: Resources) -> bool:
    return all(of.get(name, 0.0) >= amount for name, amount in need.items() if amount)


def has_reserved(pool: PoolConfig, plan: Placement) -> bool:
    """Return whether engines of a pool reserve any Ray resources, for which others may wait."""
    return bool(plan.bundles or pool.resources or any(plan.total().values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederPlaces:
    """Number of feeders, ids of their preferred hosts (none: any), and CPUs of each."""

    num_feeders: int
    hosts: tuple[str, ...]
    num_cpus: float

    def labels(self) -> dict[str, Any]:
        """Return the Ray options that prefer these hosts, and fall back to any."""
        if not self.hosts:
            return {}
        return {
            "label_selector": {HOST_LABEL: f"in({','.join(self.hosts)})"},
            "fallback_strategy": [{"label_selector": {}}],
        }


def place_feeders(plan: Placement, pool: PoolConfig, hosts: Sequence[HostView]) -> FeederPlaces:
    """Return where feeders run: one on each host with CPU engines, one for up to four GPU engines.

    Engines are taken to spread over the hosts that can hold them; the rest run on future hosts.
    """
    per_engine = plan.num_gpus
    if per_engine:
        able = [h for h in hosts if h.has_gpus_for(pool)]
        # an engine over several hosts counts on the first
        room = [max(bool(plan.bundles), num_fitting(h.num_gpus, per_engine)) for h in able]
    else:
        able = [h for h in hosts if h.num_cpus]
        room = [plan.num_replicas] * len(able)
    engines = spread(plan.num_replicas, room)
    # future hosts have the rest
    num_all = -(-(plan.num_replicas - sum(engines)) // _ENGINES_PER_FEEDER)
    shares = []
    for host, num_engines in zip(able, engines, strict=True):
        num_feeders = -(-num_engines // _ENGINES_PER_FEEDER) if per_engine else min(1, num_engines)
        num_all += num_feeders
        if num_feeders:
            left = host.num_cpus - num_engines * plan.num_cpus
            part = left * _PART_OF_HOST / num_feeders if left >= _CPUS_TO_SHARE else 0.0
            shares.append(min(_MOST_CPUS, math.floor(100 * part) / 100))
    # with more hosts than engines, their hosts are not known yet
    known = able if plan.num_replicas >= len(able) else ()
    return FeederPlaces(
        num_feeders=num_all,
        hosts=tuple(host.host_id for host in known),
        num_cpus=min(shares, default=0.0),
    )
