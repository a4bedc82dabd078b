"""Links between simulated hosts, whose transfers take time."""

import math
from dataclasses import dataclass

from raybatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec:
    """Parameters of a link, a token bucket with a latency.

    Args:
        latency_s: seconds added to each transfer.
        burst_bytes: bytes that pass at once after a pause.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.latency_s < 0 or self.burst_bytes < 0:
            raise ConfigError(
                f"a link needs bytes_per_s above 0, and latency_s and burst_bytes of at least 0, "
                f"got {self.bytes_per_s}, {self.latency_s} and {self.burst_bytes}"
            )


class Link:
    """A simulated link, which serves transfers in order of their calls of `arrival`."""

    def __init__(self, spec: LinkSpec) -> None:
        self._spec = spec
        # bytes that may pass at once; below 0 what is still on its way
        self._level = spec.burst_bytes
        self._seen_s = 0.0

    def arrival(self, now: float, num_bytes: float) -> float:
        """Return the arrival time of `num_bytes` sent now.

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
