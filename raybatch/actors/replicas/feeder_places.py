"""Places feeders: their number, hosts and resources; pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raybatch.actors.replicas.placement import HOST_LABEL, HostView, Placement, num_fitting, spread
from raybatch.config import PoolConfig

# GPU engines on its host that one feeder keeps busy
_ENGINES_PER_FEEDER = 4
# share of a host's free CPUs for all its feeders, as read tasks need whole CPUs; a feeder alone
# uses about one
_PART_OF_HOST = 1 / 8
_MOST_CPUS = 0.5
_CPUS_TO_SHARE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederPlaces:
    """Number of feeders, ids of their preferred hosts (none: any), and CPUs of each."""

    num_feeders: int
    hosts: tuple[str, ...]
    num_cpus: float

    def labels(self) -> dict[str, Any]:
        """Return the Ray options that prefer these hosts, and fall back to any."""
        if not self.hosts:
            return {}
        return {
            "label_selector": {HOST_LABEL: f"in({','.join(self.hosts)})"},
            "fallback_strategy": [{"label_selector": {}}],
        }


def place_feeders(plan: Placement, pool: PoolConfig, hosts: Sequence[HostView]) -> FeederPlaces:
    """Return where feeders run: one on each host with CPU engines, one for up to four GPU engines.

    Engines are taken to spread over the hosts that can hold them; the rest run on future hosts.
    """
    per_engine = plan.num_gpus
    if per_engine:
        able = [h for h in hosts if h.has_gpus_for(pool)]
        # an engine over several hosts counts on the first
        room = [max(bool(plan.bundles), num_fitting(h.num_gpus, per_engine)) for h in able]
    else:
        able = [h for h in hosts if h.num_cpus]
        room = [plan.num_replicas] * len(able)
    engines = spread(plan.num_replicas, room)
    # future hosts have the rest
    num_all = -(-(plan.num_replicas - sum(engines)) // _ENGINES_PER_FEEDER)
    shares = []
    for host, num_engines in zip(able, engines, strict=True):
        num_feeders = -(-num_engines // _ENGINES_PER_FEEDER) if per_engine else min(1, num_engines)
        num_all += num_feeders
        if num_feeders:
            left = host.num_cpus - num_engines * plan.num_cpus
            part = left * _PART_OF_HOST / num_feeders if left >= _CPUS_TO_SHARE else 0.0
            shares.append(min(_MOST_CPUS, math.floor(100 * part) / 100))
    # with more hosts than engines, their hosts are not known yet
    known = able if plan.num_replicas >= len(able) else ()
    return FeederPlaces(
        num_feeders=num_all,
        hosts=tuple(host.host_id for host in known),
        num_cpus=min(shares, default=0.0),
    )
