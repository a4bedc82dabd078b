"""What each term of the cost model is there for: a run that it changes, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.policy.cost.cost_model import EngineLimits, prompt_pairs
from raybatch.policy.cost.estimate import core_share_of, estimate
from raybatch.policy.cost.step_forecast import StepSimulation
from raybatch.policy.cost.work import work_totals
from tests.policy.scheduler_run import run_scheduler
from tests.policy.test_estimate import MODEL

AMPLE = EngineLimits(kv_tokens=10**6, max_num_seqs=8, block_size=16, max_batched_tokens=1000)


def seconds(work, limits, *, core_share=1.0, **costs):
    model = replace(MODEL, limits=limits, **({"step_s": 0.0} | costs))
    return estimate(model, work, core_share=core_share).engine_s


def test_preemption_computes_tokens_again_and_takes_more_steps():
    # four rows of 20 + 40 tokens in memory for 112 tokens
    work, tight = work_totals(np.full(4, 20), np.full(4, 40)), replace(AMPLE, kv_tokens=112)
    real = run_scheduler([20] * 4, [40] * 4, tight)
    assert real.num_preemptions > 0
    computed = 4 * 20 + 4 * 39
    assert pytest.approx(computed) == seconds(work, AMPLE, token_s=(1.0,))
    again = seconds(work, tight, token_s=(1.0,)) - computed
    assert pytest.approx(real.recomputed_tokens) == again
    assert pytest.approx(40) == seconds(work, AMPLE, step_s=1.0)
    assert pytest.approx(len(real.decode_rows)) == seconds(work, tight, step_s=1.0)


def test_rounding_to_blocks_lets_fewer_rows_run():
    # 17 tokens take two blocks of 16: memory for 64 tokens holds two rows, and three by tokens
    work, tight = work_totals(np.full(6, 15), np.full(6, 3)), replace(AMPLE, kv_tokens=64)
    assert pytest.approx(3 * 3) == seconds(work, tight, step_s=1.0)
    assert pytest.approx(2 * 3) == seconds(work, replace(tight, block_size=1), step_s=1.0)


def test_a_mix_of_prompts_attends_to_more_than_prompts_of_their_mean():
    mixed, equal = np.array([10, 10, 10, 370]), np.full(4, 100)
    pairs = [seconds(work_totals(p, np.ones(4)), AMPLE, pair_s=1.0) for p in (mixed, equal)]
    assert [3 * 55 + 370 * 371 / 2, 4 * 5050] == pytest.approx(pairs)


def test_cached_prompts_are_attended_to_and_not_computed():
    cached = {"cached_tokens": np.array([0, 96, 96, 96])}
    work = work_totals(np.full(4, 112), np.ones(4), **cached)
    assert pytest.approx(112 + 3 * 16) == seconds(work, AMPLE, token_s=(1.0,))
    own = prompt_pairs(np.array([112, 16, 16, 16]))["pairs"]
    assert pytest.approx(own) == seconds(work, AMPLE, pair_s=1.0)
    assert pytest.approx(3 * 16 * 96) == seconds(work, AMPLE, past_pair_s=1.0)


def test_shared_prefixes_take_memory_from_the_rows_of_their_group():
    """Six blocks of ten hold the prefix; in the other four, two rows run and not four."""
    limits = replace(AMPLE, kv_tokens=160)
    shared = {"shared_tokens": np.full(8, 96), "num_members": np.full(8, 8)}
    cached = np.where(np.arange(8), 96, 0)
    work = work_totals(np.full(8, 112), np.full(8, 10), cached_tokens=cached, **shared)
    groups = {"prefixes": [96] * 8, "groups": [0] * 8}
    real = run_scheduler([112] * 8, [10] * 8, limits, **groups)
    simulation = StepSimulation([112] * 8, [10] * 8, limits, **groups)
    simulation.run()
    assert real.decode_rows == simulation.decode_rows
    assert 2 == max(real.decode_rows)
    assert pytest.approx(len(real.decode_rows)) == seconds(work, limits, step_s=1.0)


@pytest.mark.parametrize(
    ("cores", "engines", "threads", "share"),
    [(2, 1, 1, 1.0), (2, 2, 1, 1.0), (2, 4, 1, 0.5), (8, 4, 3, 2 / 3), (8, 0, 1, 1.0)],
)
def test_engines_contend_for_cores_where_there_are_more_threads(cores, engines, threads, share):
    assert pytest.approx(share) == core_share_of(cores, engines, threads)


def test_half_a_core_takes_twice_the_time():
    work, costs = work_totals(np.full(4, 20), np.full(4, 40)), {"step_s": 1.0, "token_s": (0.1,)}
    alone, half = (seconds(work, AMPLE, core_share=share, **costs) for share in (1.0, 0.5))
    assert pytest.approx(2 * alone) == half
