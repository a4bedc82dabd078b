"""Layouts of replicas by length: CascadeInfer's, raybatch's, and shards that rows never leave.

Costs of H100 engines are computed from the data sheet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.heterogeneity import FLAT, MixCurve, MixPoint
from raybatch_lab.stages.lengths import RangeWork, RowLengths
from raybatch_lab.stages.plan import Stage, StagePlan, length_cuts, plan_exactly
from raybatch_lab.stages.quality import StepQuality
from raybatch_lab.stages.replica_seconds import MoveCosts, StagePool, batch_rows, work_seconds

# Llama-3.2-3B in bfloat16 on an H100, computed: 6.4 GB of weights, 112 KiB of KV a token at
# 3 TB/s, prompts at 500 TFLOP/s, 0.5 ms of a step on the host; NVLink
H100 = StepQuality(
    step_s=2.6e-3, row_s=2e-6, prompt_token_s=1.3e-5, prompt_pair_s=6e-10, context_s=3.8e-8
)
H100_LIMITS = EngineLimits(
    kv_tokens=550_000, max_num_seqs=512, block_size=16, max_batched_tokens=8192
)
H100_MOVES = MoveCosts(kv_bytes_per_token=114_688, bytes_per_s=50e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A named plan of stages; `str` gives its printed form."""

    name: str
    plan: StagePlan
    moves: bool = True

    def __str__(self) -> str:
        stages = self.plan.stages
        parts = [f"{stage.num_replicas}:<={stage.up_to}" for stage in stages[:-1]]
        return " ".join([*parts, f"{stages[-1].num_replicas}:rest"])


def curve_of(factor: float) -> MixCurve:
    if factor == 1:
        return FLAT
    return MixCurve(
        points=(MixPoint(variation=0.0, factor=1.0), MixPoint(variation=1.0, factor=factor))
    )


def pool_of(curve: MixCurve, num_replicas: int) -> StagePool:
    return StagePool(
        num_replicas=num_replicas, quality=H100, curve=curve, limits=H100_LIMITS, moves=H100_MOVES
    )


def of_bounds(bounds: Sequence[int], counts: Sequence[int]) -> StagePlan:
    """Return stages with these bounds (the first is 0) and numbers of replicas."""
    pairs = zip(pairwise(bounds), counts, strict=True)
    stages = [Stage(above=low, up_to=high, num_replicas=n) for (low, high), n in pairs]
    return StagePlan(stages=tuple(stages), seconds=0.0)


def equal_work(pool: StagePool, lengths: RowLengths, counts: Sequence[int]) -> StagePlan:
    """Return stages with work in proportion to their replicas, if lengths cost nothing extra."""
    ends = np.arange(1, lengths.longest + 1)
    work = RangeWork.of_sums(lengths.below(ends))
    seconds = work_seconds(replace(pool, curve=FLAT), work, len(lengths), pool.num_replicas)
    shares = np.cumsum(counts)[:-1] / sum(counts)
    inner = ends[np.searchsorted(seconds, shares * seconds[-1])]
    # each range has at least one length
    for i in range(1, len(inner)):
        inner[i] = max(inner[i], inner[i - 1] + 1)
    return of_bounds([0, *inner.tolist(), max(lengths.longest, int(inner.max()) + 1)], counts)


def shards_of(lengths: RowLengths, num_replicas: int) -> StagePlan:
    """Return a range of final lengths for each replica, with equal work."""
    order = np.argsort(lengths.final_lens, kind="stable")
    prompts, finals = lengths.prompt_lens[order].astype(float), lengths.final_lens[order]
    outputs, segments = finals - prompts, (finals * (finals + 1.0) - prompts * (prompts + 1)) / 2
    # share of a step's fixed time that a token of a row with this context is charged
    share = np.maximum(1 / H100_LIMITS.max_num_seqs, finals / H100_LIMITS.kv_tokens)
    work_s = (
        (H100.row_s + H100.step_s * share) * outputs
        + H100.context_s * segments
        + H100.prompt_token_s * prompts
        + H100.prompt_pair_s * prompts**2 / 2
    )
    total_s = np.cumsum(work_s)
    places = np.searchsorted(total_s, np.arange(1, num_replicas) / num_replicas * total_s[-1])
    inner = finals[places]
    for i in range(1, len(inner)):
        inner[i] = max(inner[i], inner[i - 1] + 1)
    last = max(lengths.longest, int(inner.max(initial=0)) + 1)
    return of_bounds([0, *inner.tolist(), last], [1] * num_replicas)


def least_latency(pool: StagePool, lengths: RowLengths) -> StagePlan:
    """Return the stages of CascadeInfer's program (section 4.2) for the rows that run at once.

    A row counts in the stage where it ends, Q is the paper's equation 1, and a move is charged with
    its time on the link.
    """
    cuts, num_replicas = length_cuts(lengths.longest), pool.num_replicas
    whole = RangeWork.of_sums(lengths.below(lengths.longest))
    at_once = float(batch_rows(pool, whole, len(lengths), num_replicas)) * num_replicas
    quality_s = _qualities(lengths, cuts, at_once / len(lengths), num_replicas)
    moves_s = pool.moves.seconds(cuts, lengths.crossing(cuts)) * at_once / len(lengths)
    least = np.full((len(cuts), num_replicas + 1), np.inf)
    least[0, 0] = 0.0
    before: dict[tuple[int, int], tuple[int, int]] = {}
    for high in range(1, len(cuts)):
        for used in range(1, num_replicas + 1):
            for low in range(high):
                for count in range(1, used + 1):
                    found = least[low, used - count] + quality_s[low, high, count] + moves_s[low]
                    if found < least[high, used]:
                        least[high, used] = found
                        before[high, used] = low, count
    bounds, counts, high, left = [int(cuts[-1])], list[int](), len(cuts) - 1, num_replicas
    while high:
        high, count = before[high, left]
        left -= count
        bounds.insert(0, int(cuts[high]))
        counts.insert(0, count)
    return of_bounds(bounds, counts)


def _qualities(lengths: RowLengths, cuts: Ints, share: float, num_replicas: int) -> Floats:
    """Return Q of the rows that end between two cuts on e replicas, times e: [K, K, E + 1]."""
    finals = lengths.final_lens
    place = np.searchsorted(cuts, finals, side="left")
    prompts = lengths.prompt_lens.astype(float)
    sums = np.stack(
        [
            np.cumsum(np.bincount(place, weights, len(cuts)))
            for weights in (np.ones(len(finals)), prompts, prompts**2, finals.astype(float))
        ]
    )
    rows, prompt_sums, squares, totals = share * (sums[:, None, :] - sums[:, :, None])
    counts = np.maximum(1, np.arange(num_replicas + 1))
    each = rows[..., None] / counts
    per_row = (
        H100.step_s
        + H100.row_s * each
        + H100.prompt_token_s * prompt_sums[..., None] / counts
        + H100.prompt_pair_s * squares[..., None] / counts
        + H100.context_s * totals[..., None] / counts
    )
    return np.asarray(counts * each * per_row, float)


def layouts_of(pool: StagePool, lengths: RowLengths) -> list[Layout]:
    """Return the layouts to run for rows of these lengths."""
    n = pool.num_replicas
    none = of_bounds([0, lengths.longest], [n])
    layouts = [Layout(name="none", plan=none, moves=False)]
    layouts.append(Layout(name="shards", plan=shards_of(lengths, n), moves=False))
    if n > 4 and n % 4 == 0:
        plan = equal_work(pool, lengths, [n // 4] * 4)
        layouts.append(Layout(name=f"4 x {n // 4}", plan=plan))
    layouts.append(Layout(name="chain", plan=equal_work(pool, lengths, [1] * n)))
    layouts.append(Layout(name="latency", plan=least_latency(pool, lengths)))
    layouts.append(Layout(name="makespan", plan=plan_exactly(pool, lengths)))
    return layouts
