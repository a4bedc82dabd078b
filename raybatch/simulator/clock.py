"""Virtual time: what is to happen and when, and links between hosts whose transfers take some."""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from raybatch.errors import ConfigError


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec:
    """What a link can do, a token bucket: bytes per second, a burst, and a latency.

    Args:
        burst_bytes: that pass at once after a pause.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.latency_s < 0 or self.burst_bytes < 0:
            raise ConfigError(
                f"a link needs bytes per second above 0, a latency and a burst of 0 or more, got "
                f"{self.bytes_per_s}, {self.latency_s} and {self.burst_bytes}"
            )


class Link:
    """One link; transfers pass in the order in which they are asked for."""

    def __init__(self, spec: LinkSpec) -> None:
        self._spec = spec
        # bytes that may pass at once; below 0 what is still on its way
        self._level = spec.burst_bytes
        self._seen_s = 0.0

    def arrival(self, now: float, num_bytes: float) -> float:
        """Return when so many bytes that leave now have arrived.

        Example:
            >>> link = Link(LinkSpec(bytes_per_s=10.0, latency_s=0.5))
            >>> link.arrival(0.0, 20), link.arrival(0.0, 10)
            (2.5, 3.5)
        """
        spec = self._spec
        if math.isinf(spec.bytes_per_s):
            return now + spec.latency_s
        gained = (now - self._seen_s) * spec.bytes_per_s
        self._level = min(spec.burst_bytes, self._level + gained) - num_bytes
        self._seen_s = now
        return now + spec.latency_s + max(0.0, -self._level / spec.bytes_per_s)
