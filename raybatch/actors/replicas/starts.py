"""When a failed replica is started again, and the log messages about it; no Ray, time passed in."""

from dataclasses import dataclass, field

_FIRST_DELAY_S = 0.2
_DELAY_FACTOR = 5.0
_MAX_DELAY_S = 30.0


@dataclass(slots=True)
class _Rank:
    num_failures: int = 0
    start_began: float | None = None
    is_ready: bool = False
    has_been_ready: bool = False
    is_retired: bool = False


@dataclass(slots=True)
class StartLedger:
    """Counts starts and deaths of the ranks of one pool.

    A death that cost rows is theirs to answer for (see `RowQueue.lose`); one without rows counts
    like a failed start.

    Args:
        max_start_failures: failures in a row after which a rank is given up.
    """

    num_replicas: int
    max_start_failures: int
    num_restarts: int = 0
    longest_start_s: float = 0.0
    _ranks: list[_Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.num_replicas)]

    def begin(self, rank: int, now: float) -> None:
        self._ranks[rank].start_began = now

    def ready(self, rank: int, now: float) -> None:
        state = self._ranks[rank]
        if state.start_began is not None:
            self.longest_start_s = max(self.longest_start_s, now - state.start_began)
        state.start_began = None
        state.is_ready = state.has_been_ready = True

    def worked(self, rank: int) -> None:
        """Note that `rank` finished rows, so that its failures count from zero again."""
        self._ranks[rank].num_failures = 0

    def stopped(self, rank: int) -> None:
        self._ranks[rank].start_began = None
        self._ranks[rank].is_ready = False

    def died(self, rank: int, *, lost_rows: bool, is_final: bool = False) -> float | None:
        """Note a death or a failed start.

        Args:
            lost_rows: whether the death cost rows.
            is_final: whether another start would fail as this one did.

        Returns:
            Seconds to wait before the next start, or None: the rank is given up.
        """
        self.stopped(rank)
        state = self._ranks[rank]
        if lost_rows:
            self.num_restarts += 1
            return 0.0
        state.num_failures += 1
        if is_final or state.num_failures >= self.max_start_failures:
            state.is_retired = True
            return None
        self.num_restarts += 1
        delay = _FIRST_DELAY_S * _DELAY_FACTOR ** (state.num_failures - 1)
        return float(min(_MAX_DELAY_S, delay))

    def num_ready(self) -> int:
        return sum(state.is_ready for state in self._ranks)

    def num_restarting(self) -> int:
        """Return the number of ranks that answered once and do not answer now."""
        return sum(s.has_been_ready and not (s.is_ready or s.is_retired) for s in self._ranks)

    def num_retired(self) -> int:
        return sum(state.is_retired for state in self._ranks)

    def is_exhausted(self) -> bool:
        return all(state.is_retired for state in self._ranks)

    def is_retired(self, rank: int) -> bool:
        return self._ranks[rank].is_retired

    def num_expected(self, now: float) -> int:
        """Return the starts that are likely to end soon, judged by the longest one seen."""
        patience_s = 2 * self.longest_start_s
        return sum(
            state.start_began is not None and now - state.start_began <= patience_s
            for state in self._ranks
        )


@dataclass(slots=True)
class StartEvents:
    """Messages about the starts of one pool, for the log.

    The run ends with the cause of the last rank that is given up. So the others are logged only
    where some rank works, which shows when one is ready. A trace is logged once.
    """

    _traces: set[str] = field(default_factory=set)
    _kept: list[str] = field(default_factory=list)

    def again(self, rank: int, cause: str, trace: str = "") -> str:
        """Return the message about a rank that is started again."""
        return f"replica {rank} is started again: {cause}{self.new_trace(trace)}"

    def given_up(self, rank: int, cause: str, trace: str = "") -> None:
        """Keep the message about a rank that is given up while others are not."""
        self._kept.append(f"replica {rank} is given up: {cause}{self.new_trace(trace)}")

    def new_trace(self, trace: str) -> str:
        """Return a trace on lines of its own if it is new, else ""."""
        if not trace or trace in self._traces:
            return ""
        self._traces.add(trace)
        return f"\n{trace}"

    def take(self) -> list[str]:
        """Return the messages about ranks that are given up, each once."""
        kept, self._kept = self._kept, []
        return kept
