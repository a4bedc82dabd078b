"""How many replicas a pool gets, and what Ray reserves for each, by the cluster as it is."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from raybatch.actors.records import PoolSpec
from raybatch.backends.options import (
    actors_of_engine,
    check_pool,
    check_share,
    gpus_of_engine,
)
from raybatch.config import PoolConfig
from raybatch.errors import ConfigError

__all__ = ["CrewPlan", "asked_of_ray", "check_cluster", "check_hosts", "plan_crew"]

# of a resource that hosts have to tell what they are
_SOME = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class CrewPlan:
    """How many replicas, and what Ray reserves for each.

    Args:
        num_replicas: ranks of the pool.
        num_cpus: logical CPUs of one replica.
        num_gpus: GPUs of one replica.
        num_engines_on_host: replicas that share a host, as far as the driver can tell.
        bundles: of the placement group of one replica whose ranks are actors of their own; with
            any, the replica itself takes nothing.
    """

    num_replicas: int
    num_cpus: float
    num_gpus: float
    num_engines_on_host: int
    bundles: tuple[Mapping[str, float], ...] = ()

    def total(self) -> dict[str, float]:
        """Return CPUs, GPUs and what else the bundles name, of one replica with its ranks."""
        names = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        if not self.bundles:
            return names
        names |= dict.fromkeys((name for bundle in self.bundles for name in bundle), 0.0)
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in names}

    def asks_for(self) -> str:
        """Return the same in words."""
        total = self.total()
        group = f" in a placement group of {len(self.bundles)} bundles" if self.bundles else ""
        return f"{total['CPU']} CPUs and {total['GPU']} GPUs{group}"


def asked_of_ray(plan: CrewPlan, pool: PoolConfig) -> str:
    """Return in words what one engine asks of Ray."""
    others = [f"{amount:g} {name}" for name, amount in pool.resources.items()]
    if pool.accelerator_type is not None:
        others.append(f"a host with {pool.accelerator_type}")
    return ", ".join([plan.asks_for(), *others])


def plan_crew(spec: PoolSpec) -> CrewPlan:
    """Size the crew of a pool by the cluster as it is now.

    Raises:
        ConfigError: engines would share a GPU without a limit of memory, or no host has the GPUs
            of one engine.
    """
    pool = spec.pool
    cluster_gpus = float(ray.cluster_resources().get("GPU", 0))
    num_gpus = pool.num_gpus_per_replica
    bundles = _bundles_of(spec)
    if bundles:
        num_gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
    elif num_gpus is None:
        num_gpus = float(gpus_of_engine(spec.backend, spec.engine)) if cluster_gpus else 0.0
    if pool.replicas is not None:
        num_replicas = pool.replicas
    elif spec.backend.kind == "openai":
        # it waits for answers, and one has room for hundreds of them
        num_replicas = 1
    elif num_gpus:
        num_replicas = max(1, int(cluster_gpus / num_gpus))
    else:
        num_replicas = max(1, len(os.sched_getaffinity(0)) // spec.engine.num_threads)
    check_share(num_gpus, spec.backend, spec.engine)
    kind = "GPU" if num_gpus else "CPU"
    hosts = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(kind)]
    of_hosts = [float(host["Resources"].get("GPU", 0)) for host in hosts]
    if bundles:
        check_cluster(num_gpus, of_hosts)
    elif num_gpus > 1:
        check_hosts(num_gpus, of_hosts)
    return CrewPlan(
        num_replicas=num_replicas,
        num_cpus=pool.num_cpus_per_replica,
        num_gpus=num_gpus,
        num_engines_on_host=-(-num_replicas // max(1, len(hosts))),
        bundles=bundles,
    )


def check_hosts(num_gpus: float, gpus_of_hosts: Sequence[float]) -> None:
    """Raise ConfigError where an engine would need the GPUs of several hosts."""
    largest = max(gpus_of_hosts, default=0)
    if num_gpus > largest:
        raise ConfigError(
            f"one engine asks for {num_gpus:g} GPUs and the largest host of the cluster has "
            f"{largest:g}: set engine_kwargs.distributed_executor_backend='ray' for an engine of "
            "vLLM over several hosts, or lower tensor_parallel_size and pipeline_parallel_size, or "
            "pool.num_gpus_per_replica"
        )


def check_cluster(num_gpus: float, gpus_of_hosts: Sequence[float]) -> None:
    """Raise ConfigError where the cluster has not the GPUs of one engine over several hosts."""
    if num_gpus > sum(gpus_of_hosts):
        raise ConfigError(
            f"one engine asks for {num_gpus:g} GPUs and the cluster has {sum(gpus_of_hosts):g}: "
            "lower tensor_parallel_size and pipeline_parallel_size"
        )


def _bundles_of(spec: PoolSpec) -> tuple[Mapping[str, float], ...]:
    """Return what the ranks of one engine take, where they are actors; the first has the rest."""
    pool, num_ranks = spec.pool, actors_of_engine(spec.backend, spec.engine)
    check_pool(pool, spec.backend, spec.engine)
    if not num_ranks:
        return ()
    kind = pool.accelerator_type
    with_gpu = {} if kind is None else {f"accelerator_type:{kind}": _SOME}
    if pool.bundles is not None:
        return tuple({**(with_gpu if "GPU" in b else {}), **b} for b in pool.bundles)
    rank = {"GPU": 1.0, **with_gpu}
    first = {**rank, "CPU": pool.num_cpus_per_replica, **pool.resources}
    return ({n: value for n, value in first.items() if value}, *[rank] * (num_ranks - 1))
