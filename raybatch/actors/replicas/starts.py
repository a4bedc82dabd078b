"""Bookkeeping of starts, crashes and hangs of the replicas of one pool; no Ray."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from raybatch.actors.wire.records import Activity
from raybatch.config import PoolConfig

_FIRST_DELAY_S = 0.2
_DELAY_FACTOR = 5.0
_MAX_DELAY_S = 30.0
# limit of later steps, in times of the longest one: long prompts and compiling steps are slow
_LATER_STEPS = 2.0


@dataclass(slots=True)
class _Rank:
    num_failures: int = 0
    start_began: float | None = None
    is_ready: bool = False
    has_been_ready: bool = False
    is_retired: bool = False
    # False once it was scaled down
    is_wanted: bool = True


@dataclass(slots=True)
class StartLedger:
    """Counts starts and crashes of the ranks of one pool: call `begin`, `ready` and `died`.

    A crash with rows is attributed to the rows (see `RowQueue.lose`). A crash without rows counts
    as a failed start.

    Args:
        num_replicas: initial number of ranks.
        max_start_failures: consecutive failed starts after which a rank is given up.
        group_size: ranks of a group start together, and share a count of failures.
    """

    num_replicas: int
    max_start_failures: int
    group_size: int = 1
    num_restarts: int = 0
    num_hung: int = 0
    longest_start_s: float = 0.0
    ranks: list[_Rank] = field(default_factory=list)
    # most replicas wanted at once
    most_wanted: int = 0

    def __post_init__(self) -> None:
        self.ranks = [_Rank() for _ in range(self.num_replicas)]
        self.most_wanted = self.num_replicas

    def grow(self, num_more: int) -> None:
        """Raise the number of wanted replicas: first at stopped ranks, then at new ranks."""
        stopped = [s for s in self.ranks if not (s.is_wanted or s.is_retired or s.is_ready)]
        stopped = stopped[:num_more]
        for state in stopped:
            state.is_wanted = True
        self.ranks += [_Rank() for _ in range(num_more - len(stopped))]
        self.most_wanted = max(self.most_wanted, self.num_wanted())

    def release(self, rank: int) -> None:
        """Note that a rank should have no replica; a later one counts as its first."""
        self.ranks[rank].is_wanted = self.ranks[rank].has_been_ready = False

    def shrink(self) -> None:
        """Reset the wanted replicas to the initial number, after all have stopped."""
        good = [rank for rank, state in enumerate(self.ranks) if not state.is_retired]
        for rank in good[self.num_replicas :]:
            self.release(rank)
        for rank in good[: self.num_replicas]:
            self.ranks[rank].is_wanted = True

    def to_start(self) -> list[int]:
        """Return the ranks that should have a replica."""
        return [r for r, s in enumerate(self.ranks) if s.is_wanted and not s.is_retired]

    def num_wanted(self) -> int:
        """Return the number of wanted replicas, including ranks that were given up."""
        return sum(state.is_wanted for state in self.ranks)

    def begin(self, rank: int, now: float) -> None:
        self.ranks[rank].start_began = now

    def ready(self, rank: int, now: float) -> None:
        state = self.ranks[rank]
        if state.start_began is not None:
            self.longest_start_s = max(self.longest_start_s, now - state.start_began)
        state.start_began = None
        state.is_ready = state.has_been_ready = True

    def worked(self, rank: int) -> None:
        """Note that `rank` finished rows, which resets its failure count."""
        self._counting(rank).num_failures = 0

    def stopped(self, rank: int) -> None:
        self.ranks[rank].start_began = None
        self.ranks[rank].is_ready = False

    def died(self, rank: int, *, lost_rows: bool, is_final: bool = False) -> float | None:
        """Note a crash or a failed start of a rank.

        Returns the seconds to wait before its next start, or None if the rank is given up.

        Args:
            lost_rows: the replica held rows.
            is_final: another start would fail in the same way.
        """
        self.stopped(rank)
        state = self.ranks[rank]
        if lost_rows:
            self.num_restarts += 1
            return 0.0
        counting = self._counting(rank)
        counting.num_failures += 1
        if is_final or counting.num_failures >= self.max_start_failures:
            state.is_retired = True
            return None
        self.num_restarts += 1
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * _DELAY_FACTOR ** (counting.num_failures - 1))

    def _counting(self, rank: int) -> _Rank:
        """Return the rank that counts the failures of its group."""
        return self.ranks[rank - rank % self.group_size]

    def retire(self, rank: int) -> None:
        """Give up a rank: it gets no replica any more."""
        self.ranks[rank].is_retired = True

    def num_ready(self) -> int:
        return sum(state.is_ready for state in self.ranks)

    def num_working(self) -> int:
        """Return the number of wanted replicas that are ready."""
        return sum(state.is_ready and state.is_wanted for state in self.ranks)

    def num_restarting(self) -> int:
        """Return the number of ranks that were ready once and are not now."""
        return sum(s.has_been_ready and not (s.is_ready or s.is_retired) for s in self.ranks)

    def num_retired(self) -> int:
        return sum(state.is_retired for state in self.ranks)

    def is_exhausted(self) -> bool:
        return self.num_retired() == len(self.ranks)

    def num_expected(self, now: float) -> int:
        """Return the number of current starts that should soon be ready.

        Those that take more than twice as long as the longest start so far do not count.
        """
        patience_s = 2 * self.longest_start_s
        return sum(
            state.start_began is not None and now - state.start_began <= patience_s
            for state in self.ranks
        )


@dataclass(slots=True)
class StartEvents:
    """Builds log messages about failed starts of one pool.

    If all ranks are given up, the run fails with the cause of the last one. So messages about ranks
    that were given up are kept until some rank is ready. Each traceback is logged only once.
    """

    _traces: set[str] = field(default_factory=set)
    _kept: list[str] = field(default_factory=list)

    def again(self, rank: int, cause: str, trace: str = "", where: str = "") -> str:
        return f"restarting {_name(rank, where)}: {cause}{self.new_trace(trace)}"

    def given_up(self, rank: int, cause: str, trace: str = "", where: str = "") -> None:
        """Keep a message about a rank that is given up, until `take`."""
        self._kept.append(f"giving up on {_name(rank, where)}: {cause}{self.new_trace(trace)}")

    def new_trace(self, trace: str) -> str:
        """Return a traceback after a line break; "" if it was returned before."""
        if not trace or trace in self._traces:
            return ""
        self._traces.add(trace)
        return f"\n{trace}"

    def take(self) -> list[str]:
        kept, self._kept = self._kept, []
        return kept


def _name(rank: int, where: str) -> str:
    return f"replica {rank} on {where}" if where else f"replica {rank}"


@dataclass(slots=True)
class _Seen:
    """Seconds with rows: since the last report, and since the last finished step."""

    num_steps: int = 0
    busy_with: Activity = "nothing"
    silent_s: float = 0.0
    still_s: float = 0.0


class StuckWatch:
    """Detects hung replicas: call `note_report` with reports and `tick` regularly.

    A replica with rows has hung if its engine finishes no step, or it sends no report, for
    `pool.stuck_after_s`. The first step of a pool may take as long as a start, later ones twice the
    longest so far. If the option is None, no replica counts as hung.
    """

    def __init__(self, pool: PoolConfig) -> None:
        self._stuck_after_s = pool.stuck_after_s
        self._start_timeout_s = pool.start_timeout_s
        self._longest_s: float | None = None
        self._seen: dict[int, _Seen] = {}

    def note_report(self, replica_id: int, num_steps: int, busy_with: Activity) -> None:
        """Update from a report: the finished steps of a replica, and what it does now."""
        seen = self._seen.setdefault(replica_id, _Seen())
        seen.silent_s = 0.0
        if num_steps > seen.num_steps:
            self._longest_s = max(self._longest_s or 0.0, seen.still_s)
        if num_steps != seen.num_steps or busy_with != "steps":
            seen.still_s = 0.0
        seen.num_steps, seen.busy_with = num_steps, busy_with

    def forget(self, replica_id: int) -> None:
        self._seen.pop(replica_id, None)

    def still_s(self) -> dict[int, float]:
        """Return the seconds since the last step of each replica with rows, by id."""
        return {r: max(seen.silent_s, seen.still_s) for r, seen in self._seen.items()}

    def tick(self, elapsed_s: float, with_rows: Iterable[int]) -> dict[int, str]:
        """Return the reason for each hung replica, by id.

        Args:
            elapsed_s: seconds since the last call.
            with_rows: ids of the replicas that have rows.
        """
        after_s, busy = self._stuck_after_s, set(with_rows)
        found, limit_s = {}, None if after_s is None else self._step_limit_s(after_s)
        for replica_id in self._seen.keys() - busy:
            self._seen[replica_id].silent_s = self._seen[replica_id].still_s = 0.0
        for replica_id in sorted(busy):
            seen = self._seen.setdefault(replica_id, _Seen())
            seen.silent_s += elapsed_s
            if seen.busy_with == "steps":
                seen.still_s += elapsed_s
            if after_s is None:
                continue
            if seen.silent_s > after_s:
                found[replica_id] = (
                    f"the engine hung: its process has sent no report for {after_s:g} s "
                    "(see pool.stuck_after_s)"
                )
            elif limit_s is not None and seen.still_s > limit_s:
                which = "" if seen.num_steps else "first "
                found[replica_id] = (
                    f"the engine hung: it has finished no {which}step for {limit_s:g} s "
                    "(see pool.stuck_after_s)"
                )
        return found

    def _step_limit_s(self, after_s: float) -> float | None:
        if self._longest_s is not None:
            return max(after_s, _LATER_STEPS * self._longest_s)
        return None if self._start_timeout_s is None else max(after_s, self._start_timeout_s)
