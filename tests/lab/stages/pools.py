"""Pools and rows that tests of stages share."""

import numpy as np

from raybatch.policy.cost.cost_model import EngineLimits
from raybatch_lab.stages.heterogeneity import MixCurve, MixPoint
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.quality import StepQuality
from raybatch_lab.stages.replica_seconds import MoveCosts, StagePool

QUALITY = StepQuality(
    step_s=1e-3, row_s=1e-5, prompt_token_s=1e-6, prompt_pair_s=0.0, context_s=1e-6
)


def curve_to(factor, at=1.0):
    """Return a curve that rises from 1 to a factor."""
    return MixCurve(
        points=(MixPoint(variation=0.0, factor=1.0), MixPoint(variation=at, factor=factor))
    )


def pool(num_replicas=4, factor=2.0, places=32, bytes_per_s=1e9, quality=QUALITY, weight=1.0):
    return StagePool(
        num_replicas=num_replicas,
        quality=quality,
        curve=curve_to(factor),
        limits=EngineLimits(kv_tokens=10**9, max_num_seqs=places, block_size=16),
        moves=MoveCosts(kv_bytes_per_token=100.0, bytes_per_s=bytes_per_s, weight=weight),
    )


def uniform(num_rows, prompts, outputs, seed=0):
    rng = np.random.default_rng(seed)
    return RowLengths(rng.integers(*prompts, num_rows), rng.integers(*outputs, num_rows))
