"""Throughput model of the replicas of one pool, fitted to differences of their counters."""

from collections import deque
from typing import NamedTuple

import numpy as np

from raybatch.policy.cost.roofline import solve_nonnegative
from raybatch.records.arrays import Floats
from raybatch.records.types import ReplicaStats

# latest samples of all replicas to fit, and new ones that trigger another fit
_NUM_KEPT, _NUM_NEW = 256, 32
_MIN_KEPT = 8
# decay of the totals of a replica at each report
_MEMORY = 0.9
# observed seconds before the speed of a replica counts
_MIN_SEEN_S = 0.5
# alternating fits of costs and speeds
_NUM_TURNS = 4


class StepSeconds(NamedTuple):
    """Seconds of a step: fixed, per decoding row, and per prompt token."""

    step_s: float
    row_s: float
    token_s: float

    def times(self, factor: float) -> "StepSeconds":
        return StepSeconds(*(factor * cost for cost in self))


class _Observed:
    """Decayed totals of one replica: steps, decoded tokens, prompt tokens, and seconds."""

    def __init__(self, stats: ReplicaStats) -> None:
        self.last = stats
        self.counts: Floats = np.zeros(3)
        self.seconds = 0.0

    def slowness(self, usual: StepSeconds | None) -> float:
        """Return its seconds relative to the usual ones; 1 if too little was observed."""
        if usual is None or self.seconds < _MIN_SEEN_S:
            return 1.0
        usual_s = float(self.counts @ np.array(usual))
        return self.seconds / usual_s if usual_s > 0 else 1.0


class ThroughputModel:
    """Learns step costs of a pool and the speed of each replica: call `note` with its reports.

    One fit serves all replicas, since each sees few batch sizes. A factor of each replica covers
    other devices and busy hosts.
    """

    def __init__(self) -> None:
        # replica and [steps, decoded tokens, prompt tokens, seconds]
        self._seen: deque[tuple[int, Floats]] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0
        self._usual: StepSeconds | None = None
        self._observed: dict[int, _Observed] = {}

    def note(self, replica_id: int, stats: ReplicaStats) -> None:
        """Learn from the counters that a replica reports, compared with its last ones."""
        observed = self._observed.get(replica_id)
        if observed is None:
            self._observed[replica_id] = _Observed(stats)
            return
        before, observed.last = observed.last, stats
        seconds = stats.engine_s - before.engine_s
        counts = np.array(
            [
                stats.num_steps - before.num_steps,
                stats.generated_tokens - before.generated_tokens,
                stats.num_prefilled_tokens - before.num_prefilled_tokens,
            ],
            float,
        )
        # counters fall when an engine is rebuilt
        if counts[0] <= 0 or seconds <= 0 or (counts < 0).any():
            return
        observed.counts = _MEMORY * observed.counts + counts
        observed.seconds = _MEMORY * observed.seconds + seconds
        self._seen.append((replica_id, np.append(counts, seconds)))
        self._num_new += 1
        # with many replicas, fits would follow each other without pause
        if self._num_new >= max(_NUM_NEW, len(self._seen) // 2) or self._usual is None:
            self._fit()

    def forget(self, replica_id: int) -> None:
        self._observed.pop(replica_id, None)
        kept = [seen for seen in self._seen if seen[0] != replica_id]
        # samples of the last replica are better than none
        if kept:
            self._seen = deque(kept, maxlen=_NUM_KEPT)

    def seconds(self, replica_id: int) -> StepSeconds | None:
        """Return the step costs of a replica; None until enough were observed."""
        return None if self._usual is None else self._usual.times(self._slowness(replica_id))

    def speed(self, replica_id: int) -> float:
        """Return the speed of a replica relative to the mean of the pool; 1 if unknown."""
        return 1.0 / self._slowness(replica_id)

    def _slowness(self, replica_id: int) -> float:
        observed = self._observed.get(replica_id)
        return 1.0 if observed is None else observed.slowness(self._usual)

    def _fit(self) -> None:
        if len(self._seen) < _MIN_KEPT:
            return
        seen, self._num_new = np.array([counts for _, counts in self._seen]), 0
        for _ in range(_NUM_TURNS):
            slowness = np.array([self._slowness(replica_id) for replica_id, _ in self._seen])
            # the usual speed is the mean of all samples
            seconds = seen[:, 3] / (slowness / slowness.mean())
            costs = solve_nonnegative(seen[:, :3] / seconds[:, None], np.ones(len(seen)))
            self._usual = StepSeconds(*costs.tolist())
