"""Seconds that replicas take for rows within a range of lengths, and for moves into it and out."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.heterogeneity import MixCurve
from raybatch_lab.stages.lengths import RangeWork, RowLengths
from raybatch_lab.stages.quality import StepQuality


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCosts:
    """The cost of moving a sequence with its KV.

    Args:
        bytes_per_s: bandwidth of one replica's link.
        weight: share of the seconds of a copy that a replica loses; 0 if it computes meanwhile, 1
            if it waits.
    """

    kv_bytes_per_token: float
    bytes_per_s: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.kv_bytes_per_token < 0 or self.weight < 0:
            raise ConfigError(
                f"MoveCosts needs bytes_per_s above 0, and kv_bytes_per_token and weight of at "
                f"least 0, got {self.bytes_per_s}, {self.kv_bytes_per_token} and {self.weight}"
            )

    def seconds(self, bounds: npt.ArrayLike, num_rows: npt.ArrayLike) -> Floats:
        """Return the seconds that a replica loses by moving `num_rows` rows of length `bounds`."""
        moved_bytes = self.kv_bytes_per_token * np.asarray(bounds, float) * np.asarray(num_rows)
        return np.asarray(self.weight * moved_bytes / self.bytes_per_s, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePool:
    """A pool of equal replicas: the costs of their steps and moves, and their batch limits."""

    num_replicas: int
    quality: StepQuality
    curve: MixCurve
    limits: EngineLimits
    moves: MoveCosts

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"a pool has {self.num_replicas} replicas; it must have at least 1")


def work_seconds(
    pool: StagePool,
    work: RangeWork,
    rows: npt.ArrayLike,
    num_replicas: npt.ArrayLike,
    factor: npt.ArrayLike | None = None,
) -> Floats:
    """Return the seconds that `num_replicas` replicas take for the work, each with an even part.

    Args:
        rows: number of rows that do the work, over all replicas; broadcast with `work`.
        num_replicas: at least 1; broadcast with `work`.
        factor: factor on the time of attention; by default that of rows at random progress.
    """
    costs = pool.quality
    factor = pool.curve.at(work.variation) if factor is None else factor
    busy_s = (
        costs.row_s * work.tokens
        + costs.context_s * np.asarray(factor) * work.contexts
        + costs.prompt_token_s * work.prompt_tokens
        + costs.prompt_pair_s * work.prompt_pairs
        + costs.step_s * work.tokens / batch_rows(pool, work, rows, num_replicas)
    )
    return np.asarray(busy_s / np.asarray(num_replicas), float)


def batch_rows(
    pool: StagePool, work: RangeWork, rows: npt.ArrayLike, num_replicas: npt.ArrayLike
) -> Floats:
    """Return the rows in a replica's batch, at least 1: limited by slots, KV memory and `rows`."""
    held = pool.limits.kv_tokens / np.maximum(work.mean_len, 1.0)
    there = np.asarray(rows, float) / np.asarray(num_replicas, float)
    most = np.minimum(float(pool.limits.max_num_seqs), there)
    return np.asarray(np.maximum(1.0, np.minimum(most, held)), float)


def stage_seconds(
    pool: StagePool, lengths: RowLengths, low: Ints, high: Ints, num_replicas: Ints
) -> Floats:
    """Return the seconds of a stage for lengths in (low, high], including moves into and out of it.

    A move occupies the links of both replicas. `low`, `high` and `num_replicas` are broadcast
    together, for many stages at once; O(log N) for each stage and N rows.
    """
    low, high = np.asarray(low), np.asarray(high)
    work = RangeWork.of_sums(lengths.below(high) - lengths.below(low))
    arrived, left = lengths.crossing(low), lengths.crossing(high)
    moves_s = pool.moves.seconds(low, arrived) + pool.moves.seconds(high, left)
    own_s = work_seconds(pool, work, work.starts + arrived, num_replicas)
    return np.asarray(own_s + moves_s / num_replicas, float)


def iteration_seconds(
    pool: StagePool, lengths: RowLengths, low: int, high: int, num_replicas: int
) -> float:
    """Return the seconds per decode step of a stage; 0 if no tokens are decoded in its range."""
    work = RangeWork.of_sums(lengths.below(high) - lengths.below(low))
    if work.tokens <= 0:
        return 0.0
    rows = work.starts + lengths.crossing(low)
    batch = batch_rows(pool, work, rows, num_replicas)
    total_s = work_seconds(pool, work, rows, num_replicas)
    return float(total_s * num_replicas * batch / work.tokens)
