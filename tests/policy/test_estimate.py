"""Engine time and money of a plan."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import CostModel, EngineLimits
from raybatch.policy.cost.estimate import estimate, money
from raybatch.policy.cost.work import work_totals

MODEL = CostModel(
    step_s=1.0,
    knots=(),
    token_s=(0.0,),
    row_s=0.0,
    pair_s=0.0,
    past_pair_s=0.0,
    context_s=0.0,
    shared_pair_s=0.0,
    shared_read_s=0.0,
    fit_error=0.1,
    limits=EngineLimits(kv_tokens=10**6, max_num_seqs=4, block_size=16, max_batched_tokens=100),
)
WORK = work_totals(np.full(8, 10), np.full(8, 5))


def expected_s(**costs):
    return estimate(replace(MODEL, **({"step_s": 0.0} | costs)), WORK).engine_s


def test_steps_cost_their_fixed_time():
    # two waves of four rows, five steps each
    assert pytest.approx(10.0) == estimate(MODEL, WORK).engine_s


def test_steps_with_prompts_cost_more():
    # each wave computes its prompts in its first step
    assert pytest.approx(2.0) == expected_s(prompt_step_s=1.0)


def test_every_token_of_a_forward_batch_costs():
    assert pytest.approx(8 * 10 + 8 * 4) == expected_s(token_s=(1.0,))


def test_every_generated_token_costs_a_row():
    assert pytest.approx(8 * 5) == expected_s(row_s=1.0)


def test_attention_costs_its_pairs():
    assert pytest.approx(8 * 55) == expected_s(pair_s=1.0)


def test_a_decode_reads_its_context():
    assert pytest.approx(8 * (11 + 12 + 13 + 14)) == expected_s(context_s=1.0)


def test_shared_tokens_are_read_once_by_all_that_can_run_together():
    shared = work_totals(
        np.full(8, 110), np.full(8, 5), shared_tokens=np.full(8, 100), num_members=np.full(8, 8)
    )
    # eight members share the prefix, four run at once
    limits = replace(MODEL.limits, max_batched_tokens=None)
    model = replace(MODEL, step_s=0.0, shared_read_s=1.0, limits=limits)
    reads = estimate(model, shared).engine_s
    assert pytest.approx(8 * 4 * 100 / 4) == reads


def test_costs_add_up():
    costs = {"step_s": 1.0, "token_s": (0.5,), "row_s": 0.2, "pair_s": 0.01, "context_s": 0.01}
    alone = [expected_s(**{name: cost}) for name, cost in costs.items()]
    assert pytest.approx(sum(alone)) == expected_s(**costs)


def test_replicas_share_the_time_by_the_clock():
    cost = estimate(MODEL, WORK, num_replicas=2)
    assert (5.0, 10.0) == (cost.wall_s, cost.engine_s)


def test_more_replicas_than_rows_cost_no_more_work_than_there_is():
    cost = estimate(replace(MODEL, step_s=0.0, row_s=1.0), WORK, num_replicas=16)
    assert pytest.approx(5.0) == cost.wall_s
    assert pytest.approx(40.0) == cost.engine_s


def test_the_band_is_that_of_the_fit():
    seconds = estimate(MODEL, WORK)
    assert (8.0, 12.0) == (pytest.approx(seconds.low_s), pytest.approx(seconds.high_s))


def test_the_band_of_work_is_that_of_all_replicas():
    seconds = estimate(MODEL, WORK, num_replicas=2)
    assert (10.0, 8.0, 12.0) == pytest.approx(seconds.engine_range())


def test_a_perfect_fit_has_a_band_all_the_same():
    seconds = estimate(replace(MODEL, fit_error=0.0), WORK)
    assert seconds.low_s < 0.95 * seconds.wall_s


def test_money_is_for_the_time_that_engines_are_held():
    assert pytest.approx(2 * 5 / 3600 * 36.0) == money(5.0, 2, 36.0)


def test_a_run_is_estimated_by_what_it_really_did():
    model = replace(MODEL, step_s=0.0, row_s=1.0)
    done = WORK.actual(computed_tokens=80, generated_tokens=60)
    assert pytest.approx(60.0) == estimate(model, done).engine_s


@pytest.mark.parametrize(("rows", "replicas"), [(47, 2), (44, 3), (149, 5)])
def test_rows_of_one_token_can_be_shared_by_replicas(rows, replicas):
    cost = estimate(MODEL, work_totals(np.full(rows, 10), np.ones(rows)), replicas)
    assert cost.wall_s > 0


def test_a_negative_price_is_an_error():
    with pytest.raises(ConfigError, match="price_per_engine_hour"):
        money(5.0, 1, -1.0)
