"""Stages, and the exact program beside all plans there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.plan import (
    Stage,
    StagePlan,
    _even_cuts,
    length_cuts,
    plan_exactly,
    plan_stages,
)
from raybatch_lab.stages.replica_seconds import stage_seconds
from tests.lab.stages.pools import pool, uniform
from tests.tiers import examples


def seconds_of(given_pool, lengths, bounds, counts):
    low, high = np.array(bounds[:-1]), np.array(bounds[1:])
    return float(stage_seconds(given_pool, lengths, low, high, np.array(counts)).max())


def best_by_enumeration(given_pool, lengths, cuts):
    """Return the least seconds over all bounds and numbers of replicas."""
    found = []
    for num_stages in range(1, given_pool.num_replicas + 1):
        for inner in itertools.combinations(cuts[1:-1].tolist(), num_stages - 1):
            for counts in itertools.product(
                range(1, given_pool.num_replicas + 1), repeat=num_stages
            ):
                if sum(counts) == given_pool.num_replicas:
                    bounds = [0, *inner, cuts[-1]]
                    found.append(seconds_of(given_pool, lengths, bounds, counts))
    return min(found)


@given(
    seed=st.integers(0, 1000),
    num_replicas=st.integers(1, 5),
    factor=st.sampled_from([1.0, 2.0, 6.0, 30.0]),
    outputs=st.sampled_from([2, 8, 24]),
    fast=st.booleans(),
)
@settings(max_examples=examples(60, full=1000))
def test_no_plan_is_better(seed, num_replicas, factor, outputs, fast):
    # six buckets
    lengths = uniform(60, (1, 9), (1, outputs), seed)
    given_pool = pool(num_replicas, factor, places=4, bytes_per_s=1e12 if fast else 1e6)
    plan = plan_exactly(given_pool, lengths)
    cuts = length_cuts(lengths.longest)
    assert plan.seconds == pytest.approx(best_by_enumeration(given_pool, lengths, cuts))
    bounds = [0, *plan.bounds, plan.stages[-1].up_to]
    counts = [stage.num_replicas for stage in plan.stages]
    assert sum(counts) == num_replicas
    assert seconds_of(given_pool, lengths, bounds, counts) == pytest.approx(plan.seconds)


def test_plans_have_several_stages_where_unlike_lengths_cost_much():
    plan = plan_exactly(pool(5, 30.0, bytes_per_s=1e12), uniform(400, (1, 9), (1, 200)))
    assert len(plan.stages) > 1


def test_one_stage_is_left_where_moves_cost_much():
    plan = plan_exactly(pool(5, 30.0, bytes_per_s=1.0), uniform(400, (1, 9), (1, 200)))
    assert [5] == [stage.num_replicas for stage in plan.stages]


def test_the_weight_of_moves_decides():
    lengths = uniform(400, (1, 9), (1, 200))
    costs = [
        plan_exactly(pool(5, 30.0, bytes_per_s=1e5, weight=weight), lengths)
        for weight in (0.0, 1e6)
    ]
    assert len(costs[0].stages) > len(costs[1].stages) == 1


@given(seed=st.integers(0, 1000), factor=st.floats(1.0, 30.0), num_replicas=st.integers(1, 12))
@settings(max_examples=examples(30, full=500))
def test_a_plan_is_never_worse_than_no_stages(seed, factor, num_replicas):
    lengths = uniform(100, (1, 50), (1, 300), seed)
    given_pool = pool(num_replicas, factor)
    top = int(length_cuts(lengths.longest)[-1])
    whole_s = seconds_of(given_pool, lengths, [0, top], [num_replicas])
    assert plan_exactly(given_pool, lengths).seconds <= whole_s


def test_cuts_at_every_length_gain_nothing_where_all_tokens_are_at_powers_of_two(rng):
    finals = 2 ** rng.integers(2, 7, 200)
    lengths = RowLengths(finals - 1, np.ones_like(finals))
    given_pool = pool(4, 30.0, places=8)
    everywhere = plan_exactly(given_pool, lengths, np.arange(lengths.longest + 1))
    plan = plan_exactly(given_pool, lengths)
    assert len(plan.stages) > 1
    assert plan.seconds == pytest.approx(everywhere.seconds)


def test_cuts_are_powers_of_two_up_to_the_longest_row():
    assert [0, 1, 2, 4, 8] == length_cuts(8).tolist()
    assert [0, 1, 2, 4, 8, 16] == length_cuts(9).tolist()


def test_replicas_are_numbered_through_the_stages():
    first = Stage(above=0, up_to=8, num_replicas=2)
    plan = StagePlan(stages=(first, Stage(above=8, up_to=32, num_replicas=1)), seconds=1.0)
    assert [0, 0, 1] == plan.stage_of_replica.tolist()
    assert (8,) == plan.bounds


@pytest.mark.parametrize(
    "stages",
    [((0, 8, 1), (9, 16, 1)), ((0, 8, 1), (8, 8, 1)), ((0, 8, 0),)],
    ids=["gap", "empty", "no-replica"],
)
def test_stages_that_make_no_sense_are_refused(stages):
    made = tuple(Stage(above=a, up_to=b, num_replicas=n) for a, b, n in stages)
    with pytest.raises(ConfigError):
        StagePlan(stages=made, seconds=1.0)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_plan_of_so_many_stages_is_the_best_of_all(num_stages):
    of, lengths = pool(4, 1.5), uniform(60, (1, 200), (1, 100))
    plan = plan_stages(of, lengths, num_stages)
    cuts = [stage.above for stage in plan.stages] + [plan.stages[-1].up_to]
    counts = [stage.num_replicas for stage in plan.stages]
    assert (len(counts), sum(counts)) == (num_stages, 4)
    assert cuts[-1] >= lengths.longest
    inner = _even_cuts(lengths, num_stages)[1:-1].tolist()
    slowest = [
        max(
            float(stage_seconds(of, lengths, low, high, number))
            for low, high, number in zip([0, *between], [*between, cuts[-1]], numbers, strict=True)
        )
        for between in itertools.combinations(inner, num_stages - 1)
        for numbers in itertools.product(range(1, 5), repeat=num_stages)
        if sum(numbers) == 4
    ]
    assert plan.seconds == pytest.approx(min(slowest))


def test_rows_of_one_length_still_have_as_many_stages():
    lengths = RowLengths(np.full(5, 1), np.full(5, 1))
    plan = plan_stages(pool(3), lengths, 3)
    assert (3, 3) == (len(plan.stages), sum(stage.num_replicas for stage in plan.stages))
