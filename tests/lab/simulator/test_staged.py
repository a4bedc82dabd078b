"""Simulated pools with stages: who runs which row, and what steps of unlike lengths cost."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch_lab.simulator.engine import alone_seconds
from raybatch_lab.simulator.links import LinkSpec
from raybatch_lab.simulator.rows import SimulatedRows
from raybatch_lab.simulator.staged import StagedPool, StagedSpec
from raybatch_lab.stages.heterogeneity import MixCurve, MixPoint
from raybatch_lab.stages.plan import Stage, StagePlan
from raybatch_lab.stages.quality import StepQuality
from tests.lab.simulator.pools import engine_spec, fixed_rows, run_pool
from tests.tiers import examples

CURVE = MixCurve(points=(MixPoint(variation=0.0, factor=1.0), MixPoint(variation=1.0, factor=3.0)))
QUALITY = StepQuality(
    step_s=0.01, row_s=0.001, prompt_token_s=0.0, prompt_pair_s=0.0, context_s=1e-4
)
lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=40)
inner = st.lists(st.integers(1, 139), max_size=3, unique=True).map(sorted)


def plan_of(*bounds, counts=None):
    """Return stages with these bounds between them, of one replica each by default."""
    edges = [0, *bounds, 1 << 20]
    counts = counts or [1] * (len(edges) - 1)
    return StagePlan(
        stages=tuple(
            Stage(above=low, up_to=high, num_replicas=count)
            for (low, high), count in zip(pairwise(edges), counts, strict=True)
        ),
        seconds=0.0,
    )


def run(rows, plan, *, spec=None, **staged):
    pool = StagedPool(rows, spec or engine_spec(), StagedSpec(plan=plan, **staged))
    return pool.run(), pool


def generated(pool):
    return [member.engine.num_generated for member in pool.members]


@given(lengths, inner, st.sampled_from([1, 2]), st.integers(1, 5), st.booleans())
@settings(max_examples=examples(60, full=2000), deadline=None)
def test_every_row_ends_once_with_all_its_tokens(pairs, bounds, each, standing, refines):
    prompt, output = map(np.array, zip(*pairs, strict=True))
    outcome, pool = run(
        SimulatedRows.of(prompt, output),
        plan_of(*bounds, counts=[each] * (len(bounds) + 1)),
        spec=engine_spec(kv_tokens=20 * 16, context_s=1e-4),
        look_every_s=0.02,
        max_standing=standing,
        refine_every_s=0.1 if refines else None,
        quality=QUALITY,
    )
    assert not np.isnan(outcome.ended_s).any()
    assert sum(member.num_finished for member in pool.members) == len(pairs)
    # a row that is preempted is computed again, and no token of it is generated twice
    assert sum(generated(pool)) == output.sum()


def test_one_stage_takes_what_a_pool_takes():
    rows = fixed_rows(800)
    outcome, _ = run(rows, plan_of(counts=[2]), is_sorted=False, levels=False)
    assert outcome.completion_s == pytest.approx(run_pool(rows, 2).completion_s, rel=0.02)


def test_a_row_begins_in_the_stage_of_its_prompt():
    rows = SimulatedRows.of(np.array([8, 100]), np.array([4, 7]))
    _, pool = run(rows, plan_of(50))
    assert generated(pool) == [4, 7]


def test_a_row_that_outgrows_its_stage_goes_on_in_the_next():
    rows = fixed_rows(4, prompt=8, output=200)
    outcome, pool = run(rows, plan_of(58), look_every_s=0.05)
    assert outcome.num_handed_over == 4
    first, second = generated(pool)
    # 51 tokens each, and those that came before somebody looked
    assert 4 * 51 <= first < 4 * 80
    assert first + second == 800
    assert pool.members[1].engine.stats().num_recomputed_tokens == 0


def test_rows_may_begin_where_they_will_end_and_stay():
    rows = fixed_rows(4, prompt=8, output=200).with_oracle()
    outcome, pool = run(rows, plan_of(58), by_final_len=True)
    assert (outcome.num_handed_over, generated(pool)) == (0, [0, 800])


def test_a_replica_whose_range_is_empty_takes_rows_of_another():
    rows = fixed_rows(200, prompt=8, output=100).with_oracle()
    _, pool = run(rows, plan_of(58), by_final_len=True)
    assert min(generated(pool)) > 0.3 * max(generated(pool))


def test_a_row_stays_where_the_next_stage_has_no_room():
    rows = fixed_rows(4, prompt=8, output=200)
    outcome, pool = run(rows, plan_of(58), max_standing=0)
    assert (outcome.num_handed_over, generated(pool)) == (0, [800, 0])


def test_a_replica_with_a_quarter_more_than_its_stage_gives_a_row_away():
    rows = SimulatedRows.of(np.array([600, 90, 90, 90, 90]), np.full(5, 300)).with_oracle()
    levelled, kept = (run(rows, plan_of(counts=[2]), levels=levels)[0] for levels in (True, False))
    assert levelled.num_handed_over > 0
    assert kept.num_handed_over == 0


def test_rows_of_a_stage_are_dealt_by_their_work():
    rows = SimulatedRows.of(np.full(4, 8), np.array([300, 100, 100, 100])).with_oracle()
    _, pool = run(rows, plan_of(counts=[2]), levels=False)
    assert sorted(generated(pool)) == [300, 300]


def test_rows_run_from_their_arrival_on():
    arrivals_s = np.array([0.0, 5.0, 9.0])
    outcome, _ = run(fixed_rows(3), plan_of(), arrivals_s=arrivals_s, is_sorted=False)
    took_s = outcome.ended_s - arrivals_s
    np.testing.assert_allclose(took_s, alone_seconds(fixed_rows(1), engine_spec()), atol=0.01)


def test_a_slow_link_delays_a_row_by_its_kv():
    rows, spec = fixed_rows(1, prompt=8, output=200), replace(engine_spec(), kv_bytes_per_token=1.0)
    link = LinkSpec(bytes_per_s=100.0)
    slow, quick = (
        generated(run(rows, plan_of(58), spec=spec, look_every_s=0.02, network=network)[1])
        for network in (link, LinkSpec())
    )
    # it decodes while it is copied: about 60 tokens at 100 a second, 11 ms a step
    assert slow[0] - quick[0] == pytest.approx(0.6 / 0.011, rel=0.1)


def test_bounds_follow_what_runs():
    rows = fixed_rows(16, prompt=8, output=400)
    outcome, _ = run(
        rows,
        plan_of(200),
        spec=engine_spec(max_num_seqs=16, context_s=1e-4),
        refine_every_s=0.5,
        quality=QUALITY,
    )
    assert outcome.bounds[0] != 200


def test_bounds_are_refined_by_a_quality_model_alone():
    with pytest.raises(ConfigError, match="quality"):
        StagedSpec(plan=plan_of(), refine_every_s=1.0)


def test_a_row_that_no_engine_holds_is_refused():
    with pytest.raises(ConfigError, match=r"may have 108 tokens, .* holds 64"):
        run(fixed_rows(1, output=100), plan_of(), spec=engine_spec(kv_tokens=64))


def test_attention_of_unlike_lengths_costs_more():
    alike = SimulatedRows.of(np.array([50, 50]), np.array([4, 4]))
    unlike = SimulatedRows.of(np.array([25, 75]), np.array([4, 4]))
    flat, mixed = (replace(engine_spec(context_s=1.0), curve=c) for c in (flat_curve(), CURVE))
    assert alone_seconds(alike, mixed) == pytest.approx(alone_seconds(alike, flat))
    # lengths that are 25 from their mean, in each of three steps
    more_s = sum(2 * 25 / mean * 2 * mean for mean in (51, 52, 53))
    found_s = alone_seconds(unlike, mixed) - alone_seconds(unlike, flat)
    assert found_s == pytest.approx(more_s)


def flat_curve():
    return MixCurve(points=(MixPoint(variation=0.0, factor=1.0),))
