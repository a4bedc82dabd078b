"""What a pool of engines tells of itself: its replicas, its units, and the rows of one client."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from raybatch.records.types import TOKEN_COUNTS, ReplicaStats, TokenCounts, counter


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileCoverage:
    """How many outputs were below, and at most, the length that this share was not to exceed."""

    share: float
    num_rows: int
    num_below: int
    num_at_most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUnit:
    """A unit of commit that is at work."""

    unit: int
    age_s: float
    """Since its rows were handed to the pool."""
    host: str
    """Of its feeder."""
    pid: int
    """Of its feeder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCounts(TokenCounts):
    """What replicas of a pool did together, under the names that reports and logs of runs have."""

    restarts: int = counter("Engines started again after a death.", metric="replica_restarts")
    hung: int = counter("Of these, engines that hung.", metric="replica_hung")
    moved: int = counter("Running rows that went to another engine.", metric="moved_rows")
    moved_kv_bytes: int = counter("KV that went with them.")
    teams: int = counter("Times that idle engines took part in the steps of another one.")
    team_steps: int = counter("Steps that these computed.")
    duplicates: int = counter(
        "Running rows that a second engine began as well.", metric="duplicated_rows"
    )
    """See `pool.duplicate_last_rows`."""
    won_duplicates: int = counter("Of these, rows that it finished first.")


POOL_COUNTS = tuple(each.name for each in fields(PoolCounts) if each.name not in TOKEN_COUNTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats(PoolCounts):
    """State of a pool of replicas; the counts of rows and tokens are those of one client stage.

    Those of `TokenCounts`, and `cost`, are of the rows that are done.
    """

    num_replicas: int = 0
    """That the pool wants."""
    most_replicas: int = 0
    """That it wanted at once."""
    num_ready: int = 0
    """Replicas that answer."""
    num_restarting: int = 0
    """Replicas that answered once and are being started again."""
    num_given_up: int = 0
    """Replicas that failed to start too often."""
    num_group_cuts: int = 0
    """Times that a replica got rows of a prefix group that was live at another."""
    cut_tokens: int = 0
    """Prefix tokens computed once more for these."""
    rows_received: int = 0
    rows_done: int = 0
    """Error rows included."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Error class to number of rows."""
    prompt_tokens_received: int = 0
    cost: float = 0.0
    """Where the backend has prices."""
    max_tokens_left: int = 0
    """Upper bound of tokens still to generate."""
    busy_s: float = 0.0
    """Seconds that engines spent in steps, summed over replicas."""
    replicas: tuple[ReplicaStats, ...] = ()
    """Of the live engines."""
    ranks: tuple[int, ...] = ()
    """Of these engines."""
    num_units_written: int = 0
    """Units of commit that feeders have written."""
    num_open_units: int = 0
    """Units of commit that are at work."""
    length_coverage: tuple[QuantileCoverage, ...] = ()
    """Of output lengths that were predicted when rows were handed out."""
    oldest_unit: OpenUnit | None = None
    """The one that has taken longest."""
