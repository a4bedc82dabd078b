"""Stages for many replicas: one replica each at first, then merged while that helps."""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raybatch.policy.stages.lengths import RowLengths
from raybatch.policy.stages.plan import Stage, StagePlan, length_cuts
from raybatch.policy.stages.program import all_stage_seconds
from raybatch.policy.stages.replica_seconds import StagePool
from raybatch.records.arrays import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stage in the making, from one cut to a later one, by their indices."""

    low: int
    high: int
    num_replicas: int


def plan_by_merging(pool: StagePool, lengths: RowLengths, cuts: Ints | None = None) -> StagePlan:
    """Return stages found in two phases; feasible, and never worse than no stages.

    First the best ranges for one replica each, of which there are at most as many as cuts. A
    replica without a range is one with an empty range, which may lie beside any other; it joins
    the slowest stage. Then neighbours are merged, the pair with the largest gain first, where both
    together take less than the slower one alone. O(K^3) for K cuts, O(E log K) for E replicas.

    Source: CascadeInfer, section 4.2, with the makespan as its objective.
    """
    cuts = length_cuts(lengths.longest) if cuts is None else cuts
    stage_s = all_stage_seconds(pool, lengths, cuts)
    parts = find_parts(stage_s)
    stages = tuple(
        Stage(above=int(cuts[p.low]), up_to=int(cuts[p.high]), num_replicas=p.num_replicas)
        for p in parts
    )
    return StagePlan(stages=stages, seconds=_slowest(stage_s, parts))


def find_parts(stage_s: Floats) -> list[Part]:
    """Return the stages of both phases, or one for all lengths where they are no better.

    Args:
        stage_s: seconds from one cut to a later one on 1 to E replicas, [K, K, E].
    """
    num_cuts, _, num_replicas = stage_s.shape
    parts = _one_replica_each(stage_s[:, :, 0], num_replicas)
    parts = merge_by_heap(stage_s, _without_idle(stage_s, parts, num_replicas))
    whole = [Part(low=0, high=num_cuts - 1, num_replicas=num_replicas)]
    return whole if _slowest(stage_s, whole) <= _slowest(stage_s, parts) else parts


def merge_by_heap(stage_s: Floats, parts: list[Part]) -> list[Part]:
    """Merge neighbours while one pair gains, the pair with the largest gain first.

    Entries of the heap that a merge has made stale are passed over.
    """
    alive: dict[int, Part] = {part.low: part for part in parts}
    # by its high cut; a part's neighbours are those that meet it at a cut
    ending: dict[int, Part] = {part.high: part for part in parts}
    # of equal gains the shorter lengths first; the number keeps parts from being compared
    heap: list[tuple[float, int, int, Part, Part]] = []
    number = itertools.count()

    def push(left: Part, right: Part) -> None:
        gain = merge_gain(stage_s, left, right)
        if gain > 0:
            heapq.heappush(heap, (-gain, left.low, next(number), left, right))

    for left, right in itertools.pairwise(parts):
        push(left, right)
    while heap:
        *_, left, right = heapq.heappop(heap)
        if alive.get(left.low) is not left or alive.get(right.low) is not right:
            continue
        merged = _joined(left, right)
        del alive[right.low], ending[left.high]
        alive[merged.low] = ending[merged.high] = merged
        if merged.low in ending:
            push(ending[merged.low], merged)
        if merged.high in alive:
            push(merged, alive[merged.high])
    return sorted(alive.values(), key=lambda part: part.low)


def merge_gain(stage_s: Floats, left: Part, right: Part) -> float:
    """Return by how much both together are done sooner than the slower of them; may be negative."""
    return max(_seconds(stage_s, left), _seconds(stage_s, right)) - _seconds(
        stage_s, _joined(left, right)
    )


def _joined(left: Part, right: Part) -> Part:
    return Part(low=left.low, high=right.high, num_replicas=left.num_replicas + right.num_replicas)


def _seconds(stage_s: Floats, part: Part) -> float:
    return float(stage_s[part.low, part.high, part.num_replicas - 1])


def _slowest(stage_s: Floats, parts: list[Part]) -> float:
    return max(_seconds(stage_s, part) for part in parts)


def _one_replica_each(alone_s: Floats, num_replicas: int) -> list[Part]:
    """Return at most so many ranges whose slowest takes the least time on one replica."""
    num_cuts = len(alone_s)
    least = np.full(num_cuts, np.inf)
    least[0] = 0.0
    befores: list[Ints] = []
    for _ in range(min(num_replicas, num_cuts - 1)):
        slowest = np.maximum(least[:, None], alone_s)
        # a range is not empty, but for stages that are not needed
        slowest[np.tri(num_cuts, dtype=bool)] = np.inf
        slowest[np.diag_indices(num_cuts)] = least
        befores.append(slowest.argmin(axis=0))
        least = slowest.min(axis=0)
    return list(_ranges(befores, num_cuts - 1))[::-1]


def _ranges(befores: list[Ints], high: int) -> Iterator[Part]:
    for before in reversed(befores):
        low = int(before[high])
        if low < high:
            yield Part(low=low, high=high, num_replicas=1)
        high = low


def _without_idle(stage_s: Floats, parts: list[Part], num_replicas: int) -> list[Part]:
    """Give each replica that is left to the stage that is then the slowest."""
    counts = [part.num_replicas for part in parts]
    heap = [(-_seconds(stage_s, part), i) for i, part in enumerate(parts)]
    heapq.heapify(heap)
    for _ in range(num_replicas - sum(counts)):
        i = heap[0][1]
        counts[i] += 1
        seconds = float(stage_s[parts[i].low, parts[i].high, counts[i] - 1])
        heapq.heapreplace(heap, (-seconds, i))
    return [
        Part(low=part.low, high=part.high, num_replicas=count)
        for part, count in zip(parts, counts, strict=True)
    ]
