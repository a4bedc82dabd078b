"""Measures the cost model of a pool's engines on a host of its replicas."""

import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError

from raybatch.actors.executors.local_measure import (
    cached_model,
    model_in,
    model_or_reason,
    patience_s,
)
from raybatch.actors.executors.ray_pools import reserve
from raybatch.actors.replicas.placement import cluster_now, plan_placement, requested_of_ray
from raybatch.actors.replicas.runtime import obey_log_level, use_threads
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.cost_cache import NO_SPEED_OF_ENDPOINTS
from raybatch.backends.registry import type_of
from raybatch.errors import MeasureError, last_line
from raybatch.policy.cost.cost_model import CostModel

# time until resources of a dead actor are free again
_RETURN_S = 1.0


def measure_pool(spec: PoolSpec, *, folder: Path | None = None) -> CostModel:
    """Return the cost model of one engine of a pool.

    An actor with the resources of a replica reads it from its host's cache or measures it, and
    exits. If the cluster is this host only, a cached one is read here. Initialises Ray if needed.

    Args:
        folder: folder of cached models on the actor's host; None is its default cache folder.

    Raises:
        MeasureError: the engine fails to start, dies, or is too slow, or its resources are busy;
            with the reason.
        ConfigError: the pool's options do not fit the cluster.
    """
    if type_of(spec.backend).is_endpoint:
        raise MeasureError(NO_SPEED_OF_ENDPOINTS)
    if not ray.is_initialized():
        ray.init()
    plan = plan_placement(spec, cluster_now())
    is_here = len([node for node in ray.nodes() if node["Alive"]]) == 1
    if is_here and (cached := cached_model(spec, plan.num_engines_on_host, folder)) is not None:
        return cached
    others = {} if plan.bundles else spec.pool.resources
    _check_free({**plan.total(), **others}, spec)
    timeout_s = patience_s(spec)
    reserved = reserve(plan, spec.pool, name=f"raybatch-measure-{uuid.uuid4().hex}")
    actor = reserved.start(_Measurer, spec).actor
    try:
        call = actor.measure(plan.num_engines_on_host, folder)
        return model_in(ray.get(call, timeout=timeout_s))
    except GetTimeoutError as error:
        raise MeasureError(
            f"{spec.model} was not measured within {timeout_s} s: check that the cluster can "
            f"provide {requested_of_ray(plan, spec.pool)}, or raise pool.start_timeout_s"
        ) from error
    except RayError as error:
        raise MeasureError(f"{spec.model} could not be measured: {last_line(error)}") from error
    finally:
        with suppress(RayError):
            reserved.end()


def busy_resources(
    wanted: Mapping[str, float], free: Mapping[str, float], total: Mapping[str, float]
) -> list[str]:
    """Return a text about each wanted resource that the cluster has but that is in use now.

    A resource of which the cluster has too little in total is left out: it may come by
    autoscaling.
    """
    return [
        f"{number:g} {name}s, of which {free.get(name, 0):g} are free"
        for name, number in wanted.items()
        if free.get(name, 0) < number <= total.get(name, 0)
    ]


def _check_free(wanted: Mapping[str, float], spec: PoolSpec) -> None:
    deadline = time.monotonic() + _RETURN_S
    while busy := busy_resources(wanted, ray.available_resources(), ray.cluster_resources()):
        if time.monotonic() >= deadline:
            idle_s = spec.pool.idle_release_s
            when = "their driver ends" if idle_s is None else f"they were idle for {idle_s:g} s"
            raise MeasureError(
                f"{spec.model} was not measured: an engine needs {' and '.join(busy)}; explain the "
                f"job before a run, or after its engines are released (once {when}, see "
                "pool.idle_release_s)"
            )
        time.sleep(_RETURN_S / 10)


class _Measurer:
    """The actor that measures one engine."""

    def __init__(self, spec: PoolSpec) -> None:
        use_threads(spec)
        obey_log_level()
        self._spec = spec

    def measure(self, num_engines_on_host: int, folder: Path | None) -> CostModel | str:
        return model_or_reason(self._spec, num_engines_on_host, folder)
