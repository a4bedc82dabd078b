"""Statistics of a pool of engines: its replicas, its units, and the rows of one client."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from raybatch.records.types import TOKEN_COUNTS, ReplicaStats, TokenCounts, counter


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileCoverage:
    """How many of `num_rows` outputs had lengths below, or at most, their predicted quantile."""

    share: float
    num_rows: int
    num_below: int
    num_at_most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUnit:
    """A commit unit with running rows."""

    unit: int
    age_s: float
    """Seconds since its rows were sent to the pool."""
    host: str
    """Of its feeder."""
    pid: int
    """Of its feeder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCounts(TokenCounts):
    """Counts of restarts, and of rows that engines of a pool took over; named as in run logs."""

    restarts: int = counter("Engine restarts after crashes.", metric="replica_restarts")
    hung: int = counter("Restarts of hung engines.", metric="replica_hung")
    moved: int = counter("Running rows migrated to another engine.", metric="moved_rows")
    moved_kv_bytes: int = counter("KV bytes migrated with rows.")
    teams: int = counter("TP groups that idle engines formed with a busy one.")
    team_steps: int = counter("Steps computed by TP groups.")
    duplicates: int = counter(
        "Running rows that a second engine began as well.", metric="duplicated_rows"
    )
    """See `pool.duplicate_last_rows`."""
    won_duplicates: int = counter("Of these, rows that it finished first.")


POOL_COUNTS = tuple(each.name for each in fields(PoolCounts) if each.name not in TOKEN_COUNTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats(PoolCounts):
    """State of a pool; rows and tokens are counted for one of the stages that use it.

    Fields of `TokenCounts`, and `cost`, count finished rows.
    """

    num_replicas: int = 0
    """Target number of replicas."""
    most_replicas: int = 0
    """Largest target so far."""
    num_ready: int = 0
    """Replicas that are ready."""
    num_restarting: int = 0
    """Replicas that were ready once and are restarting."""
    num_given_up: int = 0
    """Replicas that failed to start too often."""
    num_group_cuts: int = 0
    """Times that a replica got rows of a prefix group running on another replica."""
    cut_tokens: int = 0
    """Prefix tokens recomputed because of that."""
    rows_received: int = 0
    rows_done: int = 0
    """Error rows included."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Error class to number of rows."""
    prompt_tokens_received: int = 0
    cost: float = 0.0
    """Cost of answers, if the backend has prices."""
    max_tokens_left: int = 0
    """Upper bound of tokens still to generate."""
    busy_s: float = 0.0
    """Seconds that engines spent in steps, summed over replicas."""
    replicas: tuple[ReplicaStats, ...] = ()
    """Of the live engines."""
    ranks: tuple[int, ...] = ()
    """Of these engines."""
    num_units_written: int = 0
    """Commit units written by feeders."""
    num_open_units: int = 0
    """Commit units with running rows."""
    length_coverage: tuple[QuantileCoverage, ...] = ()
    """Coverage of the output lengths predicted when rows were dispatched."""
    oldest_unit: OpenUnit | None = None
    """The open unit that has run longest."""
