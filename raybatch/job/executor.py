"""Decides whether a job runs on Ray, and lets its stage have the pool that goes with it."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from raybatch.actors.executors.local_pools import gpus_of_host, plan_local_placement
from raybatch.actors.pool import PoolHandle
from raybatch.actors.replicas.placement import connected_ray
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import type_of
from raybatch.config import PlanConfig, PoolConfig
from raybatch.errors import ConfigError
from raybatch.inputs.source import Source
from raybatch.policy.executor import ExecutorFacts, ExecutorName, choose_executor, engines_for
from raybatch.stages.feeder import StageFeeder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Executor:
    """Where a job runs."""

    is_local: bool
    reason: str
    num_engines: int = 0

    @property
    def name(self) -> str:
        """The name of the option's value."""
        return "local" if self.is_local else "ray"

    def __str__(self) -> str:
        return f"{self.name}, because {self.reason}"


def is_connected(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process has a Ray cluster, or is told of one."""
    return bool(environment.get("RAY_ADDRESS")) or connected_ray() is not None


def choose(asked: ExecutorName, spec: PoolSpec, source: Source, plan: PlanConfig) -> Executor:
    """Return where a job runs.

    Raises:
        ConfigError: it is to run without Ray and has options that only Ray can follow.
    """
    num_bytes = sum(part.num_bytes for part in source.slices)
    needs_ray = _needs_ray(spec)
    if asked == "ray":
        return Executor(is_local=False, reason="the job says so")
    if asked == "auto":
        facts = ExecutorFacts(
            is_connected=is_connected(),
            needs_ray=needs_ray or _better_on_ray(spec),
            num_rows=source.num_rows,
            num_bytes=num_bytes,
            max_driver_bytes=plan.max_driver_bytes,
        )
        is_local, reason = choose_executor(facts)
        if not is_local:
            return Executor(is_local=False, reason=reason)
        return _local(spec, source, reason)
    if needs_ray:
        raise ConfigError(
            f"executor=local runs engines on this host without Ray, and {needs_ray} needs Ray; "
            "leave it out, or set executor=ray"
        )
    if plan.mode != "off" and num_bytes > plan.max_driver_bytes:
        raise ConfigError(
            f"executor=local plans in this process alone, and the input takes {num_bytes} bytes "
            f"where plan.max_driver_bytes is {plan.max_driver_bytes}; raise that, set plan=off, or "
            "set executor=ray"
        )
    return _local(spec, source, "the job says so")


def _local(spec: PoolSpec, source: Source, reason: str) -> Executor:
    most = plan_local_placement(spec).num_replicas
    is_given = spec.pool.replicas is not None
    num_engines = most if is_given else engines_for(source.num_rows, most)
    return Executor(is_local=True, reason=reason, num_engines=num_engines)


def with_pool(stage: type[StageFeeder], executor: Executor) -> type[StageFeeder]:
    """Return the stage with a pool that runs where the executor is."""
    if not executor.is_local:
        return stage
    spec = stage.pool.spec
    spec = replace(spec, pool=replace(spec.pool, replicas=executor.num_engines))
    pool = PoolHandle(spec, is_local=True)
    return type(stage.__name__, (stage,), {"pool": pool})


def _better_on_ray(spec: PoolSpec) -> str:
    """Return why Ray would have more engines on this host; "" where it would not."""
    num_gpus = gpus_of_engine(spec.backend, spec.engine)
    has_more = 0 < num_gpus < gpus_of_host() and spec.pool.replicas is None
    return f"an engine on each of {gpus_of_host()} GPUs" if has_more else ""


def _needs_ray(spec: PoolSpec) -> str:
    """Return an option that only Ray can follow; "" for none."""
    pool, defaults = spec.pool, PoolConfig()
    for name in (
        "num_cpus_per_replica",
        "num_gpus_per_replica",
        "accelerator_type",
        "resources",
        "runtime_env",
        "bundles",
    ):
        if getattr(pool, name) != getattr(defaults, name):
            return f"pool.{name}={getattr(pool, name)!r}"
    if type_of(spec.backend).num_actors(spec.backend, spec.engine):
        return "engine_kwargs.distributed_executor_backend='ray'"
    num_gpus = gpus_of_engine(spec.backend, spec.engine) if gpus_of_host() else 0
    if num_gpus and (pool.replicas or 1) > 1:
        return f"pool.replicas={pool.replicas} on GPUs"
    return ""
