"""What orders are forecast to compute, in numbers that can be checked by hand."""

import dataclasses

import numpy as np
import pytest

from raybatch.prefix.forecast import CacheLoad, CacheSize, forecast_orders, merge_forecasts
from tests.explanation.inputs import grouped_prompts, plan_prompts


def forecast(planned, *, num_blocks, concurrency=4, finds_blocks=True, **options):
    found = forecast_orders(
        planned.keys,
        planned.plan,
        planned.arrangement,
        output_tokens=planned.expected_tokens,
        size=CacheSize(num_blocks=num_blocks, concurrency=concurrency, finds_blocks=finds_blocks),
        **options,
    )
    assert [order.name for order in found] == ["input", "sorted", "planned", "bound"]
    return {order.name: order for order in found}


def test_a_plan_computes_each_prefix_once_where_the_cache_holds_a_single_one(rng):
    planned = plan_prompts(grouped_prompts(rng, groups=6, size=5, prefix=32, own=8), limit=4)
    found = forecast(planned, num_blocks=24)
    assert 6 * (32 + 5 * 8) == found["planned"].computed_tokens
    assert found["input"].computed_tokens > 2 * found["planned"].computed_tokens


def test_a_cache_that_holds_everything_makes_all_orders_equal(rng):
    found = forecast(plan_prompts(grouped_prompts(rng), limit=4), num_blocks=10_000)
    assert len({order.computed_tokens for order in found.values()}) == 1


def test_copies_cost_nothing_in_a_plan_alone(rng):
    prompts = grouped_prompts(rng, groups=1, size=3, prefix=32, own=7)
    found = forecast(plan_prompts([*prompts, prompts[0]], limit=4), num_blocks=10_000)
    # the copy computes what follows its last whole block
    assert 3 == found["sorted"].computed_tokens - found["planned"].computed_tokens
    assert found["planned"].prompt_tokens == found["input"].prompt_tokens == 4 * 39


def test_a_row_that_is_all_prefix_computes_its_last_block_again():
    # three rows share [1] * 8; the shortest has nothing else
    prompts = [[1] * 8, [1] * 8 + [2] * 4, [1] * 8 + [3] * 4]
    found = forecast(plan_prompts(prompts, limit=4), num_blocks=100)
    assert 8 + 4 + 4 <= found["planned"].computed_tokens <= 8 + 4 + 4 + 4


def test_rows_that_do_not_fit_are_in_no_order(rng):
    prompts = [*grouped_prompts(rng, groups=2, size=3), list(range(500))]
    planned = plan_prompts(prompts, limit=4)
    size = CacheSize(num_blocks=30, concurrency=4)
    load = CacheLoad(keys=planned.keys, output_tokens=planned.expected_tokens)
    assert [0, 1, 2, 3, 4, 5] == load.rows_that_fit(size).tolist()
    assert {6 * 40} == {order.prompt_tokens for order in forecast(planned, num_blocks=30).values()}


def test_a_row_that_does_not_fit_leaves_the_bound_below_all_orders(rng):
    groups = [[7] * 8 + prompt for prompt in grouped_prompts(rng, groups=6, size=5, prefix=64)]
    found = forecast(plan_prompts([*groups, list(range(5000))], limit=4), num_blocks=60)
    assert 8 + 6 * (64 + 5 * 8) == found["bound"].computed_tokens
    assert found["bound"].computed_tokens <= found["sorted"].computed_tokens


def test_a_prefix_of_rows_that_do_not_fit_is_not_in_the_bound(rng):
    long = [[9] * 400 + [row] * 8 for row in range(3)]
    prompts = grouped_prompts(rng, groups=2, size=3)
    found = forecast(plan_prompts([*prompts, *long], limit=4), num_blocks=30)
    assert 2 * (32 + 3 * 8) == found["bound"].computed_tokens


def test_rows_that_do_not_fit_are_counted(rng):
    planned = plan_prompts([*grouped_prompts(rng), list(range(500))], limit=4)
    assert {1} == {order.num_rows_too_large for order in forecast(planned, num_blocks=30).values()}


def test_without_a_prefix_cache_only_the_groups_of_a_plan_share(rng):
    planned = plan_prompts(grouped_prompts(rng, groups=6, size=5, prefix=32, own=8), limit=4)
    found = forecast(planned, num_blocks=10_000, finds_blocks=False)
    assert (30 * 40, 30 * 40) == (found["input"].computed_tokens, found["sorted"].computed_tokens)
    assert 6 * (32 + 5 * 8) == found["planned"].computed_tokens


def test_without_a_prefix_cache_an_unordered_input_saves_nothing(rng):
    planned = plan_prompts(grouped_prompts(rng), limit=4, mode="off")
    assert 0 == forecast(planned, num_blocks=10_000, finds_blocks=False)["planned"].hit_rate


def test_no_order_of_a_sample_computes_less_than_the_bound(rng):
    # in the counted half of every window all prefixes are known
    planned = plan_prompts(grouped_prompts(rng, groups=2, size=60), limit=4)
    found = forecast(planned, num_blocks=10_000, max_rows=80)
    assert found["bound"].computed_tokens == found["input"].computed_tokens


def test_stretches_of_the_input_do_not_pass_the_bound_either(rng):
    part = tuple(forecast(plan_prompts(grouped_prompts(rng), limit=4), num_blocks=900).values())
    merged = merge_forecasts([part, part], [(999, 1000), (999, 1000)])
    assert merged[-1].computed_tokens == merged[0].computed_tokens
    assert merged[0].is_lower_bound


def test_where_no_row_fits_nothing_is_saved(rng):
    found = forecast(plan_prompts(grouped_prompts(rng), limit=4), num_blocks=2)
    assert {0.0} == {order.hit_rate for order in found.values()}


def test_parts_of_an_input_add_up_what_does_not_fit(rng):
    planned = plan_prompts([*grouped_prompts(rng), list(range(500))], limit=4)
    part = tuple(forecast(planned, num_blocks=30).values())
    merged = merge_forecasts([part, part], [(0, 10)])
    assert {2} == {order.num_rows_too_large for order in merged}


def test_the_planned_figure_never_passes_the_bound_by_more_than_its_rounding(rng):
    prompts = [[1, 2, 3, 4] * 4 + prompt for prompt in grouped_prompts(rng, groups=9, size=3)]
    found = forecast(plan_prompts(prompts, limit=4), num_blocks=60)
    assert found["bound"].computed_tokens <= found["planned"].computed_tokens


def test_a_sample_of_many_rows_is_near_the_whole(rng):
    planned = plan_prompts(grouped_prompts(rng, groups=200, size=5), limit=4)
    whole = forecast(planned, num_blocks=60)
    sample = forecast(planned, num_blocks=60, max_rows=400)
    assert whole["planned"].hit_rate == pytest.approx(sample["planned"].hit_rate, abs=0.01)
    assert sample["input"].error > 0


def test_a_sample_knows_that_a_covered_row_computes_a_block(rng):
    prompts = grouped_prompts(rng, groups=200, size=3)
    prompts += [prompt[:32] for prompt in prompts]
    planned = plan_prompts(prompts, limit=4, dedup=False)
    whole = forecast(planned, num_blocks=60)["planned"]
    sample = forecast(planned, num_blocks=60, max_rows=400)["planned"]
    assert whole.hit_rate == pytest.approx(sample.hit_rate, abs=0.003)


def test_a_cache_finds_the_heads_that_deep_prefixes_repeat(rng):
    groups = grouped_prompts(rng, groups=6, size=5, prefix=64, own=8)
    planned = plan_prompts([[7] * 8 + prompt for prompt in groups], limit=4)
    large, small = (forecast(planned, num_blocks=n)["planned"] for n in (10_000, 30))
    assert planned.arrangement.computed_tokens == 6 * (8 + 64 + 5 * 8)
    assert 8 + 6 * (64 + 5 * 8) == large.computed_tokens <= small.computed_tokens


def test_rows_in_input_order_have_no_pinned_prefixes(rng):
    planned = plan_prompts(rng.integers(0, 10**6, (40, 30)).tolist())
    assert not planned.plan.is_reordered
    assert forecast(planned, num_blocks=40)["planned"].saved_tokens == 0


def test_a_group_that_is_torn_apart_computes_its_prefix_again(rng):
    planned = plan_prompts(grouped_prompts(rng, groups=8, size=4, prefix=64, own=8), limit=4)
    first, order = planned.plan.order[:1], planned.plan.order
    torn = dataclasses.replace(planned.plan, order=np.r_[order[1:], first])
    planned_torn = dataclasses.replace(planned, plan=torn)
    more = forecast(planned_torn, num_blocks=24)["planned"].computed_tokens
    assert 64 == more - forecast(planned, num_blocks=24)["planned"].computed_tokens


def test_no_rows_are_forecast_to_compute_nothing():
    found = forecast(plan_prompts([]), num_blocks=4)
    assert {0} == {order.computed_tokens for order in found.values()}
    assert np.isfinite(found["planned"].hit_rate)
