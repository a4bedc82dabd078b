"""What is told of starts that failed: traces once, and nothing that the run ends with; pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StartNews:
    """Words the news of one pool; whoever has it logs what it returns.

    The cause of the last rank that is given up is what the run ends with, and its error tells it.
    So a rank that is given up is news only where others work, which shows when one is ready.
    """

    _traces: set[str] = field(default_factory=set)
    _untold: list[str] = field(default_factory=list)

    def again(self, rank: int, cause: str, trace: str = "") -> str:
        """Return what to tell of a rank that is started again.

        Args:
            rank: of the replica.
            cause: of its end.
            trace: of the error; "" for none.
        """
        return f"replica {rank} is started again: {cause}{self.new_trace(trace)}"

    def given_up(self, rank: int, cause: str, trace: str = "") -> None:
        """Take note of a rank that is given up while others are not."""
        self._untold.append(f"replica {rank} is given up: {cause}{self.new_trace(trace)}")

    def new_trace(self, trace: str) -> str:
        """Return a trace on lines of its own where nobody was told of it; else ""."""
        if not trace or trace in self._traces:
            return ""
        self._traces.add(trace)
        return f"\n{trace}"

    def take(self) -> list[str]:
        """Return what to tell of ranks that are given up, once one is ready; it is told then."""
        untold, self._untold = self._untold, []
        return untold
