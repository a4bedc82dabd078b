"""Virtual time: what is to happen, and when."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """The event queue of one simulation; `now` is its time, in seconds from the beginning.

    Events due at the same time run in the order in which they were added.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` when the simulation reaches `time_s`, or next if that has passed."""
        heapq.heappush(self._events, (max(self.now, time_s), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run events in order of time until `is_over` returns True, or no event is left."""
        while self._events and not is_over():
            self.now, _, action = heapq.heappop(self._events)
            action()
