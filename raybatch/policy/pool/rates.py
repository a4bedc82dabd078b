"""What steps of the replicas of one pool cost, learnt from differences of their counters."""

from collections import deque
from typing import NamedTuple

import numpy as np

from raybatch.policy.cost.roofline import solve_nonnegative
from raybatch.records.arrays import Floats
from raybatch.records.types import ReplicaStats

# differences that costs are fitted to, the latest of all replicas; and new ones for another fit
_NUM_KEPT, _NUM_NEW = 256, 32
_MIN_KEPT = 8
# of what a replica was seen to do, after each report
_MEMORY = 0.9
# seconds of work from which on a replica's own pace counts
_MIN_SEEN_S = 0.5
# costs and paces are fitted in turns
_NUM_TURNS = 4


class StepSeconds(NamedTuple):
    """Seconds of a step: whatever it does, per decoding row, and per prompt token."""

    step_s: float
    row_s: float
    token_s: float

    def times(self, factor: float) -> "StepSeconds":
        return StepSeconds(*(factor * cost for cost in self))


class _Pace:
    """What one replica did lately: steps, decoded tokens, prompt tokens, and the seconds of it."""

    def __init__(self, stats: ReplicaStats) -> None:
        self.last = stats
        self.counts: Floats = np.zeros(3)
        self.seconds = 0.0

    def slowness(self, usual: StepSeconds | None) -> float:
        """Return the seconds that it takes beside the usual ones; 1 where too little was seen."""
        if usual is None or self.seconds < _MIN_SEEN_S:
            return 1.0
        usual_s = float(self.counts @ np.array(usual))
        return self.seconds / usual_s if usual_s > 0 else 1.0


class StepRates:
    """Costs of steps of all replicas together, and how much slower or faster each one is.

    One fit serves all, as one replica sees few sizes of steps; what remains is a factor of each,
    whether its device is another one or its host is busy.
    """

    def __init__(self) -> None:
        # replica, and [steps, decoded tokens, prompt tokens, seconds]
        self._seen: deque[tuple[int, Floats]] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0
        self._usual: StepSeconds | None = None
        self._paces: dict[int, _Pace] = {}

    def note(self, replica_id: int, stats: ReplicaStats) -> None:
        """Take the counters that a replica reports."""
        pace = self._paces.get(replica_id)
        if pace is None:
            self._paces[replica_id] = _Pace(stats)
            return
        before, pace.last = pace.last, stats
        seconds = stats.engine_s - before.engine_s
        counts = np.array(
            [
                stats.num_steps - before.num_steps,
                stats.generated_tokens - before.generated_tokens,
                stats.num_prefilled_tokens - before.num_prefilled_tokens,
            ],
            float,
        )
        # counters of an engine that was built anew may fall
        if counts[0] <= 0 or seconds <= 0 or (counts < 0).any():
            return
        pace.counts = _MEMORY * pace.counts + counts
        pace.seconds = _MEMORY * pace.seconds + seconds
        self._seen.append((replica_id, np.append(counts, seconds)))
        self._num_new += 1
        # with many replicas a fit would follow the other
        if self._num_new >= max(_NUM_NEW, len(self._seen) // 2) or self._usual is None:
            self._fit()

    def forget(self, replica_id: int) -> None:
        self._paces.pop(replica_id, None)
        kept = [seen for seen in self._seen if seen[0] != replica_id]
        # what the last one that is left has shown is better than nothing
        if kept:
            self._seen = deque(kept, maxlen=_NUM_KEPT)

    def seconds(self, replica_id: int) -> StepSeconds | None:
        """Return what steps of a replica cost; None until enough were seen."""
        return None if self._usual is None else self._usual.times(self._slowness(replica_id))

    def speed(self, replica_id: int) -> float:
        """Return the work of a replica per second, beside that of the pool; 1 for unknown ones."""
        return 1.0 / self._slowness(replica_id)

    def _slowness(self, replica_id: int) -> float:
        pace = self._paces.get(replica_id)
        return 1.0 if pace is None else pace.slowness(self._usual)

    def _fit(self) -> None:
        if len(self._seen) < _MIN_KEPT:
            return
        seen, self._num_new = np.array([counts for _, counts in self._seen]), 0
        for _ in range(_NUM_TURNS):
            paces = np.array([self._slowness(replica_id) for replica_id, _ in self._seen])
            # the usual pace is the mean of what was seen
            seconds = seen[:, 3] / (paces / paces.mean())
            costs = solve_nonnegative(seen[:, :3] / seconds[:, None], np.ones(len(seen)))
            self._usual = StepSeconds(*costs.tolist())
