"""The pools of one Ray job: named actors owned by its driver, and the resources of engines.

Equal specs share a pool. It stays warm between executions of a driver, and dies with the driver. A
cost model is measured by an actor with the resources of one engine.
"""

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # it is compiled
from ray.actor import ActorHandle
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError
from ray.util import metrics
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.executors.local_pools import (
    cached_model,
    model_in,
    model_or_reason,
    patience_s,
)
from raybatch.actors.executors.ray_hosts import (
    environment_of,
    labels_of,
    ray_options_of,
    vllm_of_hosts,
)
from raybatch.actors.installed_extensions import extensions_of
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.placement import (
    KIND_LABEL,
    Placement,
    cluster_now,
    gpu_warnings,
    plan_placement,
    requested_of_ray,
    settled,
    shortage,
    some_of_kind,
)
from raybatch.actors.replicas.runtime import (
    Errors,
    PoolRuntime,
    ReplicaGroup,
    ReplicaRuntime,
    T,
    obey_log_level,
    use_threads,
)
from raybatch.actors.wire.records import Place, PoolApi, PoolSpec, Requests, digest_of
from raybatch.backends.choice import BackendChoice, vllm_build
from raybatch.backends.cost_cache import NO_SPEED_OF_ENDPOINTS
from raybatch.backends.registry import type_of
from raybatch.config import PoolConfig, environment
from raybatch.errors import MeasureError, last_line
from raybatch.policy.cost.cost_model import CostModel
from raybatch.telemetry import metrics_of_process

_NAME_PREFIX = "raybatch-pool"
# CPUs of an otherwise empty bundle, which Ray refuses
_SOME_CPU = 0.001
# engines of a group select their GPU by number
_ALL_GPUS_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
_MAX_CALLS = 10_000
_MAX_REPLICA_CALLS = 64
# time in which Ray tries once to create a placement group
_TRIED_AFTER_S = 1.0
# time until resources of a dead actor are free again
_RETURN_S = 1.0

_logger = logging.getLogger(__name__)


class RayHandle:
    """A picklable proxy of a Ray actor, whose methods start calls, like `CallHandle`."""

    def __init__(self, actor: ActorHandle) -> None:
        self.ray_actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        begin: Callable[..., Any] = getattr(self.ray_actor, name).remote
        return begin

    def __reduce__(self) -> tuple[type["RayHandle"], tuple[ActorHandle]]:
        return RayHandle, (self.ray_actor,)


@dataclass(slots=True)
class Reserved:
    """The requested resources of one engine: `start` its actor with them; `end` releases both.

    Args:
        options: Ray options of the actor that drives the engine.
        group: placement group to remove at the end; None if the actor itself has all resources.
        requested_s: time at which the group was requested, by the monotonic clock.
    """

    options: Mapping[str, Any]
    group: PlacementGroup | None = None
    requested_s: float = field(default_factory=time.monotonic)
    # untyped in Ray
    actor: Any = None
    # the weight-sharing group that shares the placement group
    shared_by: ReplicaGroup | None = None

    def release(self) -> None:
        """Remove the placement group, which kills its actors; may be called again."""
        if self.shared_by is not None:
            # the last user removes it
            sharers, self.shared_by = self.shared_by, None
            sharers.num_users -= 1
            self.group = None if sharers.num_users else sharers.reserved
        if self.group is None:
            return
        # Ray leaks resources if a group is removed while they are being reserved
        # (ray-project/ray#64693); it retries pending groups seldom
        while time.monotonic() < self.requested_s + _TRIED_AFTER_S:
            if ray.util.placement_group_table(self.group).get("state") != "PENDING":
                break
            time.sleep(0.005)
        ray.util.remove_placement_group(self.group)

    def start(self, kind: type, *args: object, **defaults: object) -> "Reserved":
        """Start an actor of class `kind` with `args`; release the resources if Ray refuses.

        `defaults` are Ray options that `options` override.
        """
        try:
            options = {**defaults, **self.options}
            self.actor = RayHandle(ray.remote(kind).options(**options).remote(*args))
        except BaseException:
            self.release()
            raise
        return self

    def end(self) -> None:
        """Kill the actor and release the resources, even if the first fails."""
        try:
            _kill(self.actor.ray_actor)
        finally:
            self.release()


def reserve(
    plan: Placement, pool: PoolConfig, *, name: str, avoid: Collection[str] = ()
) -> Reserved:
    """Request the resources of one engine from Ray; returns before they are reserved.

    Ray keeps a placement group until the driver exits, even if the actor that requested it died. So
    each rank of a pool uses a fixed `name`, and a leftover group of this name is removed first.
    `avoid` has the ids of hosts on which the engine must not run.
    """
    if not plan.bundles:
        return Reserved({"max_restarts": 0, **ray_options_of(plan, pool, avoid=avoid)})
    labels = labels_of(pool, avoid)
    of_bundles = [labels if "GPU" in bundle else {} for bundle in plan.bundles]
    group = _placement_group(name, plan.bundles, of_bundles, pool.strategy)
    # the ranks use the bundles; the actor that drives them needs no resources
    inside = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": inside}
    return Reserved({"max_restarts": 0, **options, **environment_of(pool)}, group)


def reserve_together(
    plan: Placement,
    pool: PoolConfig,
    rank: int,
    group: ReplicaGroup,
    *,
    name: str,
    avoid: Collection[str] = (),
) -> Reserved:
    """Request the resources of one engine of a weight-sharing group, whose engines share a host.

    They also share a placement group, called `name`, which the first one creates and the last one
    removes. Each engine sees all GPUs of the host, since it reads memory of the others.
    """
    requested = {"CPU": max(_SOME_CPU, plan.num_cpus), "GPU": plan.num_gpus, **pool.resources}
    if len(pool.accelerator_types) == 1:
        requested |= some_of_kind(pool.accelerator_types[0])
    bundle = {name: amount for name, amount in requested.items() if amount}
    if group.reserved is None:
        labels = [labels_of(pool, avoid)] * group.size
        group.reserved = _placement_group(name, [bundle] * group.size, labels, "STRICT_PACK")
    group.num_users += 1
    inside = PlacementGroupSchedulingStrategy(
        group.reserved, placement_group_bundle_index=group.share_rank(rank).rank
    )
    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": plan.num_gpus,
        "resources": dict(pool.resources),
        "scheduling_strategy": inside,
        **environment_of(pool, _ALL_GPUS_VISIBLE if plan.num_gpus else None),
    }
    return Reserved({"max_restarts": 0, **options}, shared_by=group)


def _placement_group(
    name: str,
    bundles: Sequence[Mapping[str, float]],
    labels: Sequence[Mapping[str, str]],
    strategy: str,
) -> PlacementGroup:
    """Create a placement group, after removing a leftover one of its name."""
    with suppress(ValueError):  # there is none
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
    return ray.util.placement_group(
        [dict(bundle) for bundle in bundles],
        strategy=strategy,
        name=name,
        bundle_label_selector=list(labels),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRuntime(PoolRuntime, ReplicaRuntime):
    """The runtime of Ray actors, for a coordinator or a replica."""

    died: Errors = field(default=(RayActorError, ObjectLostError))
    failed: Errors = field(default=(RayError,))

    @property
    def metrics(self) -> Any:  # noqa: ANN401 - a module
        return metrics_of_process(metrics)

    def coordinator(self) -> PoolApi:
        obey_log_level()  # of this process, before its first replica
        return cast(PoolApi, RayHandle(ray.get_runtime_context().current_actor))

    def keep(self, requests: Requests) -> ray.ObjectRef:
        return ray.put(requests)

    def start(
        self,
        spec: PoolSpec,
        plan: Placement,
        rank: int,
        replica_id: int,
        *,
        avoid: Collection[str] = (),
        group: ReplicaGroup | None = None,
    ) -> Reserved:
        pool_name = ray.get_runtime_context().get_actor_name() or f"{_NAME_PREFIX}-{id(spec):x}"
        if group is None:
            reserved = reserve(plan, spec.pool, name=f"{pool_name}-{rank}", avoid=avoid)
        else:
            name = f"{pool_name}-group-{group.number}"
            reserved = reserve_together(plan, spec.pool, rank, group, name=name, avoid=avoid)
        spread = {"scheduling_strategy": "SPREAD", "max_concurrency": _MAX_REPLICA_CALLS}
        return reserved.start(Replica, spec, replica_id, self, **spread)

    async def make_room(self, wanted: str) -> None:
        message = "stopping idle engines with other options: an engine waits for %s"
        for other in await asyncio.to_thread(_other_pools):
            with suppress(RayError):
                if await other.make_room.remote():
                    # Ray forwards warnings only
                    _logger.warning(message, wanted)

    async def draining_hosts(self) -> Collection[str]:
        return await asyncio.to_thread(_draining)

    async def shortage(self, plan: Placement, pool: PoolConfig) -> str:
        nodes, infeasible = await asyncio.to_thread(lambda: (ray.nodes(), _infeasible()))
        hosts = [node["Resources"] for node in nodes if node["Alive"]]
        return shortage(plan, pool, hosts, infeasible)

    def place(self) -> Place:
        context = ray.get_runtime_context()
        kind = context.get_node_labels().get(KIND_LABEL, "")
        host = f"host {socket.gethostname()}" + (f" ({kind})" if kind else "")
        address = ray.util.get_node_ip_address()
        return Place(pid=os.getpid(), host=host, host_id=context.get_node_id(), address=address)

    def device(self) -> str | None:
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        if not gpus:
            return None
        # torch numbers the GPUs that the host's environment leaves visible
        visible = environment().get("CUDA_VISIBLE_DEVICES", "").split(",")
        return f"cuda:{visible.index(gpus[0]) if gpus[0] in visible else gpus[0]}"

    async def fetch(self, ref: Any) -> Requests | None:  # noqa: ANN401
        """Return a request table; None if its host is gone."""
        try:
            requests: Requests = await ref
        except ObjectLostError:
            return None
        return requests

    def share(self, value: object) -> ray.ObjectRef:
        return ray.put(value)

    async def shared(self, ref: Any) -> Any:  # noqa: ANN401 - what was shared
        return await ref


def _infeasible() -> list[Mapping[str, float]]:
    """Return the requests that Ray's autoscaler v2 reports as infeasible."""
    requests = _status().autoscaling_state.infeasible_resource_requests
    return [dict(request.resources_bundle) for request in requests]


def _draining() -> set[str]:
    """Return the ids of hosts that Ray drains, for the cloud or the autoscaler."""
    nodes = _status().cluster_resource_state.node_states
    return {node.node_id.hex() for node in nodes if node.status == NodeStatus.DRAINING}


def _status() -> GetClusterStatusReply:
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    return GetClusterStatusReply.FromString(client.get_cluster_status())


def _other_pools() -> list[ActorHandle]:
    """Return the coordinators of the other pools of this driver; called in one of them."""
    own = ray.get_runtime_context().get_actor_name() or ""
    of_driver = own.rpartition("-")[0]
    names = ray.util.list_named_actors() if of_driver else ()
    others = (_find(name) for name in names if name.startswith(f"{of_driver}-") and name != own)
    # one may have ended just now
    return [other for other in others if other is not None]


class RayPools:
    """Finds, creates and stops the coordinators of this process, by their specs.

    Attributes:
        gone: exceptions that a call raises if the coordinator has died.
        failed: all exceptions that a call to the coordinator may raise.
    """

    gone: Errors = (RayActorError,)
    failed: Errors = (RayError,)

    def __init__(self) -> None:
        # a named actor ends when its owner drops the original handle: these keep pools warm
        self._coordinators: dict[tuple[str, str], ActorHandle] = {}
        self._making = threading.Lock()

    def settle(
        self, spec: PoolSpec, *, began_with: str | None = None, connect: bool = True
    ) -> tuple[PoolSpec, BackendChoice | None]:
        """Return a spec with a decided backend; see `PoolHandle.settled`."""
        if spec.backend.is_decided:
            return spec, None
        if connect and not ray.is_initialized():
            ray.init()
        installed = partial(vllm_of_hosts, spec.pool) if ray.is_initialized() else vllm_build
        return settled(spec, cluster_now(), vllm=installed, began_with=began_with)

    def connect(self, spec: PoolSpec) -> PoolApi:
        if not ray.is_initialized():
            ray.init()
        name = _name(spec)
        with self._making:
            coordinator = _find(name)
            if coordinator is None:
                coordinator = self._coordinators[_key(name)] = _make(name, spec)
        return cast(PoolApi, RayHandle(coordinator))

    def result(self, call: Awaitable[T]) -> T:
        """Wait for a call to a coordinator; return its result. For threads without event loop."""
        result: T = ray.get(call)
        return result

    def forget(self, spec: PoolSpec, coordinator: PoolApi) -> None:
        """Forget a dead coordinator; the next use creates a new one."""
        gone, key = cast(RayHandle, coordinator).ray_actor, _key(_name(spec))
        # another user of this pool may have created a new one already
        if self._coordinators.get(key) == gone:
            del self._coordinators[key]
        _kill(gone)

    def end(self, spec: PoolSpec) -> None:
        if not ray.is_initialized():
            return
        # until all have stopped: without it Ray ends the coordinator before its replicas
        own = self._coordinators.pop(_key(_name(spec)), None)
        coordinator = _find(_name(spec))
        if coordinator is not None:
            _end(coordinator)
        del own

    def end_all(self) -> None:
        """Stop every pool that this process created in the current Ray session."""
        for key in list(self._coordinators):
            coordinator = self._coordinators.pop(key)
            # pools of an earlier Ray session are gone
            if ray.is_initialized() and key == _key(key[1]):
                _end(coordinator)


def _name(spec: PoolSpec) -> str:
    # the job is part of the name: two drivers in one namespace must not share an actor
    job_id = ray.get_runtime_context().get_job_id()
    return f"{_NAME_PREFIX}-{job_id}-{digest_of(spec)}"


def _key(name: str) -> tuple[str, str]:
    """Return where the pool lives and its name; job ids repeat from one local Ray to the next."""
    return ray.get_runtime_context().gcs_address, name


def _find(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _make(name: str, spec: PoolSpec) -> ActorHandle:
    node_id, cluster = ray.get_runtime_context().get_node_id(), cluster_now()
    plan = plan_placement(spec, cluster)
    for warning in gpu_warnings(spec, plan, cluster):
        _logger.warning("%s", warning)
    # it should live as long as the driver, so it runs on the same host
    here = NodeAffinitySchedulingStrategy(node_id, soft=True)
    options = {"name": name, "get_if_exists": True, "num_cpus": 0, "max_restarts": 0}
    actor = ray.remote(Coordinator).options(
        max_concurrency=_MAX_CALLS, scheduling_strategy=here, **options
    )
    return actor.remote(spec, plan, RayRuntime(), extensions_of(spec, plan))


def _end(coordinator: ActorHandle) -> None:
    with suppress(RayActorError):
        ray.get(coordinator.shutdown.remote())
    _kill(coordinator)


def _kill(coordinator: ActorHandle) -> None:
    # also if dead: its name stays registered while this process holds a handle
    ray.kill(coordinator, no_restart=True)


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
