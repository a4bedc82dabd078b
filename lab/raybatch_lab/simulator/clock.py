"""Virtual time: what is to happen, and when."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Owns the time of one simulation, in seconds from its beginning.

    What is due together happens in the order of its entry.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Let `action` happen at a time, or at once where that has passed."""
        heapq.heappush(self._events, (max(self.now, time_s), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let events happen until it is over, or nothing is to come."""
        while self._events and not is_over():
            self.now, _, action = heapq.heappop(self._events)
            action()
