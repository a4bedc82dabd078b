"""Decides where a job runs and with which backend, and gives its stage the pool for that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from raybatch.actors.executors.local_pools import gpus_of_host, plan_local_placement
from raybatch.actors.pool import PoolHandle
from raybatch.actors.replicas.placement import connected_ray, is_connected
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import type_of
from raybatch.config import PlanConfig, PoolConfig
from raybatch.durable.layout import PLAN_ORDER
from raybatch.durable.sink import holds_answers
from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.inputs.source import Source
from raybatch.planning.fingerprint import backend_kind
from raybatch.planning.store import read_plans
from raybatch.policy.executor import ExecutorFacts, ExecutorName, choose_executor, engines_for
from raybatch.rows.stage_model import check_model
from raybatch.stages.feeder import StageFeeder


@dataclass(frozen=True, kw_only=True, slots=True)
class Executor:
    is_local: bool
    reason: str
    num_engines: int = 0

    @property
    def name(self) -> str:
        return "local" if self.is_local else "ray"

    def __str__(self) -> str:
        return f"{self.name}, because {self.reason}"


def choose(wanted: ExecutorName, spec: PoolSpec, source: Source, plan: PlanConfig) -> Executor:
    """Return where a job runs; ConfigError: without Ray, and with options that need it."""
    is_local, reason = wanted == "local", "the job says so"
    num_bytes = sum(part.num_bytes for part in source.slices)
    needs_ray = _needs_ray(spec)
    if wanted == "auto":
        facts = ExecutorFacts(
            is_connected=is_connected(),
            needs_ray=needs_ray or _better_on_ray(spec),
            num_rows=source.num_rows,
            num_bytes=num_bytes,
            max_driver_bytes=plan.max_driver_bytes,
        )
        is_local, reason = choose_executor(facts)
    elif is_local and needs_ray:
        raise ConfigError(
            f"executor=local runs engines on this host without Ray, and {needs_ray} needs Ray; "
            "leave it out, or set executor=ray"
        )
    elif is_local and plan.mode != "off" and num_bytes > plan.max_driver_bytes:
        raise ConfigError(
            f"executor=local plans in this process alone, and the input takes {num_bytes} bytes "
            f"where plan.max_driver_bytes is {plan.max_driver_bytes}; raise that, set plan=off, or "
            "set executor=ray"
        )
    if not is_local:
        return Executor(is_local=False, reason=reason)
    most = plan_local_placement(spec).num_replicas
    is_given = spec.pool.replicas is not None
    num_engines = most if is_given else engines_for(source.num_rows, most)
    return Executor(is_local=True, reason=reason, num_engines=num_engines)


def _better_on_ray(spec: PoolSpec) -> str:
    """Return why Ray would have more engines on this host; "" where it would not."""
    num_gpus = gpus_of_engine(spec.backend, spec.engine)
    has_more = 0 < num_gpus < gpus_of_host() and spec.pool.replicas is None
    return f"an engine on each of {gpus_of_host()} GPUs" if has_more else ""


def _needs_ray(spec: PoolSpec) -> str:
    """Return an option that only Ray can follow; "" for none."""
    pool, defaults = spec.pool, PoolConfig()
    for name in (
        *("num_cpus_per_replica", "num_gpus_per_replica", "accelerator_type"),
        *("resources", "runtime_env", "bundles"),
    ):
        if getattr(pool, name) != getattr(defaults, name):
            return f"pool.{name}={getattr(pool, name)!r}"
    if type_of(spec.backend).num_actors(spec.backend, spec.engine):
        return "engine_kwargs.distributed_executor_backend='ray'"
    num_gpus = gpus_of_engine(spec.backend, spec.engine) if gpus_of_host() else 0
    if num_gpus and (pool.replicas or 1) > 1:
        return f"pool.replicas={pool.replicas} on GPUs"
    return ""


def stage_of_executor(
    stage: type[StageFeeder], executor: Executor, sinks: Sequence[str]
) -> type[StageFeeder]:
    """Return a stage with the pool of an executor; its backend is decided if no cluster starts.

    Of the outputs that it goes on with, the first that was begun says with which backend.
    """
    if executor.is_local:
        spec = stage.pool.spec
        spec = replace(spec, pool=replace(spec.pool, replicas=executor.num_engines))
        stage = type(stage.__name__, (stage,), {"pool": PoolHandle(spec, is_local=True)})
    if stage.config.backend.is_decided:
        return stage
    begun = next(filter(None, map(_began_with, sinks)), None)
    if begun is None and not stage.pool.is_local and connected_ray() is None:
        return stage
    return stage.settled(began_with=begun, connect=False)


def _began_with(sink: str) -> str | None:
    with error_context(f"sink {sink!r} cannot be used"):
        for folder in (sink, f"{sink.rstrip('/')}/{PLAN_ORDER}"):
            for stored in read_plans(folder):
                return backend_kind(stored.fingerprint) if holds_answers(folder) else None
    return None


def stage_of_cluster(
    stage: type[StageFeeder],
    schema: pa.Schema,
    start_ray: Callable[[], None] | None = None,
    *,
    connect: bool = True,
) -> type[StageFeeder]:
    """Return a stage whose backend a cluster decides, or options alone where none is connected.

    One that is decided is returned as it is. ConfigError: the backend cannot run the model, or
    cannot be decided.
    """
    if stage.config.backend.is_decided:
        return stage
    if start_ray is not None:
        start_ray()
    decided = stage.settled(connect=connect)
    check_model(decided.config, schema)
    return decided
