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
    """What it takes to move a sequence with its KV.

    Args:
        bytes_per_s: of one replica's link.
        weight: the share of a move's seconds in which a replica computes less; 0 if moves are
            hidden entirely, 1 if both ends wait.
    """

    kv_bytes_per_token: float
    bytes_per_s: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.kv_bytes_per_token < 0 or self.weight < 0:
            raise ConfigError(
                f"moves of {self.kv_bytes_per_token} bytes a token at {self.bytes_per_s} bytes/s, "
                f"weight {self.weight}; bytes/s must be above 0, the others at least 0"
            )

    def seconds(self, bounds: npt.ArrayLike, num_rows: npt.ArrayLike) -> Floats:
        """Return the weighted seconds of moving so many rows at lengths of `bounds`."""
        moved_bytes = self.kv_bytes_per_token * np.asarray(bounds, float) * np.asarray(num_rows)
        return np.asarray(self.weight * moved_bytes / self.bytes_per_s, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePool:
    """Equal replicas, what their steps cost, and what bounds their batches."""

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
    """Return the seconds in which so many replicas, each with an even part, do the work.

    Args:
        rows: that do it, of all replicas together; broadcast with the arrays of `work`.
        num_replicas: at least 1; broadcast as well.
        factor: of the time of attention; by default that of rows at any progress.
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
    """Return the rows of a batch: as many as limits and KV hold, and no more than there are."""
    held = pool.limits.kv_tokens / np.maximum(work.mean_len, 1.0)
    there = np.asarray(rows, float) / np.asarray(num_replicas, float)
    most = np.minimum(float(pool.limits.max_num_seqs), there)
    return np.asarray(np.maximum(1.0, np.minimum(most, held)), float)


def stage_seconds(
    pool: StagePool, lengths: RowLengths, low: Ints, high: Ints, num_replicas: Ints
) -> Floats:
    """Return the seconds of stages for lengths in (low, high], moves at both ends included.

    A move takes the links of both sides. The three arrays are broadcast; what one stage is asked
    costs O(log N).
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
    """Return the seconds between two tokens of a row in a stage; 0 where none is made."""
    work = RangeWork.of_sums(lengths.below(high) - lengths.below(low))
    if work.tokens <= 0:
        return 0.0
    rows = work.starts + lengths.crossing(low)
    batch = batch_rows(pool, work, rows, num_replicas)
    total_s = work_seconds(pool, work, rows, num_replicas)
    return float(total_s * num_replicas * batch / work.tokens)
