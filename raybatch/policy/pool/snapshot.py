"""The state of a pool as `plan_pool` sees it, and what it decides; plain records."""

from dataclasses import dataclass
from typing import NamedTuple

from raybatch.policy.pool.rates import StepSeconds
from raybatch.records.arrays import Bools, Floats, Ints

# of rows alike, closer together where the longest of a batch are
LEFT_SHARES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.98)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunningRows:
    """Rows that one replica decodes, [S] each, in any order."""

    ids: Ints
    tokens: Ints
    """Prompt and generated tokens, whose KV would move."""
    left: Floats
    """Tokens that are expected to come, at least 1."""
    can_move: Bools
    times_moved: Ints | None = None
    """How often each has moved so far; None where none has."""
    quantiles: Floats | None = None
    """Tokens to come that `LEFT_SHARES` of such rows do not exceed, [S, shares], ascending; None
    where `left` is certain."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSnapshot:
    """One replica that works."""

    replica_id: int
    num_held: int = 0
    """Rows that it has, running or not."""
    cost: int = 0
    """Of these rows, in tokens: prompts, prefixes once, and outputs."""
    num_unstarted: int = 0
    """Rows that wait in its engine, as it last reported."""
    can_give: bool = True
    """Its report is fresh, and it runs no suspects, which stay where they are."""
    speed: float = 1.0
    """Work per second, beside the other replicas."""
    seconds: StepSeconds | None = None
    """Of its steps; None until they were measured."""
    rows: RunningRows | None = None
    """What it decodes; None where that is not known."""
    free_kv_tokens: int = 0
    free_seqs: int = 0
    """Further sequences that may run at once."""
    kv_token_bytes: int = 0
    """Of a token that moves; 0 where its engine gives no KV and takes none."""
    num_moves: int = 0
    """Rows that are on their way to it or from it."""
    host: str = ""
    is_leading: bool = False
    """Its steps are computed with other engines, so that its rows stay where they are."""

    def is_like(self, other: "ReplicaSnapshot") -> bool:
        """Return whether KV may go from the one to the other."""
        return self.kv_token_bytes == other.kv_token_bytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSnapshot:
    """All replicas that work, and the links between them; not those that follow others."""

    replicas: tuple[ReplicaSnapshot, ...]
    pulling: frozenset[int] = frozenset()
    """Replicas that ask for rows now."""
    has_waiting: bool = False
    """Rows wait that any replica may take."""
    bytes_per_s: float | None = None
    """At which KV went from one replica to another; None until some did."""

    def replica(self, replica_id: int) -> ReplicaSnapshot:
        """Return a replica that is in it."""
        return next(r for r in self.replicas if r.replica_id == replica_id)


class Steal(NamedTuple):
    """Unstarted rows to take from a replica: whole groups where possible, see `choose_rows`."""

    replica_id: int
    max_rows: int
    max_cost: int


class RowMove(NamedTuple):
    """A running row that goes from one replica to another, with its KV or without."""

    row_id: int
    source: int
    target: int
    with_kv: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """What is to be done now with rows that a replica has already."""

    steal: Steal | None = None
    moves: tuple[RowMove, ...] = ()
    saved_s: float = 0.0
    """By which the moves let the pool end earlier, as far as can be told."""
    is_settled: bool = False
    """Rows that run are where they should be, and none waits in an engine."""
