"""Chooses between weight fetch and activation exchange for a weight-sharing group, by generation.

fetch      every rank fetches weights of its peers; passes are independent
exchange   rows go to the shard owners; all ranks pass at once

A fetch is amortised over a batch, so large batches fetch weights; in the tail, where a pass is
shorter than its fetch, rows are exchanged. All ranks must be in one mode, so the coordinator
decides (`choose_mode`), publishes a generation, and continues once all ranks acknowledged it.
Source: SiDP, section 4.3; here switches are at page boundaries, not minutes apart, for short jobs.
"""

from dataclasses import dataclass, field
from typing import Literal

from raybatch.errors import ConfigError, RankError
from raybatch_extensions.debounce import Debounce

Mode = Literal["fetch", "exchange"]

# relative to the threshold: more than the noise of batch sizes
_HYSTERESIS = 0.25
# decay of the mean batch per boundary
_KEPT = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """Load of one rank of a group.

    Args:
        num_active: running sequences.
        mean_batch: mean rows per recent pass, prompt tokens counted as rows (`MeanBatch`); 0
            without passes.
        wanted_rows: sequences that fit into its KV memory, see `wanted_rows`. `mean_batch` is lower
            while passes exchange activations, and rises only gradually after that.
    """

    rank: int
    num_active: int
    mean_batch: float
    wanted_rows: float = 0.0

    @property
    def is_dummy(self) -> bool:
        """Return whether its passes have no rows and only serve peers."""
        return self.num_active == 0


@dataclass(slots=True)
class MeanBatch:
    """Decaying mean of the rows per pass of one rank.

    Prompts come in bursts that are longer than the time between two reports.
    """

    rows: float = 0.0
    passes: float = 0.0

    def note(self, rows: float, passes: float) -> None:
        """Add a number of passes, which had `rows` rows in total."""
        self.rows += rows
        self.passes += passes

    def take(self) -> float:
        """Return the mean, 0 without passes; from now on earlier passes count less."""
        mean = self.rows / self.passes if self.passes else 0.0
        self.rows *= _KEPT
        self.passes *= _KEPT
        return mean


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSnapshot:
    """State of a weight-sharing group, as the coordinator sees it at one time.

    Args:
        threshold_rows: batch size per rank from which fetching is faster, see `exchange_limit`.
        hysteresis: share of the threshold by which a batch must be beyond it to change the mode.
    """

    loads: tuple[RankLoad, ...]
    mode: Mode
    threshold_rows: float
    hysteresis: float = _HYSTERESIS

    def __post_init__(self) -> None:
        if not self.loads or not 0 <= self.hysteresis < 1 or self.threshold_rows < 0:
            raise ConfigError(
                "a weight-sharing group needs >= 1 rank, threshold_rows >= 0 and hysteresis in "
                f"[0, 1), got {len(self.loads)}, {self.threshold_rows} and {self.hysteresis}"
            )

    @property
    def dummies(self) -> frozenset[int]:
        """Return the ranks without rows, which only serve the shards that they own."""
        return frozenset(load.rank for load in self.loads if load.is_dummy)

    @property
    def batch(self) -> float:
        """Return the mean of the batches that ranks with rows have or want; 0 if none has rows."""
        batches = [
            max(load.mean_batch, load.wanted_rows) for load in self.loads if not load.is_dummy
        ]
        return sum(batches) / len(batches) if batches else 0.0


def max_exchange_rows(most_tokens: int, size: int) -> int:
    """Return the most rows per rank so that `size` ranks together have at most `most_tokens`."""
    return max(1, most_tokens // size)


def exchange_limit(
    hiding_rows: float, *, most_rows: float, exchange_s: float, fetch_s: float
) -> float:
    """Return the batch size from which weight fetch has more throughput than a full exchange pass.

    Args:
        hiding_rows: batch size at which an exchange pass takes as long as the fetch (B_th).
        most_rows: most rows of a rank in an exchange pass.
        exchange_s, fetch_s: seconds of an exchange pass with `most_rows`, and of the weight fetch.

    Example:
        >>> exchange_limit(400, most_rows=64, exchange_s=0.05, fetch_s=0.1)
        128.0
    """
    if hiding_rows <= most_rows:
        return hiding_rows
    return min(hiding_rows, most_rows * fetch_s / exchange_s)


def wanted_rows(*, num_running: int, num_waiting: int, kv_used_fraction: float) -> float:
    """Return how many of an engine's running and waiting sequences fit into its KV memory."""
    return min(num_running + num_waiting, num_running / max(kv_used_fraction, 1e-6))


def choose_mode(snapshot: GroupSnapshot) -> Mode:
    """Return "exchange" for a batch below the threshold, "fetch" above it or without rows.

    Near the threshold the current mode stays.

    Example:
        >>> loads = (RankLoad(rank=0, num_active=3, mean_batch=4.0),)
        >>> choose_mode(GroupSnapshot(loads=loads, mode="fetch", threshold_rows=32))
        'exchange'
    """
    if len(snapshot.dummies) == len(snapshot.loads):
        # the next rows start with prompts
        return "fetch"
    if snapshot.batch < snapshot.threshold_rows * (1 - snapshot.hysteresis):
        return "exchange"
    if snapshot.batch > snapshot.threshold_rows * (1 + snapshot.hysteresis):
        return "fetch"
    return snapshot.mode


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeGeneration:
    """A numbered mode of all ranks of a group; a change has the next generation number."""

    generation: int
    mode: Mode


@dataclass(kw_only=True, slots=True)
class ModeBook:
    """Tracks the mode, "fetch" or "exchange", of one weight-sharing group for the coordinator.

    A change needs two consecutive snapshots that agree, then an acknowledgement of every rank: no
    rank computes in the new generation before `is_agreed`.
    """

    ranks: tuple[int, ...]
    current: ModeGeneration = ModeGeneration(generation=0, mode="fetch")
    num_switches: int = 0
    _debounce: Debounce = field(default_factory=Debounce, init=False)
    _seen: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._seen = set(self.ranks)

    @property
    def is_agreed(self) -> bool:
        """Return whether every rank has acknowledged the current generation."""
        return len(self._seen) == len(self.ranks)

    def update(self, snapshot: GroupSnapshot, boundary: int) -> ModeGeneration | None:
        """Return the next generation if two consecutive snapshots want another mode, else None.

        Args:
            boundary: increasing number of the snapshot; a repeated one does not count again.
        """
        if not self.is_agreed:
            return None
        wanted = choose_mode(snapshot)
        change = wanted if wanted != self.current.mode else None
        if not self._debounce.update(change, boundary):
            return None
        self._debounce, self._seen = Debounce(), set()
        self.current = ModeGeneration(generation=self.current.generation + 1, mode=wanted)
        self.num_switches += 1
        return self.current

    def fallen_back(self) -> "ModeBook":
        """Return the book of the group after a failed switch: all ranks fetch weights."""
        return ModeBook(
            ranks=self.ranks,
            current=ModeGeneration(generation=self.current.generation + 1, mode="fetch"),
        )

    def acknowledge(self, rank: int, generation: int) -> None:
        """Record the acknowledgement of a generation by a rank.

        Raises RankError: the rank is no member, or the generation is not the current one.
        """
        if rank not in self.ranks:
            raise RankError(f"rank {rank} is not among the ranks {list(self.ranks)} of this group")
        if generation != self.current.generation:
            raise RankError(
                f"rank {rank} missed a mode switch: it is in generation {generation}, its group in "
                f"generation {self.current.generation}; all ranks return to weight fetch"
            )
        self._seen.add(rank)
