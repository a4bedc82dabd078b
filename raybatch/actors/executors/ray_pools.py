"""The pools of one Ray job: named actors that its driver owns.

Equal specs share a pool. It stays warm between executions of one driver, and dies with the driver.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError
from ray.util import metrics
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.placement import (
    Placement,
    cluster_now,
    gpu_warnings,
    plan_placement,
    settled,
)
from raybatch.actors.replicas.reserving import Reserved, reserve
from raybatch.actors.replicas.site import Errors, use_threads
from raybatch.actors.wire.records import PoolSpec, Requests, digest_of
from raybatch.backends.choice import BackendChoice, VllmBuild, vllm_build
from raybatch.config import PoolConfig
from raybatch.errors import ConfigError, last_line

_MAX_REPLICA_CALLS = 64

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayStarted:
    """A replica that is an actor, and what Ray keeps for it."""

    actor: ActorHandle
    reserved: Reserved

    def end(self) -> None:
        self.reserved.end(self.actor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySite:
    """Where actors of Ray run, a coordinator or a replica; see `raybatch.actors.replicas.site`."""

    died: Errors = field(default=(RayActorError, ObjectLostError))
    failed: Errors = field(default=(RayError,))

    @property
    def metrics(self) -> Any:  # noqa: ANN401 - a module
        return metrics

    def coordinator(self) -> ActorHandle:
        return ray.get_runtime_context().current_actor

    def keep(self, requests: Requests) -> ray.ObjectRef:
        return ray.put(requests)

    def start(self, spec: PoolSpec, plan: Placement, rank: int, replica_id: int) -> RayStarted:
        pool_name = ray.get_runtime_context().get_actor_name() or f"raybatch-crew-{id(spec):x}"
        reserved = reserve(plan, spec.pool, name=f"{pool_name}-{rank}")
        actor = reserved.start(
            Replica,
            spec,
            replica_id,
            self,
            scheduling_strategy="SPREAD",
            max_concurrency=_MAX_REPLICA_CALLS,
        )
        return RayStarted(actor, reserved)

    async def make_room(self, wanted: str) -> None:
        for other in await asyncio.to_thread(_other_pools):
            with suppress(RayError):
                if await other.make_room.remote():
                    # below the level of a warning it would not reach the driver
                    _logger.warning(
                        "idle engines with other options end, because an engine waits for %s",
                        wanted,
                    )

    def settle(self, spec: PoolSpec) -> None:
        use_threads(spec)

    async def fetch(self, ref: Any) -> Requests | None:  # noqa: ANN401
        """Return a request table; None where the host that held it is gone."""
        try:
            requests: Requests = await ref
        except ObjectLostError:
            return None
        return requests

    async def die(self) -> None:
        os._exit(1)


def _other_pools() -> list[ActorHandle]:
    """Return the coordinators of the other pools of this driver; called in one of them."""
    own = ray.get_runtime_context().get_actor_name() or ""
    of_driver = own.rpartition("-")[0]
    pools = []
    for name in ray.util.list_named_actors() if of_driver else ():
        if name.startswith(f"{of_driver}-") and name != own:
            try:
                pools.append(ray.get_actor(name))
            except ValueError:  # it has just ended
                continue
    return pools


logger = logging.getLogger(__name__)

_NAME_PREFIX = "raybatch-pool"
_MAX_CALLS = 10_000


class RayPools:
    """Finds, makes and ends the coordinators of this process; see `Site`."""

    gone: Errors = (RayActorError,)
    failed: Errors = (RayError,)

    def __init__(self) -> None:
        # an actor ends when its owner drops the handle that made it, although it has a name: these
        # keep the pools of this process warm
        self._coordinators: dict[tuple[str, str], ActorHandle] = {}
        self._making = threading.Lock()

    def settle(
        self, spec: PoolSpec, *, began_with: str | None = None, connect: bool = True
    ) -> tuple[PoolSpec, BackendChoice | None]:
        if spec.backend.is_decided:
            return spec, None
        if connect and not ray.is_initialized():
            ray.init()
        installed = partial(_vllm_of_hosts, spec.pool) if ray.is_initialized() else vllm_build
        return settled(spec, cluster_now(), vllm=installed, began_with=began_with)

    def connect(self, spec: PoolSpec) -> ActorHandle:
        """Return the coordinator; Ray is initialised only if it is not."""
        if not ray.is_initialized():
            ray.init()
        name = _name(spec)
        with self._making:
            coordinator = _find(name)
            if coordinator is None:
                coordinator = self._coordinators[_key(name)] = _make(name, spec)
        return coordinator

    def result(self, call: Any) -> Any:  # noqa: ANN401
        return ray.get(call)

    def forget(self, spec: PoolSpec) -> None:
        self._coordinators.pop(_key(_name(spec)), None)

    def end(self, spec: PoolSpec) -> None:
        if not ray.is_initialized():
            return
        coordinator = _find(_name(spec))
        self.forget(spec)
        if coordinator is not None:
            _end(coordinator)

    def end_all(self) -> None:
        """End every pool that this process made in the Ray session that runs."""
        for key in list(self._coordinators):
            coordinator = self._coordinators.pop(key)
            # the pools of a Ray session that has been shut down are gone already
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
        logger.warning("%s", warning)
    return (
        ray.remote(Coordinator)
        .options(
            name=name,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=_MAX_CALLS,
            # it should live as long as the driver, so not on a host that may be taken away
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
        )
        .remote(spec, plan, RaySite())
    )


def _end(coordinator: ActorHandle) -> None:
    try:
        ray.get(coordinator.shutdown.remote())
    except RayActorError:
        return
    ray.kill(coordinator, no_restart=True)


def _vllm_of_hosts(pool: PoolConfig) -> VllmBuild | None:
    """Return what is installed on a host where engines of a pool run, in their environment.

    Where the cluster has none yet, any host stands for later ones.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 1}
    if pool.runtime_env:
        options["runtime_env"] = dict(pool.runtime_env)
    if (node_id := host_of_engines(pool, ray.nodes())) is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    try:
        call = ray.remote(vllm_build).options(**options).remote()
        build: VllmBuild | None = ray.get(call, timeout=pool.start_timeout_s)
    except (GetTimeoutError, RayError, ValueError) as error:  # the last where an option is wrong
        raise ConfigError(
            "backend was left out, and no host could say whether it has vLLM: "
            f"{last_line(error)}; set backend to 'vllm' or 'native'"
        ) from error
    return build


def host_of_engines(pool: PoolConfig, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the id of a host with a GPU, of the kind that the pool asks for if there is one."""
    wanted = f"accelerator_type:{pool.accelerator_type}"
    hosts = [node for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    hosts.sort(key=lambda host: wanted not in host["Resources"])
    return str(hosts[0]["NodeID"]) if hosts else None
