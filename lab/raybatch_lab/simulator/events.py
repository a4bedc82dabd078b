"""What happens to the replicas of a simulated pool, and what the pool is like."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raybatch.config import PoolConfig
from raybatch.errors import ConfigError
from raybatch_lab.simulator.links import LinkSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The crash of a replica at a time, or at a fraction of the rows; exactly one is given.

    Args:
        rank: rank whose replica crashes.
        at_s: seconds from the beginning of the run.
        at_fraction: share of the rows that have finished at the crash, 0 to below 1.
    """

    rank: int
    at_s: float | None = None
    at_fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_fraction is None):
            raise ConfigError("a Death needs either at_s or at_fraction; set exactly one of them")
        if self.at_fraction is not None and not 0 <= self.at_fraction < 1:
            raise ConfigError(
                f"a replica cannot die at a fraction of {self.at_fraction} of the rows; the "
                "fraction must be at least 0 and below 1"
            )
        if self.at_s is not None and self.at_s < 0:
            raise ConfigError(f"a Death has at_s={self.at_s}; it must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """Which optional mechanisms of a pool are on; disable some for ablations."""

    learns_lengths: bool = True
    learns_speeds: bool = True
    moves_rows: bool = True
    forms_tp_groups: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """A simulated pool.

    Args:
        num_replicas: number of engines; their ranks count from 0.
        start_s: seconds of each start of a replica, also after a crash.
        late_s: by rank, additional seconds of its first start; 0 for other ranks.
        slowness: by rank, the factor on the seconds of its steps; 1 for other ranks.
        deaths: crashes; each crashed replica is started again.
        options: options of a real pool, such as `max_row_crashes` and `max_start_failures`.
        message_s: seconds of a call between coordinator and replica.
        store: link through which all replicas read requests.
        network: link of each replica, through which its sequences move to others.
        policies: optional mechanisms that are on.
    """

    num_replicas: int
    start_s: float = 0.0
    late_s: Mapping[int, float] = field(default_factory=dict)
    slowness: Mapping[int, float] = field(default_factory=dict)
    deaths: tuple[Death, ...] = ()
    options: PoolConfig = field(default_factory=PoolConfig)
    message_s: float = 0.001
    store: LinkSpec = field(default_factory=LinkSpec)
    network: LinkSpec = field(default_factory=LinkSpec)
    policies: Policies = field(default_factory=Policies)

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(
                f"a simulated pool has num_replicas={self.num_replicas}; it must be at least 1"
            )
        ranks = {*self.late_s, *self.slowness, *(death.rank for death in self.deaths)}
        if unknown := sorted(rank for rank in ranks if not 0 <= rank < self.num_replicas):
            raise ConfigError(
                f"there is no replica of rank {unknown[0]}; the ranks of this pool are 0 to "
                f"{self.num_replicas - 1}"
            )
        for rank, factor in self.slowness.items():
            if not 0 < factor < float("inf"):
                raise ConfigError(
                    f"the slowness of rank {rank} is {factor}; it must be a finite factor above 0"
                )

    @property
    def speed(self) -> float:
        """Return the combined speed of all replicas, where 1 is an engine with slowness 1."""
        slowed = sum(1 / factor for factor in self.slowness.values())
        return self.num_replicas - len(self.slowness) + slowed
