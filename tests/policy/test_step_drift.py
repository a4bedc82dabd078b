"""Measured steps compared with their forecast: layers and links are separated."""

from dataclasses import replace

import pytest

from raybatch.policy.choose_engine import StepDrift, choose_engine, step_drift
from raybatch.policy.memory_budget import WeightSizes, plan_weight_placement
from raybatch.records.types import ReplicaStats
from tests.policy.test_choose_engine import inputs

STEPS = ReplicaStats(num_steps=64, prompt_tokens=6400, cached_tokens=400, generated_tokens=3200)


def forecast_s(given, mode):
    """Return the forecast seconds of `STEPS` and of their copies."""
    drift = step_drift(given, mode, ReplicaStats(), STEPS, seconds=1.0, copy_s=0.0)
    free = replace(given, costs=given.costs.without_links())
    without = step_drift(free, mode, ReplicaStats(), STEPS, seconds=1.0, copy_s=0.0)
    return 1 / drift.modules, 1 / drift.modules - 1 / without.modules


@pytest.mark.parametrize("modules", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("links", [1.0, 4.0])
def test_layers_and_links_are_separated(modules, links):
    given = inputs(device_rows=8, host_rows=512)
    mode = choose_engine(given).best
    assert mode.kv_offload
    all_s, links_s = forecast_s(given, mode)
    seconds = modules * (all_s - links_s) + links * links_s
    drift = step_drift(given, mode, ReplicaStats(), STEPS, seconds=seconds, copy_s=links * links_s)
    assert drift.modules == pytest.approx(modules)
    assert drift.links == pytest.approx(links)
    assert drift.is_far == (modules != 1.0 or links != 1.0)


def test_layers_that_are_streamed_are_part_of_the_forecast():
    sizes = WeightSizes(other_bytes=0, ffn_bytes=(1 << 26,) * 4)
    streamed = plan_weight_placement(sizes, device_weight_bytes=3 << 26, weight_buffers=2)
    given = replace(inputs(device_rows=8, host_rows=0), placement=streamed)
    plain = inputs(device_rows=8, host_rows=0)
    mode = choose_engine(given).best
    seconds, _ = forecast_s(given, mode)
    assert seconds > 1.2 * forecast_s(plain, mode)[0]
    drift = step_drift(given, mode, ReplicaStats(), STEPS, seconds=seconds, copy_s=0.0)
    assert drift.modules == pytest.approx(1.0)


@pytest.mark.parametrize(("seconds", "copy_s"), [(1.0, 5.0), (0.0, 0.0), (0.0, 1.0)])
def test_impossible_seconds_make_no_cost_negative(seconds, copy_s):
    given = inputs(device_rows=8, host_rows=512)
    mode = choose_engine(given).best
    drift = step_drift(given, mode, ReplicaStats(), STEPS, seconds=seconds, copy_s=copy_s)
    assert drift.modules > 0
    assert drift.links > 0


def test_without_steps_nothing_changes():
    given = inputs(device_rows=8, host_rows=0)
    mode = choose_engine(given).best
    assert step_drift(given, mode, STEPS, STEPS, seconds=0.0, copy_s=0.0) == StepDrift()
    assert not StepDrift(modules=1.19).is_far
    assert StepDrift(links=0.79).is_far


def test_only_the_steps_between_two_counts_are_compared():
    given = inputs(device_rows=8, host_rows=0)
    mode = choose_engine(given).best
    seconds, _ = forecast_s(given, mode)
    twice = replace(STEPS, num_steps=128, prompt_tokens=12800, cached_tokens=800)
    twice = replace(twice, generated_tokens=6400)
    drift = step_drift(given, mode, STEPS, twice, seconds=seconds, copy_s=0.0)
    assert drift.modules == pytest.approx(1.0)
