"""States of a pool become samples and events, as the log of a run holds them; no clock."""

from dataclasses import dataclass
from typing import Any

from raybatch.records.types import PoolStats

_MIN_EVERY_S, _MAX_EVERY_S = 0.5, 10.0
# a short run has this many samples
_NUM_SAMPLES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What a state of the pool gives reason to write.

    Args:
        events: engines that became ready or went away.
        sample: fields of a sample; None where none is due.
    """

    events: tuple[dict[str, Any], ...] = ()
    sample: dict[str, Any] | None = None


class Sampler:
    """Turns counters that only grow, and start again with an engine, into differences."""

    def __init__(self) -> None:
        self._first: PoolStats | None = None
        self._last: PoolStats | None = None
        self._last_s = 0.0
        self._sampled_s = 0.0
        self._preemptions = 0
        self._cost = 0.0
        self._busy: dict[int, float] = {}
        self._ready: dict[int, float] = {}

    def observe(self, now_s: float, stats: PoolStats, cost: float = 0.0) -> Observed:
        """Take the state at `now_s` seconds after the run began, and what the run has cost."""
        self._cost = cost
        events = self._count(now_s, stats)
        every_s = min(_MAX_EVERY_S, max(_MIN_EVERY_S, now_s / _NUM_SAMPLES))
        is_due = now_s - self._sampled_s >= every_s
        return Observed(events=events, sample=self._sample(now_s) if is_due else None)

    def rest(self, now_s: float) -> dict[str, Any] | None:
        """Return what was observed since the last sample; None where nothing was."""
        is_new = self._last is not None and self._last_s > self._sampled_s
        return self._sample(min(now_s, self._last_s)) if is_new else None

    def _count(self, now_s: float, stats: PoolStats) -> tuple[dict[str, Any], ...]:
        before = self._last
        known = {} if before is None else dict(zip(before.ranks, before.replicas, strict=True))
        for rank, replica in zip(stats.ranks, stats.replicas, strict=True):
            old = known.get(rank)
            # what a warm engine did before this run is not of this run
            busy_before = 0.0 if old is None else old.engine_s
            preempted_before = 0 if old is None else old.num_preemptions
            if before is None:
                busy_before, preempted_before = replica.engine_s, replica.num_preemptions
            busy_s, preempted = replica.engine_s, replica.num_preemptions
            # an engine that started again counts from 0
            busy_s -= busy_before if busy_s >= busy_before else 0.0
            preempted -= preempted_before if preempted >= preempted_before else 0
            ready_s = now_s - self._last_s
            self._busy[rank] = self._busy.get(rank, 0.0) + min(busy_s, ready_s)
            self._ready[rank] = self._ready.get(rank, 0.0) + ready_s
            self._preemptions += preempted
        self._first = self._first or stats
        self._last, self._last_s = stats, now_s
        gone, new = set(known) - set(stats.ranks), set(stats.ranks) - set(known)
        return (
            *({"rank": rank, "state": "gone"} for rank in sorted(gone)),
            *({"rank": rank, "state": "ready"} for rank in sorted(new)),
        )

    def _sample(self, now_s: float) -> dict[str, Any]:
        stats, first = self._last, self._first
        if stats is None or first is None:
            return {"end_s": now_s, "seconds": now_s - self._sampled_s}
        replicas = stats.replicas
        sample = {
            "end_s": now_s,
            "seconds": now_s - self._sampled_s,
            "rows": stats.rows_done,
            "prompt_tokens": stats.prompt_tokens_done,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.generated_tokens,
            "cost": self._cost,
            "running": sum(replica.num_running for replica in replicas),
            "waiting": sum(replica.num_waiting for replica in replicas),
            "kv": sum(r.kv_used_fraction for r in replicas) / max(1, len(replicas)),
            "num_ready": stats.num_ready,
            "restarts": max(0, stats.num_restarts - first.num_restarts),
            "preemptions": self._preemptions,
            "engines": [
                [rank, self._busy[rank], ready_s] for rank, ready_s in sorted(self._ready.items())
            ],
        }
        self._busy, self._ready, self._sampled_s = {}, {}, now_s
        return sample
