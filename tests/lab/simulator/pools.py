"""Cost models that are easy to add up, and pools of few rows."""

import numpy as np

from raybatch.policy.cost.cost_model import CostModel, EngineLimits
from raybatch_lab.simulator.engine import EngineSpec
from raybatch_lab.simulator.events import PoolSpec
from raybatch_lab.simulator.pool import SimulatedPool
from raybatch_lab.simulator.rows import SimulatedRows

MESSAGE_S = 0.001


def costs(*, step_s=0.01, token_s=0.001, context_s=0.0, **limits):
    """Return a cost model in which steps, tokens and context have a price, and nothing else."""
    limits = {"kv_tokens": 1 << 16, "max_num_seqs": 8, "block_size": 16} | limits
    return CostModel(
        step_s=step_s,
        knots=(),
        token_s=(token_s,),
        row_s=0.0,
        pair_s=0.0,
        past_pair_s=0.0,
        context_s=context_s,
        shared_pair_s=0.0,
        shared_read_s=0.0,
        fit_error=0.0,
        limits=EngineLimits(**({"max_batched_tokens": 256} | limits)),
    )


def engine_spec(**prices):
    return EngineSpec(cost=costs(**prices))


def fixed_rows(num_rows, *, prompt=8, output=20):
    return SimulatedRows.of(np.full(num_rows, prompt), np.full(num_rows, output))


def run_pool(rows, num_replicas, *, spec=None, **pool):
    pool = PoolSpec(num_replicas=num_replicas, **pool)
    return SimulatedPool(rows, spec or engine_spec(), pool).run()
