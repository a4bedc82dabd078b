"""What happens to the replicas of a simulated pool, and what the pool is like."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raybatch.config import PoolConfig
from raybatch.errors import ConfigError
from raybatch_lab.simulator.links import LinkSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A replica that ends without notice.

    Args:
        rank: of the replica that runs there then.
        at_s: seconds from the beginning, or None.
        at_fraction: of the rows that are finished by then, or None; one of both is given.
    """

    rank: int
    at_s: float | None = None
    at_fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_fraction is None):
            raise ConfigError("a death happens at a time or at a fraction of the rows, one of them")
        if self.at_fraction is not None and not 0 <= self.at_fraction < 1:
            raise ConfigError(
                f"a death at a fraction of {self.at_fraction} of the rows; it must be from 0 up to "
                "1, and not 1"
            )
        if self.at_s is not None and self.at_s < 0:
            raise ConfigError(f"a death at {self.at_s} s; time begins at 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """What a pool does beside handing rows out; for ablations."""

    learns_lengths: bool = True
    learns_speeds: bool = True
    moves_rows: bool = True
    forms_teams: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """A simulated pool.

    Args:
        num_replicas: engines, by rank from 0.
        start_s: seconds of a start, the first one and one after a death.
        late_s: by rank, seconds by which its first start takes longer.
        slowness: by rank, the factor on the seconds of its steps; 1 where it is not named.
        deaths: of replicas; each is started again.
        options: of a real pool: crashes of a row, and how often tokens so far are kept.
        message_s: of a call between coordinator and replica.
        store: through which requests travel, shared by all.
        network: of each replica, through which its sequences move away.
        policies: what the pool does beside handing rows out.
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
            raise ConfigError(f"a simulated pool of {self.num_replicas} replicas; it needs one")
        ranks = {*self.late_s, *self.slowness, *(death.rank for death in self.deaths)}
        if unknown := sorted(rank for rank in ranks if not 0 <= rank < self.num_replicas):
            raise ConfigError(
                f"replica {unknown[0]} is not one of 0 to {self.num_replicas - 1} of this pool"
            )
        for rank, factor in self.slowness.items():
            if not 0 < factor < float("inf"):
                raise ConfigError(f"replica {rank} is slowed {factor} times; it must be above 0")

    @property
    def speed(self) -> float:
        """Return what all replicas do together, in engines that are not slowed."""
        slowed = sum(1 / factor for factor in self.slowness.values())
        return self.num_replicas - len(self.slowness) + slowed
