"""Brings a model to every host of a cluster."""

from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raybatch.actors.replicas.site import obey_log_level
from raybatch.errors import ConfigError
from raybatch.models.prefetch import Prefetched, prefetch


def prefetch_on_every_host(
    source: str, *, with_weights: bool = True, to: Path | None = None
) -> list[Prefetched | str]:
    """Fetch a model on every host that is alive, all at once; a host that fails has a text."""
    task = ray.remote(num_cpus=0, max_retries=0)(_prefetch)
    calls = {
        node["NodeManagerHostname"]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(source, with_weights, to)
        for node in ray.nodes()
        if node["Alive"]
    }
    return [_result(host, call) for host, call in calls.items()]


def _prefetch(source: str, with_weights: bool, to: Path | None) -> Prefetched | str:
    obey_log_level()
    try:
        return prefetch(source, with_weights=with_weights, to=to)
    except ConfigError as error:
        return str(error)


def _result(host: str, call: "ray.ObjectRef[Prefetched | str]") -> Prefetched | str:
    try:
        result = ray.get(call)
    except ray.exceptions.RayError as error:
        result = str(error).strip().splitlines()[-1]
    return f"{host}: {result}" if isinstance(result, str) else result
