"""Number of resident layers if not all fit: by brute force, and by invariants."""

import itertools
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import CapacityError, ConfigError
from raybatch.policy.choose_engine import choose_engine, choose_weight_placement
from raybatch.policy.cost.layers import KVBuffer, ModelShape, StepCounts, step_seconds
from raybatch.policy.memory_budget import (
    WeightMemory,
    WeightSizes,
    plan_weight_placement,
    weight_placements,
)
from tests.policy.test_choose_engine import KB_LAYER, LAYER, inputs
from tests.tiers import examples, singles

NUM_LAYERS, LAYER_BYTES, OTHER_BYTES = 12, 8 << 20, 1 << 20
ROW_BYTES = 127 * KB_LAYER * NUM_LAYERS
SIZES = WeightSizes(other_bytes=OTHER_BYTES, ffn_bytes=(LAYER_BYTES,) * NUM_LAYERS)
KV_SHARE = 0.9


def memory(*, layers, rows=0, **changes):
    """Memory for this number of layers, KV of rows, and steps."""
    step_bytes = 1 << 20
    free = OTHER_BYTES + layers * LAYER_BYTES + (rows * ROW_BYTES + step_bytes) / KV_SHARE
    given = WeightMemory(
        sizes=SIZES,
        weight_buffers=1,
        device_bytes=int(free) + 2,
        host_bytes=1 << 40,
        step_bytes=step_bytes,
        kv_share=KV_SHARE,
    )
    return replace(given, **changes)


def situation(*, host_rows=0, copy=1e10, overlap=True, **changes):
    model = ModelShape(layer=LAYER, num_layers=NUM_LAYERS)
    changes |= {"model": model, "host_kv_bytes": host_rows * ROW_BYTES}
    changes = {"num_rows": 400} | changes
    given = inputs(device_rows=0, host_rows=0, copy=copy, **changes)
    return replace(given, costs=replace(given.costs, copies_overlap=overlap))


def by_brute_force(given, mem):
    """Tokens/s by the number of resident layers, each with the better place of KV."""
    found = {}
    for count in range(NUM_LAYERS + 1):
        buffers = min(mem.weight_buffers, NUM_LAYERS - count)
        weights = OTHER_BYTES + (count + buffers) * LAYER_BYTES
        kv_bytes = max(0, int(KV_SHARE * (mem.device_bytes - weights)) - mem.step_bytes)
        placement = plan_weight_placement(
            SIZES, device_weight_bytes=weights, weight_buffers=mem.weight_buffers
        )
        # with few bytes it may be one with fewer copies
        assert sum(placement.is_resident) >= count
        speeds = [0.0, 0.0]
        for place in (False, True):
            held = replace(given, device_kv_bytes=kv_bytes, placement=placement, kv_offload=place)
            with suppress(CapacityError):
                speeds[place] = choose_engine(held).best.tokens_per_s
        device, host = speeds
        if max(speeds):
            # near ties keep KV on the device
            found[count] = host if host >= 1.05 * device else device
    return found


@pytest.mark.parametrize(
    ("copy", "overlap", "host_rows", "buffers"),
    singles((1e8, 1e9, 1e11), (True, False), (0, 200), (1, 2)),
)
def test_the_choice_is_the_best_of_all_splits(copy, overlap, host_rows, buffers):
    given = situation(host_rows=host_rows, copy=copy, overlap=overlap)
    for layers in (3.1, 7.5, 11.9):
        mem = memory(layers=layers, weight_buffers=buffers)
        expected = by_brute_force(given, mem)
        choice = choose_weight_placement(given, mem)
        assert max(expected.values()) == choice.best.tokens_per_s
        kept = sum(choice.placement.is_resident)
        assert kept in (
            count for count, speed in expected.items() if speed == max(expected.values())
        )


def test_all_layers_stay_where_a_few_rows_fit_beside_them():
    given = situation(copy=1e12)
    assert (
        choose_weight_placement(given, memory(layers=NUM_LAYERS, rows=17)).placement.is_resident
        == (True,) * NUM_LAYERS
    )
    # with fewer the forecasts decide, and copies that cost nothing are for more rows
    assert choose_weight_placement(given, memory(layers=NUM_LAYERS, rows=2)).placement.streamed
    slow = choose_weight_placement(situation(copy=1e7), memory(layers=NUM_LAYERS, rows=2))
    assert not slow.placement.streamed
    assert 2 == slow.best.rows_together


def test_layers_leave_for_the_rows_that_share_their_copies():
    mem = memory(layers=11.5)
    choice = choose_weight_placement(situation(copy=1e9), mem)
    kept = sum(choice.placement.is_resident)
    assert 0 < kept < 9
    assert choice.reason.startswith(f"{kept} of 12 layers on the device, KV on device, ")
    most = "10 of 12 layers on the device, KV on device, 2 rows at once: "
    assert f"; with the most layers that fit: {most}" in choice.reason
    assert choice.reason.endswith("output tokens/s forecast")
    # with few rows, the most layers stay that leave memory for their KV
    few = choose_weight_placement(situation(copy=1e9, num_rows=5), mem)
    assert (9, 5) == (sum(few.placement.is_resident), few.best.rows_together)


def test_weights_and_kv_of_the_host_share_the_link():
    given = situation(copy=1e7)
    steps = StepCounts(
        decode_rows=np.array([50.0]),
        prefill_tokens=np.zeros(1),
        prompt_tokens=100,
        prompt_reads=50.5,
        context_tokens=114,
    )
    buffer = KVBuffer(num_tokens=600, num_buffers=2)
    streamed = weight_placements(SIZES, 2)[6]
    kinds = ((buffer, None), (None, streamed), (buffer, streamed))
    kv, weights, both = (
        float(step_seconds(given.model, given.costs, steps, *kind)[0]) for kind in kinds
    )
    # the link is the bottleneck, except for the fixed part of steps
    copies_s = 6 * LAYER_BYTES / 1e7
    assert weights == pytest.approx(copies_s, rel=0.1)
    assert both == pytest.approx(kv + copies_s, rel=0.1)


def test_memory_of_the_host_bounds_what_is_streamed():
    given, mem = situation(copy=1e12), memory(layers=11)
    assert 12 == len(choose_weight_placement(given, mem).placement.streamed)
    held = choose_weight_placement(given, replace(mem, host_bytes=5 * LAYER_BYTES))
    assert 5 == len(held.placement.streamed)
    with_kv = situation(copy=1e12, host_rows=200)
    both = replace(mem, host_bytes=5 * LAYER_BYTES + with_kv.host_kv_bytes)
    assert 5 == len(choose_weight_placement(with_kv, both).placement.streamed)


def test_kv_is_where_the_options_place_it():
    given, mem = situation(host_rows=20, copy=1e12), memory(layers=11.5)
    for place in (True, False):
        choice = choose_weight_placement(replace(given, kv_offload=place), mem)
        assert place == choice.best.kv_offload
    fixed = choose_weight_placement(situation(copy=1e8), replace(mem, kv_bytes=5 * ROW_BYTES))
    assert 5 == fixed.best.rows_together
    # the most layers together with them
    assert 9 == sum(fixed.placement.is_resident)


def test_weights_that_do_not_fit_at_all_are_refused_with_the_numbers():
    mem = memory(layers=0.9)
    with pytest.raises(ConfigError, match=rf"{SIZES.total_bytes} bytes \({9 << 20} if layers"):
        choose_weight_placement(situation(), mem)
    with pytest.raises(ConfigError, match=r"the host has 1024 bytes .*; set engine\.quantization"):
        choose_weight_placement(situation(), memory(layers=3, host_bytes=1024))


@settings(max_examples=examples(8, full=200))
@given(
    st.floats(1.1, 14),
    st.sampled_from([0, 3, 50, 400]),
    st.sampled_from([1e7, 1e9, 1e10, 1e12]),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_choice_keeps_the_budget_and_more_memory_costs_nothing(
    layers, host_rows, copy, buffers, overlap
):
    given = situation(host_rows=host_rows, copy=copy, overlap=overlap)
    speeds = []
    for more in (0, 2):
        mem = memory(layers=layers + more, weight_buffers=buffers)
        try:
            choice = choose_weight_placement(given, mem)
        except ConfigError:
            assert not speeds
            continue
        if not choice.placement.streamed:
            break
        taken = choice.placement.device_bytes + mem.step_bytes
        if not choice.best.kv_offload:
            taken += choice.best.rows_together * ROW_BYTES
        assert taken <= mem.device_bytes
        speeds.append(choice.best.tokens_per_s)
    # a near tie keeps KV on the device, and the last run of a step may be short
    for less, more in itertools.pairwise(speeds):
        assert more >= less / 1.06
