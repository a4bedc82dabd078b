"""Engines that wait for what Ray is to reserve: who is asked to make room, and what is told."""

import math
from collections.abc import Iterable, Mapping, Sequence

from raybatch.actors.replicas.placement import Placement, accelerators_in, requested_of_ray
from raybatch.config import PoolConfig

# a replica that waits for so long makes other pools release engines, and again after that
_ASK_AFTER_S = 5.0
_WARN_AFTER_S = 30.0

Resources = Mapping[str, float]


class WaitForRay:
    """Follows the waits of one pool: when others are to make room, and when the user is told."""

    def __init__(self, pool: PoolConfig, plan: Placement) -> None:
        self.requested = requested_of_ray(plan, pool)
        self._last_request_s = -math.inf
        self._has_warned = False

    def is_due(self, waits_s: float, now_s: float) -> bool:
        """Return whether idle pools of the driver should end engines that hold what is wanted."""
        if waits_s <= _ASK_AFTER_S or now_s - self._last_request_s <= _ASK_AFTER_S:
            return False
        self._last_request_s = now_s
        return True

    def message(self, num_waiting: int, waits_s: float) -> str:
        """Return what the user is told of a long wait, once; else ""."""
        if waits_s <= _WARN_AFTER_S or self._has_warned:
            return ""
        self._has_warned = True
        engines = "1 engine" if num_waiting == 1 else f"{num_waiting} engines"
        return f"waiting for {engines}: each asks for {self.requested} ({waits_s:.0f} s so far)"


def shortage(
    plan: Placement, pool: PoolConfig, hosts: Sequence[Resources], infeasible: Iterable[Resources]
) -> str:
    """Return why engines may wait for ever, with the way out; "" where some host could have one.

    Args:
        hosts: what each host of the cluster has in all, whoever holds it.
        infeasible: requests for which the autoscaler knows no kind of host.
    """
    needs = plan.bundles or ({"CPU": plan.num_cpus, "GPU": plan.num_gpus, **pool.resources},)
    kinds = frozenset(pool.accelerator_types)
    lacking = [need for need in needs if not any(fits(need, kinds, host) for host in hosts)]
    if not lacking:
        return ""
    out = "lower what an engine asks for (pool, tensor_parallel_size), or "
    if any(_is_part(need, asked) for need in lacking for asked in infeasible):
        return (
            "the autoscaler of the cluster has no kind of host that could hold it: "
            f"{out}add such hosts to the cluster's configuration"
        )
    return (
        "no host of the cluster could hold it; the job goes on when one joins. Where the cluster "
        f"adds none by itself: {out}add a host"
    )


def fits(need: Resources, kinds: frozenset[str], host: Resources) -> bool:
    """Return whether a host, with nothing else on it, could hold what is needed."""
    if kinds and need.get("GPU") and not kinds & accelerators_in(host):
        return False
    return _is_part(need, host)


def _is_part(need: Resources, of: Resources) -> bool:
    return all(of.get(name, 0.0) >= amount for name, amount in need.items() if amount)


def has_reserved(pool: PoolConfig, plan: Placement) -> bool:
    """Return whether an engine holds anything that another one could wait for."""
    return bool(plan.bundles or pool.resources or any(plan.total().values()))
