"""Decides where a job runs and with which backend; gives its stage the matching pool."""

import logging
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
from raybatch.durable.sink import folders_below, holds_answers
from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.inputs.source import Source
from raybatch.installation import weight_sharing
from raybatch.models.source import (
    content_in,
    is_hub_model,
    is_local_model,
    lacks_weights,
    pin,
    pinned_to,
    without_content,
)
from raybatch.planning.fingerprint import backend_kind, stored_commit, stored_content
from raybatch.planning.store import StoredPlan, read_plans
from raybatch.policy.executor import ExecutorName, choose_executor, engines_for
from raybatch.rows.stage_model import check_model
from raybatch.stages.feeder import StageFeeder

_logger = logging.getLogger(__name__)


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
    """Return whether a job runs with or without Ray, and why.

    `wanted` is the option `executor`. ConfigError: it is "local", but another option needs Ray, or
    the input is too large to be planned in this process.
    """
    is_local, reason = wanted == "local", "the job sets it"
    num_bytes = sum(part.num_bytes for part in source.slices)
    needs_ray = _needs_ray(spec)
    if wanted == "auto":
        is_local, reason = choose_executor(
            is_connected=is_connected(),
            needs_ray=needs_ray or _better_on_ray(spec),
            num_rows=source.num_rows,
            num_bytes=num_bytes,
            max_driver_bytes=plan.max_driver_bytes,
        )
    elif is_local and needs_ray:
        raise ConfigError(
            f"executor=local runs engines without Ray, but {needs_ray} needs Ray; leave it out, or "
            "set executor=ray"
        )
    elif is_local and plan.mode != "off" and num_bytes > plan.max_driver_bytes:
        raise ConfigError(
            f"executor=local plans in this process, and the input of {num_bytes} bytes is above "
            f"plan.max_driver_bytes={plan.max_driver_bytes}; raise it, set plan=off, or set "
            "executor=ray"
        )
    if not is_local:
        return Executor(is_local=False, reason=reason)
    most = plan_local_placement(spec).num_replicas
    pool = spec.pool
    is_fixed = pool.replicas is not None or pool.is_elastic or pool.share_group is not None
    num_engines = most if is_fixed else engines_for(source.num_rows, most)
    return Executor(is_local=True, reason=reason, num_engines=num_engines)


def _better_on_ray(spec: PoolSpec) -> str:
    """Return why Ray would run more engines on this host; "" if it would not."""
    num_gpus = gpus_of_engine(spec.backend, spec.engine)
    has_more = 0 < num_gpus < gpus_of_host() and spec.pool.replicas is None
    return f"an engine on each of {gpus_of_host()} GPUs" if has_more else ""


def _needs_ray(spec: PoolSpec) -> str:
    """Return an option that needs Ray; "" for none."""
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
    for name in ("replicas", "min_replicas", "max_replicas"):
        if num_gpus and (number := getattr(pool, name) or 1) > 1:
            return f"pool.{name}={number} on GPUs"
    return ""


def stage_of_executor(
    stage: type[StageFeeder], executor: Executor, sinks: Sequence[str]
) -> type[StageFeeder]:
    """Return a stage whose pool of engines runs where `executor` says.

    Its backend is decided, unless Ray still has to be started. If one of `sinks` has rows, the
    backend is the one that wrote the first of them.
    """
    if executor.is_local:
        spec = stage.pool.spec
        if not spec.pool.is_elastic:
            spec = replace(spec, pool=replace(spec.pool, replicas=executor.num_engines))
        stage = type(stage.__name__, (stage,), {"pool": PoolHandle(spec, is_local=True)})
    if stage.config.backend.is_decided:
        return stage
    started_with = _began_with(lambda plan: backend_kind(plan.fingerprint), sinks)
    if started_with is None and not stage.pool.is_local and connected_ray() is None:
        return stage
    return stage.settled(began_with=started_with, connect=False)


def beside_earlier_stage(stage: type[StageFeeder], source: pa.Schema) -> type[StageFeeder]:
    """Return a stage whose output columns do not replace those of an earlier stage in the source.

    If their names are equal, they get another prefix, with a warning.
    """
    config = stage.config
    prefix = config.output.prefix_beside(source)
    if prefix == config.output_prefix:
        return stage
    _logger.warning(
        "the source has output columns of an earlier job, so the columns of this one get the "
        "prefix %r; set output_prefix for another one",
        prefix,
    )
    return type(stage.__name__, (stage,), {"config": replace(config, output_prefix=prefix)})


def with_pinned_model(stage: type[StageFeeder], sinks: Sequence[str]) -> type[StageFeeder]:
    """Return a stage with a pinned model, so that every host loads the same weights.

    Without a hub revision, a resumed output uses the commit that it was started with. If only the
    hosts of engines have the weights of a folder, their content must be that of the first run.
    """
    model, backend = stage.config.model, stage.config.backend
    backend_type = type_of(backend)
    if backend_type.is_endpoint or not backend_type.reads_safetensors(backend):
        return stage
    if _lacks_weights(stage):

        def content_of(plan: StoredPlan) -> str | None:
            is_same = without_content(plan.model) == model
            return stored_content(plan.fingerprint) if is_same else None

        content = _began_with(content_of, sinks)
        return stage if content is None else stage.of_model(pinned_to(model, content))
    if is_local_model(model):
        return stage
    commit = None
    if is_hub_model(model):
        commit = _began_with(lambda plan: stored_commit(plan.fingerprint), sinks)
    return stage.of_model(pin(model, commit))


def check_weights_here(stage: type[StageFeeder], executor: Executor) -> None:
    """Raise ConfigError for a model folder without weights if engines run on this host."""
    if executor.is_local and _lacks_weights(stage):
        raise ConfigError(
            f"the model folder {stage.config.model!r} has no *.safetensors file, but engines run "
            "on this host: add the weights, or set executor=ray for hosts that have them"
        )


def with_weights_of_engines(
    stage: type[StageFeeder], start_ray: Callable[[], None] | None = None
) -> type[StageFeeder]:
    """Return a stage whose model is pinned to the digest of the weights on the engines' hosts.

    If the weights are on this host, the stage is returned unchanged.
    """
    if not _lacks_weights(stage) or content_in(stage.config.model) is not None:
        return stage
    if start_ray is not None:
        start_ray()
    from raybatch.actors.executors.ray_hosts import weights_of_hosts  # Ray is slow to load

    return stage.of_model(pinned_to(stage.config.model, weights_of_hosts(stage.pool.spec)))


def _lacks_weights(stage: type[StageFeeder]) -> bool:
    """Return whether engines need weights that the model folder on this host lacks."""
    backend_type = type_of(stage.config.backend)
    is_read = backend_type.has_weights and backend_type.reads_safetensors(stage.config.backend)
    return is_read and lacks_weights(stage.config.model)


def _began_with(named: Callable[[StoredPlan], str | None], sinks: Sequence[str]) -> str | None:
    """Return the first value of `named` among the plans of outputs that have rows, or None."""
    for sink in sinks:
        with error_context(f"sink {sink!r} cannot be used"):
            for folder in (sink, *folders_below(sink)):
                for stored in read_plans(folder)[:1]:
                    found = named(stored)
                    if found is not None and holds_answers(folder):
                        return found
    return None


def stage_of_cluster(
    stage: type[StageFeeder],
    schema: pa.Schema,
    start_ray: Callable[[], None] | None = None,
    *,
    connect: bool = True,
) -> type[StageFeeder]:
    """Return a stage whose backend and weight mode are decided, by the connected cluster if any.

    Values that are decided already are kept. ConfigError: the backend cannot run the model, or
    cannot be decided.
    """
    is_decided = stage.config.backend.is_decided
    if is_decided and stage.config.engine.weights != "auto":
        return stage
    if start_ray is not None and not stage.pool.is_local:
        start_ray()
    if not is_decided:
        stage = stage.settled(connect=connect)
        check_model(stage.config, schema)
    if stage.config.engine.weights != "auto" or not stage.config.backend.is_decided:
        return stage
    chosen: type[StageFeeder] = weight_sharing().with_chosen_weights(stage)
    return chosen
