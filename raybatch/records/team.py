"""What a coordinator tells the engines of a team, and what they tell of it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamCall:
    """What one rank is told of a team: who leads it, and its own place; rank 0 leads.

    Args:
        epoch: of the team; a leader uses none twice.
        host, port: of the leader's store, where the ranks meet.
        timeout_s: that any rank waits for another one, before the team ends.
    """

    epoch: int
    rank: int
    size: int
    host: str
    port: int
    timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FormingCost:
    """What it took to form a team; of slices of weights, the most that a rank copied."""

    group: str  # how ranks reach each other
    slice_bytes: int
    slice_s: float
    kv_bytes: int
    kv_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What a follower did: steps of a team that came about, or none of one that did not."""

    is_committed: bool
    num_steps: int
