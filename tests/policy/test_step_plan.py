"""How steps run: by layers that were measured plain and in parts."""

import pytest

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_plan import Workload
from raybatch.policy.batches.step_plan import MeasuredLayer, RowShape, plan_steps

ROW = RowShape(prompt_tokens=100, output_tokens=50)
# microseconds of a token in a layer, by tokens that attend at once
PREFILL = {1000: 10.0, 500: 10.0, 250: 10.0}
DECODE = {200: 40.0, 100: 40.0}


def layers(prefill=PREFILL, decode=DECODE):
    return [
        MeasuredLayer(
            phase=phase,
            gate_tokens=max(times),
            attention_tokens=size,
            seconds=1e-6 * micros * max(times),
        )
        for phase, times in (("prefill", prefill), ("decode", decode))
        for size, micros in times.items()
    ]


def test_parts_that_gain_nothing_are_not_taken():
    found = plan_steps(layers(), ROW)
    assert found.attn_batch_tokens is None
    assert "take as long as plain ones" in found.reason


def test_parts_that_are_faster_are_taken_and_the_reason_says_by_how_much():
    # a row takes 1000 + 2000 us, and 800 + 2000 in parts
    found = plan_steps(layers(prefill={**PREFILL, 500: 8.0}), ROW)
    assert 500 == found.attn_batch_tokens
    assert "attention over 500 tokens at a time take 7 % less time" in found.reason


def test_parts_that_are_slower_are_told_as_such():
    found = plan_steps(layers(prefill={1000: 10.0, 500: 16.0}, decode={200: 40.0}), ROW)
    assert found.attn_batch_tokens is None
    assert "take 20 % more time than plain ones" in found.reason


def test_a_gain_within_the_noise_is_not_taken():
    found = plan_steps(layers(prefill={**PREFILL, 500: 9.0}), ROW)
    assert found.attn_batch_tokens is None
    assert "3 % less time than plain ones, and coroutines are for 5 % and more" in found.reason


@pytest.mark.parametrize(("output_tokens", "expected"), [(10, 100), (1000, None)])
def test_both_phases_count_by_the_tokens_of_a_row(output_tokens, expected):
    measured = layers(prefill={1000: 10.0, 100: 5.0}, decode={200: 40.0, 100: 60.0})
    row = RowShape(prompt_tokens=100, output_tokens=output_tokens)
    assert expected == plan_steps(measured, row).attn_batch_tokens


def test_a_phase_with_fewer_tokens_than_a_part_stays_plain():
    measured = layers(prefill={1000: 10.0, 500: 5.0}, decode={200: 40.0, 100: 60.0})
    row = RowShape(prompt_tokens=100, output_tokens=10)
    assert 500 == plan_steps(measured, row).attn_batch_tokens


def test_parts_below_the_smallest_measured_ones_cost_what_those_do():
    # whole prompts are kept together: prefill has no parts of 100
    found = plan_steps(layers(decode={200: 40.0, 100: 20.0}, prefill={1000: 10.0, 500: 12.0}), ROW)
    # 1200 + 1000 us in parts of 100, of 1000 + 2000
    assert 100 == found.attn_batch_tokens
    assert "27 % less" in found.reason


def test_without_parts_that_were_measured_steps_are_plain():
    found = plan_steps(layers(prefill={1000: 10.0}, decode={200: 40.0}), ROW)
    assert (None, "no layer was measured in parts") == (found.attn_batch_tokens, found.reason)


def test_a_phase_without_a_plain_layer_is_refused():
    with pytest.raises(ConfigError, match="plain forward pass in each phase"):
        plan_steps(layers()[:3], ROW)


def test_rows_decode_half_way_through_their_output():
    decode = Workload(cached_tokens=125, reserved_tokens=24, waiting_sequences=9)
    assert decode == ROW.workload("decode", waiting_sequences=9)
    prefill = Workload(tokens_per_sequence=100, reserved_tokens=50)
    assert prefill == ROW.workload("prefill")


def test_rows_without_tokens_are_refused():
    with pytest.raises(ConfigError, match="output_tokens of a row is 0"):
        RowShape(output_tokens=0)


def test_default_rows_fit_a_short_model():
    assert RowShape(prompt_tokens=512, output_tokens=128) == RowShape.within(640)
    assert RowShape(prompt_tokens=410, output_tokens=102) == RowShape.within(512)
