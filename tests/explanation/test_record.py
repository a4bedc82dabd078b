"""Explanations as text, JSON and pages."""

import json
from dataclasses import replace

import pytest

from raybatch.config import EngineConfig, PlanConfig
from raybatch.errors import ConfigError
from raybatch.explanation.explain import explain_plan, explain_profile
from raybatch.explanation.record import Explanation
from raybatch.policy.cost.estimate import TimeEstimate
from raybatch.prefix.profile import InputProfile
from tests.explanation.inputs import explain_prompts, grouped_prompts, plan_prompts

TIME = TimeEstimate(
    engine_s=7200, wall_s=3700, low_s=3300, high_s=4400, num_replicas=2, origin="measured here"
)


@pytest.fixture
def prompts(rng):
    return grouped_prompts(rng, groups=6, size=5, prefix=32, own=8)


def facts(explanation):
    """Return the facts of all sections by name."""
    return {name: value for section in explanation.sections() for name, value in section.facts}


def test_the_hit_rate_is_that_of_the_planned_order(prompts):
    found = explain_prompts(prompts, kv_tokens=400)
    computed = 6 * (32 + 5 * 8)
    assert 1 - computed / 1200 == found.hit_rate == found.forecast("planned").hit_rate
    assert 1200 - computed == found.saved_tokens


def test_without_a_cache_size_each_prefix_counts_as_computed_once(prompts):
    found = explain_prompts(prompts)
    assert (found.orders, found.kv) == ((), None)
    assert found.hit_rate == explain_prompts(prompts, kv_tokens=10_000).hit_rate
    assert "the size of the KV cache is unknown" in str(found)


def test_where_no_row_fits_the_cache_orders_are_not_compared(prompts):
    found = explain_prompts(prompts, kv_tokens=16)
    assert ((), 16) == (found.orders, found.kv.tokens)
    assert "none of 30 rows fits a KV cache of 16 tokens, so orders are not" in str(found)


def test_a_plan_that_is_off_is_said_to_be(prompts):
    off = {"mode": "off"}
    found = explain_prompts(prompts, planned=off, plan=PlanConfig(**off))
    assert "rows keep the order of the input: the plan is off" == facts(found)["plan"]


def test_lengths_are_from_a_probe_where_one_has_run_whatever_it_found(prompts):
    planned = plan_prompts(prompts)
    options = {"source": "in", "model": "m", "engine": EngineConfig()}
    probed, not_yet = (
        explain_plan(
            replace(planned, is_probed=is_probed), plan=PlanConfig(lengths="probe"), **options
        )
        for is_probed in (True, False)
    )
    assert ("a probe", "max_tokens") == (probed.lengths_from, not_yet.lengths_from)


def test_sums_over_parts_can_be_explained(prompts):
    profile = explain_prompts(prompts).profile
    whole = InputProfile.merge([profile, profile])
    found = explain_profile(whole, source="in", model="m", plan=PlanConfig(), is_reordered=True)
    assert "12 groups in order 'auto'" in str(found)
    assert "64.0 % of the prompt tokens need no computing" in facts(found)["hit rate"]


def test_all_orders_are_shown_with_the_cache_size(prompts):
    printed = str(explain_prompts(prompts, kv_tokens=400, kv_origin="measured"))
    assert ["input", "sorted", "planned", "bound"] == [
        line.split()[0] for line in printed.splitlines()[-5:-1]
    ]
    assert printed.endswith("KV cache: 400 tokens of one engine (measured)")


def test_rows_that_no_engine_sees_are_told(prompts):
    planned = {"skipped": {"PromptTooLong": 3, "filtered": 1}}
    found = facts(explain_prompts(prompts, planned=planned))
    assert found["rows"] == "34 in the source, 30 for the engines"
    assert found["not sent"] == "4 rows: 3 PromptTooLong, 1 filtered"


def test_copies_are_told(prompts):
    found = facts(explain_prompts([*prompts, prompts[0]]))
    value = "31 for the engines, 1 copy of other rows among them (not generated again)"
    assert found["rows"].endswith(value)


def test_copies_alone_are_no_group_and_that_is_said():
    found = explain_prompts([[1] * 18] * 300)
    value = facts(found)
    assert value["sharing"].endswith("300.0 rows share a token, identical rows included")
    assert value["plan"].endswith(
        "300 rows, 1 of them generated and the others copies, in no group"
    )
    assert "Copies of a row are drawn like other rows, but cost nothing" in found.to_html()


def test_nothing_is_said_of_copies_where_there_are_none(prompts):
    found = explain_prompts(prompts)
    assert "copies" not in facts(found)["sharing"] + facts(found)["plan"] + found.to_html()


def test_rows_too_large_for_the_cache_are_told(prompts):
    found = explain_prompts([*prompts, list(range(900))], kv_tokens=400)
    assert "1 row too large for this cache left out" in str(found)


def test_expected_lengths_name_their_origin(prompts):
    assert facts(explain_prompts(prompts))["outputs"] == (
        "480 tokens expected (from max_tokens), at most 480"
    )
    plan = PlanConfig(expected_tokens_column="n")
    planned = {"expected": [4.0] * 30}
    assert facts(explain_prompts(prompts, plan=plan, planned=planned))["outputs"] == (
        "120 tokens expected (from column 'n'), at most 480"
    )


@pytest.mark.parametrize(("is_probed", "origin"), [(False, "max_tokens"), (True, "a probe")])
def test_lengths_of_parts_come_from_a_probe_once_it_has_run(prompts, is_probed, origin):
    found = explain_profile(
        explain_prompts(prompts).profile,
        source="in",
        model="m",
        plan=PlanConfig(lengths="probe"),
        is_reordered=True,
        is_probed=is_probed,
    )
    assert found.lengths_from == origin


def test_bands_of_parts_are_told(prompts):
    planned = {"expected": list(range(1, 31)), "limit": 30}
    profile = explain_prompts(prompts, planned=planned).profile
    found = explain_profile(profile, source="in", model="m", plan=PlanConfig(), is_reordered=True)
    assert "50 % up to 16" in facts(found)["spread"]


def test_bands_are_told_where_lengths_differ(prompts):
    planned = {"expected": list(range(1, 31)), "limit": 30}
    found = facts(explain_prompts(prompts, planned=planned))
    assert "50 % up to 16" in found["spread"]
    assert "spread" not in facts(explain_prompts(prompts))


def test_time_has_a_range_and_a_price(prompts):
    known = {"time": TIME, "price_per_engine_hour": 2.5}
    found = facts(explain_prompts(prompts, **known))
    assert found["time"] == "1 h 2 min on 2 replicas, likely 55 min to 1 h 13 min, measured here"
    assert found["money"] == "5.14 at 2.50 per engine-hour, 2 replicas for all of the time"


def test_unknown_time_says_why(prompts):
    known = {"no_time": "the engine was not measured", "price_per_engine_hour": 2.5}
    found = facts(explain_prompts(prompts, **known))
    assert found["time"] == "no cost model: the engine was not measured"
    assert "money" not in found


def test_rows_without_sharing_keep_their_order(rng):
    found = explain_prompts(rng.integers(0, 10**6, (20, 30)).tolist(), kv_tokens=400)
    assert "rows keep the order of the input" in facts(found)["plan"]
    assert facts(found)["sharing"] == "no two prompts share their first block of tokens"
    assert "Prefix tree" not in found.to_html()


def test_the_text_fits_a_terminal(prompts):
    planned = {"skipped": {"a": 1}, "expected": list(range(1, 31)), "limit": 30}
    found = explain_prompts(
        prompts,
        kv_tokens=400,
        planned=planned,
        time=TIME,
        price_per_engine_hour=1.0,
        layout="putting {a} before {b} raises the hit rate from 1 % to 2 %",
    )
    lines = str(found).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 160


def test_json_gives_back_the_same_explanation(prompts):
    known = {"time": TIME, "price_per_engine_hour": 2.5}
    found = explain_prompts(prompts, kv_tokens=400, **known, decode=str)
    assert found == Explanation.from_mapping(json.loads(found.to_json()), where="file")


@pytest.mark.parametrize(
    "change",
    [{"profile": 3}, {"orders": {}}, {"unheard_of": 1}, {"boxes": [{"row_start": 1}]}],
    ids=str,
)
def test_json_of_another_version_is_a_config_error(prompts, change):
    with pytest.raises(ConfigError, match="file"):
        Explanation.from_mapping(explain_prompts(prompts).to_mapping() | change, where="file")


def test_prefixes_are_drawn_with_their_text(prompts):
    evil = "</title></script><img src=x>"
    page = explain_prompts(prompts, decode=lambda ids: f"{evil} {len(ids)} tokens").to_html()
    assert "tokens" in page
    assert "&lt;/title&gt;&lt;/script&gt;&lt;img src=x&gt; 32 tokens" in page
    assert "<img" not in page


def test_only_the_beginning_of_a_long_prefix_is_decoded(rng):
    prompts = grouped_prompts(rng, groups=2, size=4, prefix=300, own=8)
    found = explain_prompts(prompts, decode=lambda ids: f"{len(ids)} tokens")
    assert {"48 tokens ..."} == {box.text for box in found.boxes if box.num_nodes == 1}


def test_source_and_model_are_no_markup(prompts):
    page = explain_prompts(prompts, source="<b>", model="<i>").to_html()
    assert "<b>" not in page
    assert "<i>" not in page


def test_a_notebook_shows_facts_and_no_page(prompts):
    shown = explain_prompts(prompts, kv_tokens=400)._repr_html_()
    assert "<html" not in shown
    assert "Prefix tree" not in shown
    assert "for the engines" in shown


def test_an_explanation_of_no_rows_can_be_shown():
    found = explain_prompts([], kv_tokens=400, planned={"skipped": {"InvalidPrompt": 2}})
    assert "2 in the source, 0 for the engines" in str(found)
    assert found.to_html()
    assert found == Explanation.from_mapping(json.loads(found.to_json()), where="file")


def test_rows_that_run_one_by_one_leave_more_room_for_the_cache(prompts):
    alone = explain_prompts(prompts, kv_tokens=400, engine=EngineConfig(max_num_seqs=1))
    together = explain_prompts(prompts, kv_tokens=400)
    assert alone.forecast("input").hit_rate > together.forecast("input").hit_rate
