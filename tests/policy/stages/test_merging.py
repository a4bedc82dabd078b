"""The two-phase heuristic beside the exact program, and its heap beside a plain scan."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.policy.stages.merging import (
    Part,
    find_parts,
    merge_by_heap,
    merge_gain,
    plan_by_merging,
)
from raybatch.policy.stages.plan import length_cuts
from raybatch.policy.stages.program import plan_exactly
from raybatch.policy.stages.replica_seconds import stage_seconds
from tests.policy.stages.pools import pool, uniform
from tests.tiers import examples


def merge_by_scan(stage_s, parts):
    parts = list(parts)
    while len(parts) > 1:
        gains = [merge_gain(stage_s, *pair) for pair in itertools.pairwise(parts)]
        best = int(np.argmax(gains))
        if gains[best] <= 0:
            break
        left, right = parts[best : best + 2]
        count = left.num_replicas + right.num_replicas
        parts[best : best + 2] = [Part(low=left.low, high=right.high, num_replicas=count)]
    return parts


@given(seed=st.integers(0, 10**6), num_parts=st.integers(1, 9))
@settings(max_examples=examples(100, full=2000))
def test_the_heap_merges_what_a_scan_does(seed, num_parts):
    rng = np.random.default_rng(seed)
    # with ties
    stage_s = rng.integers(1, 40, (num_parts + 1, num_parts + 1, num_parts)).astype(float)
    parts = [Part(low=i, high=i + 1, num_replicas=1) for i in range(num_parts)]
    assert merge_by_scan(stage_s, parts) == merge_by_heap(stage_s, parts)


@given(seed=st.integers(0, 1000), num_replicas=st.integers(1, 40), factor=st.floats(1.0, 20.0))
@settings(max_examples=examples(40, full=500))
def test_a_plan_is_feasible_and_between_the_best_and_no_stages(seed, num_replicas, factor):
    lengths = uniform(200, (1, 50), (1, 600), seed)
    given_pool = pool(num_replicas, factor, bytes_per_s=1e7)
    plan = plan_by_merging(given_pool, lengths)
    counts = np.array([stage.num_replicas for stage in plan.stages])
    bounds = np.array([0, *plan.bounds, length_cuts(lengths.longest)[-1]])
    assert num_replicas == counts.sum()
    found_s = stage_seconds(given_pool, lengths, bounds[:-1], bounds[1:], counts).max()
    assert plan.seconds == pytest.approx(found_s)
    whole_s = float(stage_seconds(given_pool, lengths, 0, bounds[-1], num_replicas))
    best_s = plan_exactly(given_pool, lengths).seconds
    assert best_s * (1 - 1e-12) <= plan.seconds <= whole_s


def test_more_replicas_than_cuts_all_have_a_stage(record_property):
    lengths = uniform(5000, (1, 500), (1, 2000))
    given_pool = pool(96, 8.0, bytes_per_s=1e9)
    plan = plan_by_merging(given_pool, lengths)
    ratio = plan.seconds / plan_exactly(given_pool, lengths).seconds
    record_property("heuristic over exact", ratio)
    assert 96 == sum(stage.num_replicas for stage in plan.stages)
    assert 1.0 <= ratio < 1.25


def test_one_stage_is_taken_where_no_two_neighbours_gain_but_all_do():
    # one range takes 2 s, two on two replicas 3 s, all three on three 1 s, all else much longer
    stage_s = np.full((4, 4, 3), 9.0)
    for low, high in itertools.combinations(range(4), 2):
        num_ranges = high - low
        stage_s[low, high, num_ranges - 1] = (2.0, 3.0, 1.0)[num_ranges - 1]
    assert [Part(low=0, high=3, num_replicas=3)] == find_parts(stage_s)
