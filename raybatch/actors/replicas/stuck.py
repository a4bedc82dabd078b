"""Finds replicas that hang, from what they report; no clock of its own, no Ray."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from raybatch.actors.wire.records import Pulse
from raybatch.config import PoolConfig

# where one step has taken long, others may: prompts on a slow host, a first step that compiles
_LATER_STEPS = 2.0


@dataclass(slots=True)
class _Seen:
    """Seconds with rows: since the last report, and since a step ended last."""

    pulse: Pulse = field(default_factory=Pulse)
    silent_s: float = 0.0
    still_s: float = 0.0


class StuckWatch:
    """Follows the replicas of one pool; `pool.stuck_after_s` of None finds none.

    A replica hangs where it has rows, and either its engine finishes no step, or nothing is heard
    of it. The first step of a pool may take as long as a start, and later ones twice the longest
    that has ended so far.
    """

    def __init__(self, pool: PoolConfig) -> None:
        self._stuck_after_s = pool.stuck_after_s
        self._start_timeout_s = pool.start_timeout_s
        self._longest_s: float | None = None
        self._seen: dict[int, _Seen] = {}

    def heard(self, replica_id: int, pulse: Pulse) -> None:
        """Take what a replica reports."""
        seen = self._seen.setdefault(replica_id, _Seen())
        seen.silent_s = 0.0
        if pulse.num_steps > seen.pulse.num_steps:
            self._longest_s = max(self._longest_s or 0.0, seen.still_s)
        if pulse.num_steps != seen.pulse.num_steps or pulse.busy_with != "steps":
            seen.still_s = 0.0
        seen.pulse = pulse

    def forget(self, replica_id: int) -> None:
        self._seen.pop(replica_id, None)

    def still_s(self) -> dict[int, float]:
        """Return for how long each replica with rows has ended no step, as far as is known."""
        return {r: max(seen.silent_s, seen.still_s) for r, seen in self._seen.items()}

    def tick(self, elapsed_s: float, with_rows: Iterable[int]) -> dict[int, str]:
        """Return the replicas that hang and why, after so many seconds; those have rows."""
        after_s, busy = self._stuck_after_s, set(with_rows)
        found, limit_s = {}, None if after_s is None else self._step_limit_s(after_s)
        for replica_id in self._seen.keys() - busy:
            self._seen[replica_id].silent_s = self._seen[replica_id].still_s = 0.0
        for replica_id in sorted(busy):
            seen = self._seen.setdefault(replica_id, _Seen())
            seen.silent_s += elapsed_s
            if seen.pulse.busy_with == "steps":
                seen.still_s += elapsed_s
            if after_s is None:
                continue
            if seen.silent_s > after_s:
                found[replica_id] = (
                    f"the engine hung: its process has not answered for {after_s:g} s "
                    "(see pool.stuck_after_s)"
                )
            elif limit_s is not None and seen.still_s > limit_s:
                which = "" if seen.pulse.num_steps else "first "
                found[replica_id] = (
                    f"the engine hung: it has finished no {which}step for {limit_s:g} s "
                    "(see pool.stuck_after_s)"
                )
        return found

    def _step_limit_s(self, after_s: float) -> float | None:
        if self._longest_s is not None:
            return max(after_s, _LATER_STEPS * self._longest_s)
        return None if self._start_timeout_s is None else max(after_s, self._start_timeout_s)
