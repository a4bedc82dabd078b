"""Coordinator and replicas as actors of Ray."""

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayError
from ray.util import metrics

from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.reserving import Reserved, reserve
from raybatch.actors.replicas.site import Errors, use_threads
from raybatch.actors.wire.records import PoolSpec, Requests

_MAX_CALLS = 64

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
            max_concurrency=_MAX_CALLS,
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
