"""What `pool.stages` asks, and what a pool makes of it: numbers either way."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch_lab.stages.decision import (
    decide_auto,
    decide_number,
    forecast_saved,
    rebalanced_saved,
)
from raybatch_lab.stages.heterogeneity import FLAT
from raybatch_lab.stages.lengths import RowLengths
from tests.lab.stages.pools import QUALITY, curve_to, pool, uniform

# all run at once, so that sorting them changes nothing
MIXED = uniform(8 * 32, (1, 4000), (50, 100))


def pool_of(factor, quality=QUALITY):
    return pool(8, factor, bytes_per_s=1e12, quality=quality)


def auto(factor, quality=QUALITY, lengths=MIXED):
    return decide_auto(pool_of(factor), lengths, quality, "measured here")


@pytest.mark.parametrize("quality", [None, QUALITY])
def test_a_curve_that_is_nearly_flat_says_no_before_any_step_is_seen(quality):
    decision = auto(1.02, quality)
    assert decision.plan is None
    assert "costs 1.01 times" in decision.text
    assert "(measured here)" in decision.text
    assert "saves 1.1% at most" in decision.text


def test_a_steep_curve_waits_for_steps_and_then_takes_stages():
    assert auto(8.0, None) is None
    decision = auto(8.0)
    assert len(decision.plan.stages) > 1
    assert forecast_saved(pool_of(8.0), MIXED, decision.plan) >= 0.05
    assert f"{len(decision.plan.stages)} stages save" in decision.text
    assert "costs 4.97 times" in decision.text


def test_a_steep_curve_takes_none_where_attention_is_a_small_part_of_a_step():
    decision = auto(8.0, replace(QUALITY, step_s=10.0))
    assert decision.plan is None
    assert decision.text.startswith("no stages: batches of one length would save 2.5% at most")


def test_rows_of_one_length_take_none():
    decision = auto(8.0, lengths=RowLengths(np.full(100, 1000), np.full(100, 2)))
    assert decision.plan is None


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("quality", [None, QUALITY])
def test_a_number_forces_as_many_stages_and_says_what_they_save(num_stages, quality):
    decision = decide_number(pool(8, 1.0), MIXED, quality, num_stages)
    assert len(decision.plan.stages) == num_stages
    assert sum(stage.num_replicas for stage in decision.plan.stages) == 8
    assert decision.plan.stages[-1].up_to >= MIXED.longest
    assert "% over sorted rows where engines help each other" in decision.text


def test_stages_that_save_nothing_are_told_to_cost():
    flat = replace(pool(2), curve=FLAT)
    assert forecast_saved(flat, MIXED, decide_number(flat, MIXED, QUALITY, 2).plan) < 0


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_engines_that_help_each_other_save_no_less(factor):
    plan = decide_number(pool_of(factor), MIXED, QUALITY, 3).plan
    helped = rebalanced_saved(pool_of(factor), MIXED, plan)
    assert forecast_saved(pool_of(factor), MIXED, plan) <= helped
    assert (helped > 0) == (factor > 1)


def test_more_stages_than_replicas_are_refused():
    with pytest.raises(ConfigError, match="cannot plan 3 stages for 2 replicas"):
        decide_number(pool(2), MIXED, QUALITY, 3)


def test_a_curve_beyond_its_points_is_read_at_the_last_one():
    assert (
        "costs 1.50 times"
        in decide_auto(replace(pool(4), curve=curve_to(1.5, at=0.01)), MIXED, QUALITY, "here").text
    )
