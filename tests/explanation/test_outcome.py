"""Plan and actual side by side."""

import dataclasses
import json

import pytest

from raybatch.errors import ConfigError
from raybatch.explanation.outcome import PlanOutcome, RunActual
from raybatch.policy.cost.estimate import TimeEstimate
from tests.explanation.inputs import explain_prompts, grouped_prompts

COMPUTED = 6 * (32 + 5 * 8)


@pytest.fixture
def plan(rng):
    time = TimeEstimate(engine_s=100, wall_s=50, low_s=40, high_s=60, num_replicas=2)
    return explain_prompts(
        grouped_prompts(rng, groups=6, size=5, prefix=32, own=8), kv_tokens=400, time=time
    )


def outcome(plan, **changes):
    values = {
        "prompt_tokens": 1200,
        "computed_tokens": COMPUTED,
        "generated_tokens": 480,
        "num_rows": 30,
        "num_generated": 30,
        "kv_tokens": 400,
        "num_replicas": 2,
        "engine_s": 98.0,
        "wall_s": 51.0,
    }
    return PlanOutcome(plan=plan, actual=RunActual(**{**values, **changes}))


def test_a_run_as_planned_has_no_deviations(plan):
    found = outcome(plan)
    assert found.deviations() == ()
    assert "the run went as planned" in found.sections()[0].notes


def test_plan_and_actual_stand_side_by_side(plan):
    rows = {name: (planned, actual) for name, planned, actual in outcome(plan).rows()}
    assert rows["hit rate"] == ("64.0 %", "64.0 %")
    assert rows["saved prompt tokens"] == ("768", "768")
    assert rows["engine time"] == ("1 min 40 s", "98 s")
    assert rows["KV cache"] == ("400 tokens", "400 tokens")


def test_what_was_not_counted_is_said_to_be_unknown(plan):
    planless = dataclasses.replace(plan, time=None, kv=None, orders=())
    rows = {
        name: message for name, *message in outcome(planless, kv_tokens=None, engine_s=None).rows()
    }
    assert rows["KV cache"] == rows["engine time"] == ["not known", "not known"]


def test_without_orders_the_plan_is_said_to_count_each_prefix_once(plan):
    found = outcome(dataclasses.replace(plan, orders=()), computed_tokens=600).deviations()
    assert "the plan assumes that each prefix is computed once" in found[0]
    assert "did not know the size" not in found[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"computed_tokens": 600}, "168 fewer prompt tokens were saved than planned: cause"),
        ({"computed_tokens": 400}, "32 more prompt tokens were saved than planned"),
        (
            {"computed_tokens": 600, "num_group_cuts": 3, "cut_tokens": 96},
            "3 cuts of groups over replicas: 96 prefix tokens more",
        ),
        ({"computed_tokens": 600, "kv_tokens": 200}, "the KV cache was 50 % smaller than planned"),
        ({"computed_tokens": 600, "num_restarts": 1}, "1 replica restarted with an empty"),
        (
            {"prompt_tokens": 1000, "computed_tokens": 400},
            "200 fewer prompt tokens reached the engines",
        ),
        (
            {"num_preemptions": 4, "recomputed_tokens": 77},
            "77 tokens were recomputed after 4 preemptions",
        ),
        (
            {"num_preemptions": 4, "swapped_tokens": 300, "swapped_bytes": 9 << 20},
            "the KV of 300 tokens was swapped in from host memory after preemptions; 9 MiB",
        ),
        (
            {"num_rounded_sequences": 3, "rounded_tokens": 120},
            "3 samples continued with 8-bit KV, of 120 tokens, and may have other answers",
        ),
        ({"generated_tokens": 240}, "rows generated 50 % of the tokens expected"),
        (
            {"wall_s": 61.0},
            "wall time was 61 s, more than the likely range of the plan, 40 s to 60 s",
        ),
        ({"wall_s": 10.0}, "wall time was 10 s, less than the likely range"),
        (
            {"wall_s": 30.0, "likely_engine_s": (50.0, 45.0, 55.0)},
            "predict 50 s of engine time, likely 45 s to 55 s, and it was 98 s",
        ),
        ({"computed_tokens": 400, "is_warm": True}, "the caches of the engines were warm"),
        ({"computed_tokens": 400, "kv_tokens": 800}, "the KV cache was 100 % larger than planned"),
        ({"wall_s": 10.0, "num_replicas": 8}, "8 worked, 2 replicas were planned"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_deviations_are_explained(plan, changes, message):
    assert any(message in deviation for deviation in outcome(plan, **changes).deviations())


@pytest.mark.parametrize(
    "changes",
    [{"computed_tokens": 600, "kv_tokens": 800}, {"computed_tokens": 400, "kv_tokens": 200}],
    ids=["larger-and-fewer", "smaller-and-more"],
)
def test_a_cache_of_another_size_explains_only_what_it_can(plan, changes):
    (message,) = outcome(plan, **changes).deviations()
    assert "the KV cache was" not in message


def test_a_cache_that_holds_all_rows_in_any_case_explains_nothing(rng):
    ample = explain_prompts(grouped_prompts(rng), kv_tokens=10_000)
    (message,) = outcome(ample, computed_tokens=400, kv_tokens=20_000).deviations()
    assert "the KV cache was" not in message


def test_a_warm_cache_does_not_explain_fewer_hits(plan):
    (message,) = outcome(plan, computed_tokens=600, is_warm=True).deviations()
    assert message.endswith("cause unknown")


def test_what_a_probe_has_left_explains_more_hits(plan):
    probed = dataclasses.replace(plan, lengths_from="a probe")
    (message,) = outcome(probed, computed_tokens=400).deviations()
    assert "the probe left its prefixes" in message


def test_a_difference_below_one_percent_is_none(plan):
    assert outcome(plan, computed_tokens=COMPUTED + 7).deviations() == ()


def test_drafts_are_told_where_there_were_any(plan):
    assert not [row for row in outcome(plan).rows() if "drafts" in row[0]]
    found = outcome(plan, drafted_tokens=80, accepted_tokens=60).rows()
    assert ("accepted drafts", "", "60 of 80") in found


def test_json_gives_back_the_same_outcome(plan):
    found = outcome(plan, num_preemptions=2, recomputed_tokens=3)
    stored = json.loads(json.dumps(found.to_mapping()))
    assert found == PlanOutcome.from_mapping(stored, where="file")


def test_json_of_another_version_is_a_config_error(plan):
    stored = outcome(plan).to_mapping() | {"actual": {"prompt": 1}}
    with pytest.raises(ConfigError, match=r"file\.actual"):
        PlanOutcome.from_mapping(stored, where="file")


def test_weights_that_were_copied_are_told_by_token(plan):
    assert not [row for row in outcome(plan).rows() if "weights" in row[0]]
    copied = {"weight_copy_bytes": 480 << 20, "num_weight_copies": 96, "num_weight_stalls": 12}
    found = outcome(plan, **copied).rows()
    assert ("weights copied", "", "480 MiB, 1,024 KiB per generated token") in found
    assert ("weight stalls", "", "12 of 96") in found
