"""How many feeders a stage has, on which hosts, and what Ray reserves for each; asks nobody."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybatch.actors.replicas.placement import (
    HOST_LABEL,
    Placement,
    accelerators_in,
    num_fitting,
    spread,
)
from raybatch.config import PoolConfig

# engines on GPUs that one feeder keeps busy, as far as it shares their host
_ENGINES_PER_FEEDER = 4
# of the CPUs of a host that engines leave, all its feeders have this part, for read tasks take
# whole ones; a feeder alone uses about one
_PART_OF_HOST = 1 / 8
_MOST_CPUS = 0.5
_CPUS_TO_SHARE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederPlaces:
    """How many feeders, the ids of the hosts where they should run (none: any), CPUs of each."""

    num_feeders: int
    hosts: tuple[str, ...]
    num_cpus: float

    def labels(self) -> dict[str, Any]:
        """Return what tells Ray the hosts, among which it spreads actors; any other will do."""
        if not self.hosts:
            return {}
        return {
            "label_selector": {HOST_LABEL: f"in({','.join(self.hosts)})"},
            "fallback_strategy": [{"label_selector": {}}],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class HostView:
    host_id: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    kinds: frozenset[str] = frozenset()

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> "HostView":
        """Read what Ray says of a host."""
        has = node["Resources"]
        return cls(
            host_id=node["NodeID"],
            num_cpus=has.get("CPU", 0.0),
            num_gpus=has.get("GPU", 0.0),
            kinds=accelerators_in(has),
        )


def place_feeders(plan: Placement, pool: PoolConfig, hosts: Sequence[HostView]) -> FeederPlaces:
    """Return one feeder for each host with engines, and one for four engines where these have GPUs.

    Engines spread over the hosts that can hold them, and over hosts to come.
    """
    wanted, per_engine = frozenset(pool.accelerator_types), plan.num_gpus
    if per_engine:
        able = [h for h in hosts if h.num_gpus and (not wanted or wanted & h.kinds)]
        # an engine over several hosts counts on the first
        room = [max(bool(plan.bundles), num_fitting(h.num_gpus, per_engine)) for h in able]
    else:
        able = [h for h in hosts if h.num_cpus]
        room = [plan.num_replicas] * len(able)
    engines = spread(plan.num_replicas, room)
    # hosts to come have any of the rest
    num_all = -(-(plan.num_replicas - sum(engines)) // _ENGINES_PER_FEEDER)
    shares = []
    for host, num_engines in zip(able, engines, strict=True):
        num_feeders = -(-num_engines // _ENGINES_PER_FEEDER) if per_engine else min(1, num_engines)
        num_all += num_feeders
        if num_feeders:
            left = host.num_cpus - num_engines * plan.num_cpus
            part = left * _PART_OF_HOST / num_feeders if left >= _CPUS_TO_SHARE else 0.0
            shares.append(min(_MOST_CPUS, math.floor(100 * part) / 100))
    # of more hosts than engines, nobody knows yet which will have some
    known = able if plan.num_replicas >= len(able) else ()
    return FeederPlaces(
        num_feeders=num_all,
        hosts=tuple(host.host_id for host in known),
        num_cpus=min(shares, default=0.0),
    )
