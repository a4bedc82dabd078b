"""What Ray reserves for one engine: resources of its actor, or a placement group for its ranks."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raybatch.actors.replicas.placement import Placement
from raybatch.config import PoolConfig

# Ray has tried once by then to create a group
_TRIED_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Reserved:
    """Options of the actor that drives an engine, and the group that they point into.

    Args:
        group: that must be released; None where the actor's own resources are all.
        asked_s: of the monotonic clock, when Ray was asked for the group.
    """

    options: Mapping[str, Any]
    group: PlacementGroup | None = None
    asked_s: float = field(default_factory=time.monotonic)

    def release(self) -> None:
        """Give the group back, which ends the actors in it; may be called again."""
        if self.group is None:
            return
        # what Ray is about to reserve for a group is lost to the cluster where the group is removed
        # meanwhile (ray-project/ray#64693); one that waits for resources is tried again seldom
        while time.monotonic() < self.asked_s + _TRIED_AFTER_S and _is_pending(self.group):
            time.sleep(0.005)
        ray.util.remove_placement_group(self.group)

    def start(self, kind: type, *args: object, **defaults: object) -> ActorHandle:
        """Start the actor, or give the group back where Ray does not take its options."""
        try:
            return ray.remote(kind).options(**{**defaults, **self.options}).remote(*args)
        except BaseException:
            self.release()
            raise

    def end(self, actor: ActorHandle) -> None:
        """Kill the actor and give the group back, even where the first fails."""
        try:
            ray.kill(actor, no_restart=True)
        finally:
            self.release()


def reserve(plan: Placement, pool: PoolConfig, *, name: str) -> Reserved:
    """Ask Ray for what one engine needs; returns before it is there.

    Ray keeps a group until its driver ends, also where the actor that asked for it has died. So it
    has a name, and one of this name that was left behind is released first.

    Args:
        name: of the group, the same whenever the same place of a pool is filled again.
    """
    options = {"max_restarts": 0, **_runtime(pool)}
    if not plan.bundles:
        options |= {"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus}
        return Reserved(options | _placing(pool))
    with suppress(ValueError):  # there is none
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
    group = ray.util.placement_group(
        [dict(bundle) for bundle in plan.bundles], strategy=pool.strategy, name=name
    )
    # the ranks take the bundles; the actor that drives them computes nothing
    inside = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    options |= {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": inside}
    return Reserved(options, group)


def _is_pending(group: PlacementGroup) -> bool:
    return bool(ray.util.placement_group_table(group).get("state") == "PENDING")


def _placing(pool: PoolConfig) -> dict[str, Any]:
    options = {"accelerator_type": pool.accelerator_type, "resources": dict(pool.resources)}
    return {name: value for name, value in options.items() if value}


def _runtime(pool: PoolConfig) -> dict[str, Any]:
    return {"runtime_env": dict(pool.runtime_env)} if pool.runtime_env else {}
