"""Inputs and outputs of `plan_pool`; plain records."""

from dataclasses import dataclass
from typing import NamedTuple

from raybatch.policy.pool.throughput import StepSeconds
from raybatch.records.arrays import Bools, Floats, Ints

# quantiles of row lengths, denser near the longest
LEFT_SHARES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.98)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunningRows:
    """Rows that one replica decodes, in any order; arrays are [S]."""

    ids: Ints
    tokens: Ints
    """Prompt and generated tokens, whose KV would move."""
    left: Floats
    """Expected remaining tokens, at least 1."""
    can_move: Bools
    times_moved: Ints | None = None
    """How often each has moved so far; None if none has."""
    quantiles: Floats | None = None
    """Quantiles `LEFT_SHARES` of the remaining tokens, [S, shares], ascending; None if `left` is
    certain."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSnapshot:
    """State of one ready replica."""

    replica_id: int
    num_held: int = 0
    """Rows that it holds, running or not."""
    cost: int = 0
    """Cost of these rows in tokens: prompts, prefixes once, and outputs."""
    num_unstarted: int = 0
    """Unstarted rows of its engine, as last reported."""
    can_give: bool = True
    """Its report is fresh, and it runs no suspects, which must not move."""
    speed: float = 1.0
    """Work per second, relative to the other replicas."""
    seconds: StepSeconds | None = None
    """Its step costs; None until measured."""
    rows: RunningRows | None = None
    """Its decoding rows; None if unknown."""
    free_kv_tokens: int = 0
    free_seqs: int = 0
    """Free sequence slots."""
    kv_token_bytes: int = 0
    """KV bytes of a token that moves; 0 if its engine cannot export and import KV."""
    num_moves: int = 0
    """Rows that move to it or from it."""
    host: str = ""
    is_tp_driver: bool = False
    """It drives a TP group, so its rows do not move."""

    def is_like(self, other: "ReplicaSnapshot") -> bool:
        """Return whether KV may move between this replica and `other`."""
        return self.kv_token_bytes == other.kv_token_bytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSnapshot:
    """All ready replicas except TP workers, and the links between them."""

    replicas: tuple[ReplicaSnapshot, ...]
    pulling: frozenset[int] = frozenset()
    """Replicas with a pending pull."""
    has_waiting: bool = False
    """Rows wait that any replica may take."""
    bytes_per_s: float | None = None
    """Measured bandwidth of KV moves; None until measured."""

    def replica(self, replica_id: int) -> ReplicaSnapshot:
        """Return a replica by id."""
        return next(r for r in self.replicas if r.replica_id == replica_id)


class Steal(NamedTuple):
    """Unstarted rows to take from a replica: whole groups if possible; see `choose_rows`."""

    replica_id: int
    max_rows: int
    max_cost: int


class RowMove(NamedTuple):
    """The migration of a running row, with or without its KV."""

    row_id: int
    source: int
    target: int
    with_kv: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """What to start now: a steal of unstarted rows, or moves of running rows."""

    steal: Steal | None = None
    moves: tuple[RowMove, ...] = ()
    saved_s: float = 0.0
    """Forecast saving of the moves."""
    is_settled: bool = False
    """Running rows are balanced, and no engine has unstarted ones."""
