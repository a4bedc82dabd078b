"""Whether a group that shares feed-forward weights moves weights or rows, and since which epoch.

copies   Weight-as-a-Service: every rank copies the weights of others, passes are its own
rounds   Compute-as-a-Service: rows go to the owners of weights, all ranks pass at once

Weights are read once for a batch, so they travel while batches are large; in the tail, where a pass
is shorter than its copies, rows do. All ranks must be in one mode, so the coordinator alone decides
(`choose_mode`), publishes an epoch, and goes on once all have seen it. Source: SiDP, section 4.3;
switches are at page boundaries, not minutes apart, which a short job would never reach.
"""

from dataclasses import dataclass, field
from typing import Literal

from raybatch.errors import ConfigError, TeamError
from raybatch.policy.pool.plan import Agreement

Mode = Literal["copies", "rounds"]

# of the threshold: further away from it than noise takes batches to both sides
_HYSTERESIS = 0.25
# of what the mean batch of a rank is over
_KEPT = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """What one rank of a group has to do.

    Args:
        num_active: sequences that it runs now.
        mean_batch: rows of its passes over the last pages, with those of the prompts that they
            computed, as a row is a token to a product; 0 where there were none. One page is too
            short for it: prompts come in bursts.
        wanted_rows: sequences that it has KV for, see `wanted_rows`: rounds have room for few, and
            the passes behind them fill up by and by.
    """

    rank: int
    num_active: int
    mean_batch: float
    wanted_rows: float = 0.0

    @property
    def is_dummy(self) -> bool:
        """Return whether its passes are empty, and only keep it in step."""
        return self.num_active == 0


@dataclass(slots=True)
class MeanBatch:
    """Rows of the passes of one rank lately, of which each boundary keeps a share.

    Prompts come in bursts that are longer than the time between two boundaries.
    """

    rows: float = 0.0
    passes: float = 0.0

    def note(self, rows: float, passes: float) -> None:
        """Take passes with so many rows in all."""
        self.rows += rows
        self.passes += passes

    def take(self) -> float:
        """Return the mean at a boundary, 0 where there were no passes."""
        mean = self.rows / self.passes if self.passes else 0.0
        self.rows *= _KEPT
        self.passes *= _KEPT
        return mean


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSnapshot:
    """A group as the coordinator sees it at a boundary.

    Args:
        threshold_rows: batch of a rank from which on it does more with copies, see `round_limit`.
        hysteresis: share of it by which a batch must be beyond it to change the mode.
    """

    loads: tuple[RankLoad, ...]
    mode: Mode
    threshold_rows: float
    hysteresis: float = _HYSTERESIS

    def __post_init__(self) -> None:
        if not self.loads or not 0 <= self.hysteresis < 1 or self.threshold_rows < 0:
            raise ConfigError(
                f"a group has {len(self.loads)} ranks, a threshold of {self.threshold_rows} rows "
                f"and a hysteresis of {self.hysteresis}; it needs 1 rank, 0 rows and a share from "
                "0 up to 1, and not 1"
            )

    @property
    def dummies(self) -> frozenset[int]:
        """Return the ranks without rows: nothing is sent for them, but they serve what they own."""
        return frozenset(load.rank for load in self.loads if load.is_dummy)

    @property
    def batch(self) -> float:
        """Return the mean batch that the ranks with rows have or want, 0 where none has."""
        batches = [
            max(load.mean_batch, load.wanted_rows) for load in self.loads if not load.is_dummy
        ]
        return sum(batches) / len(batches) if batches else 0.0


def most_round_rows(most_tokens: int, size: int) -> int:
    """Return the rows of one rank with which those of all are no more than a step may have."""
    return max(1, most_tokens // size)


def round_limit(hiding_rows: float, *, most_rows: float, rounds_s: float, copies_s: float) -> float:
    """Return from how many rows on a pass with copies does more in a second than a full round.

    Args:
        hiding_rows: from which on rounds take as long as copies (B_th).
        most_rows: of a rank in a round, whose owners compute those of all.
        rounds_s, copies_s: of a round with so many, and of the copies of a pass.

    Example:
        >>> round_limit(400, most_rows=64, rounds_s=0.05, copies_s=0.1)
        128.0
    """
    if hiding_rows <= most_rows:
        return hiding_rows
    return min(hiding_rows, most_rows * copies_s / rounds_s)


def wanted_rows(*, num_running: int, num_waiting: int, kv_used_fraction: float) -> float:
    """Return the sequences that an engine has KV for, of those that it has."""
    return min(num_running + num_waiting, num_running / max(kv_used_fraction, 1e-6))


def choose_mode(snapshot: GroupSnapshot) -> Mode:
    """Return the mode that suits the load: without rows copies, near the threshold the present one.

    Example:
        >>> loads = (RankLoad(rank=0, num_active=3, mean_batch=4.0),)
        >>> choose_mode(GroupSnapshot(loads=loads, mode="copies", threshold_rows=32))
        'rounds'
    """
    if len(snapshot.dummies) == len(snapshot.loads):
        # what comes next begins with prompts
        return "copies"
    if snapshot.batch < snapshot.threshold_rows * (1 - snapshot.hysteresis):
        return "rounds"
    if snapshot.batch > snapshot.threshold_rows * (1 + snapshot.hysteresis):
        return "copies"
    return snapshot.mode


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeEpoch:
    """What all ranks of a group do from its boundary on; epochs only rise."""

    epoch: int
    mode: Mode


@dataclass(kw_only=True, slots=True)
class ModeBook:
    """Follows the mode of one group, on the side of the coordinator.

    A change needs two boundaries in a row that want it, and then every rank to have seen it: none
    computes in the new epoch before `is_agreed`.
    """

    ranks: tuple[int, ...]
    current: ModeEpoch = ModeEpoch(epoch=0, mode="copies")
    num_switches: int = 0
    _agreement: Agreement = field(default_factory=Agreement, init=False)
    _seen: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._seen = set(self.ranks)

    @property
    def is_agreed(self) -> bool:
        """Return whether every rank has acknowledged the present epoch."""
        return len(self._seen) == len(self.ranks)

    def look(self, snapshot: GroupSnapshot, boundary: int) -> ModeEpoch | None:
        """Return the epoch to publish where two boundaries in a row want another mode, else None.

        Args:
            boundary: a number that rises; one that was looked at before does not count again.
        """
        if not self.is_agreed:
            return None
        wanted = choose_mode(snapshot)
        change = wanted if wanted != self.current.mode else None
        if not self._agreement.look(change, boundary):
            return None
        self._agreement, self._seen = Agreement(), set()
        self.current = ModeEpoch(epoch=self.current.epoch + 1, mode=wanted)
        self.num_switches += 1
        return self.current

    def fallen_back(self) -> "ModeBook":
        """Return a book of the same group after a switch that has failed: all copy weights."""
        return ModeBook(
            ranks=self.ranks, current=ModeEpoch(epoch=self.current.epoch + 1, mode="copies")
        )

    def acknowledge(self, rank: int, epoch: int) -> None:
        """Take that a rank has seen an epoch at a boundary of its own.

        Raises TeamError: it is no member, or another epoch than the present one.
        """
        if rank not in self.ranks:
            raise TeamError(f"rank {rank} is none of the ranks {list(self.ranks)} of this group")
        if epoch != self.current.epoch:
            raise TeamError(
                f"rank {rank} is in epoch {epoch} of its group, the others are in epoch "
                f"{self.current.epoch}; it has missed a switch, so all copy weights again"
            )
        self._seen.add(rank)
