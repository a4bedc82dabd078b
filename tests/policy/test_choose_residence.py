"""How many layers stay on the device where not all fit: by brute force, and by what must hold."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.batches.forward_dag import forward_time
from raybatch.policy.batches.layer_plan import BatchPlan, ModelShape
from raybatch.policy.choose_engine import _ROW_S, _STEP_S
from raybatch.policy.choose_residence import WeightMemory, choose_residence
from raybatch.policy.residence import WeightSizes, residences
from tests.policy.test_choose_engine import KB_LAYER, LAYER, ROW, facts
from tests.tiers import examples

NUM_LAYERS, LAYER_BYTES, OTHER_BYTES = 12, 8 << 20, 1 << 20
ROW_BYTES = 127 * KB_LAYER * NUM_LAYERS
SIZES = WeightSizes(other_bytes=OTHER_BYTES, layer_bytes=(LAYER_BYTES,) * NUM_LAYERS)
KV_SHARE = 0.9


def memory(*, layers, rows=0, **changes):
    """Memory that holds so many layers, rows' KV and steps."""
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
    given = facts(device_rows=0, host_rows=0, copy=copy, **changes)
    return replace(given, costs=replace(given.costs, copies_overlap=overlap))


def pass_s(is_resident, num_buffers, layer_s, copy_s, overlap):
    """Seconds of a pass, played through layer by layer for so many passes that it settles."""
    computed = copied = 0.0
    ends, after_pass = [], []
    for _ in range(40):
        for stays in is_resident:
            if not stays:
                free = ends[-num_buffers] if len(ends) >= num_buffers else 0.0
                if overlap:
                    copied = max(copied, free) + copy_s
                    computed = max(computed, copied)
                else:
                    computed += copy_s
            computed += layer_s
            if not stays:
                ends.append(computed)
        after_pass.append(computed)
    return (after_pass[-1] - after_pass[19]) / 20


def tokens_per_s(given, stays, num_buffers, rows, attending, *, offload):
    """Output tokens per second of rows that decode together, by the steps of one row."""
    layer_kv = given.model.layer.kv_bytes_per_token
    copy_s = given.costs.to_device.copy_s(LAYER_BYTES)
    prompts = min(given.max_batched_tokens, rows * ROW.prompt_tokens)
    seconds = 0.0
    for phase, gate, at_once, tokens in (
        ("prefill", prompts, min(prompts, attending * ROW.prompt_tokens), ROW.prompt_tokens),
        ("decode", rows, attending, ROW.output_tokens),
    ):
        workload = ROW.workload(phase)
        plan = BatchPlan(attention_tokens=at_once, gate_tokens=gate, has_kv_on_host=offload)
        computed_s = forward_time(given.model, given.costs, plan, workload).seconds
        overlap = given.costs.copies_overlap
        step_s = pass_s(stays, num_buffers, computed_s / NUM_LAYERS, copy_s, overlap)
        if offload and overlap:
            runs = [min(at_once, gate - start) for start in range(0, gate, at_once)]
            kv = [workload.num_sequences(run) * workload.cached_tokens * layer_kv for run in runs]
            kv_s = sum(given.costs.to_device.copy_s(size) for size in kv if size)
            step_s = max(step_s, NUM_LAYERS * kv_s + stays.count(False) * copy_s)
        step_s += (_STEP_S + gate * _ROW_S) * (phase == "decode")
        seconds += tokens * step_s / gate
    return ROW.output_tokens / seconds


def by_brute_force(given, mem):
    """Every split of the layers and both places of KV: tokens/s of the best, by its split."""
    found = {}
    for num_resident in range(NUM_LAYERS + 1):
        num_streamed = NUM_LAYERS - num_resident
        buffers = min(mem.weight_buffers, num_streamed)
        weights = OTHER_BYTES + (num_resident + buffers) * LAYER_BYTES
        kv = int(KV_SHARE * (mem.device_bytes - weights)) - mem.step_bytes
        stays = next(
            each.is_resident
            for each in residences(SIZES, mem.weight_buffers)
            if sum(each.is_resident) == num_resident
        )
        rows = min(kv // ROW_BYTES, given.max_num_seqs)
        speeds = [0.0, 0.0]
        if rows > 0:
            speeds[0] = tokens_per_s(given, stays, buffers, rows, rows, offload=False)
        rows = min(given.host_kv_bytes // ROW_BYTES, given.max_num_seqs)
        attending = max(0, kv) // 2 // KB_LAYER // (ROW.prompt_tokens + ROW.output_tokens // 2)
        holds_row = max(0, kv) // 2 // KB_LAYER >= 127
        if rows > 0 and holds_row:
            attending = min(rows, attending)
            speeds[1] = tokens_per_s(given, stays, buffers, rows, attending, offload=True)
        if max(speeds):
            # near ties keep KV on the device
            found[num_resident] = speeds[1] if speeds[1] >= 1.05 * speeds[0] else speeds[0]
    return found


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("host_rows", [0, 200])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("copy", [1e8, 1e9, 1e11])
def test_the_choice_is_the_best_of_all_splits(copy, overlap, host_rows, buffers):
    given = situation(host_rows=host_rows, copy=copy, overlap=overlap)
    # what KV keeps the link busy is taken from the first layers, where it is a little less
    near = {"rel": 0.03 if host_rows and overlap else 1e-6}
    for layers in (3.1, 5, 7.5, 9, 11.9):
        mem = memory(layers=layers, weight_buffers=buffers)
        expected = by_brute_force(given, mem)
        choice = choose_residence(given, mem)
        kept = sum(choice.residence.is_resident)
        assert pytest.approx(max(expected.values()), **near) == choice.way.tokens_per_s
        assert pytest.approx(max(expected.values()), **near) == expected[kept]


def test_all_layers_stay_where_a_few_rows_fit_beside_them():
    given = situation(copy=1e12)
    assert (
        choose_residence(given, memory(layers=NUM_LAYERS, rows=17)).residence.is_resident
        == (True,) * NUM_LAYERS
    )
    # with fewer the forecasts decide, and copies that cost nothing are for more rows
    assert choose_residence(given, memory(layers=NUM_LAYERS, rows=2)).residence.streamed
    slow = choose_residence(situation(copy=1e7), memory(layers=NUM_LAYERS, rows=2))
    assert not slow.residence.streamed
    assert 2 == slow.way.rows_together


def test_layers_leave_for_the_rows_that_share_their_copies():
    def kept(copy):
        choice = choose_residence(situation(copy=copy), memory(layers=11.5))
        assert choice.way.rows_together > 1
        return sum(choice.residence.is_resident), choice.reason

    kept_by_link = [kept(copy)[0] for copy in (1e7, 1e9, 1e10, 1e12)]
    assert sorted(kept_by_link, reverse=True) == kept_by_link
    assert kept_by_link[0] > kept_by_link[-1]
    reason = kept(1e12)[1]
    assert reason.startswith(f"{kept_by_link[-1]} of 12 layers on the device, KV on the device, ")
    assert reason.endswith("rows at once, the most that fit")


def test_memory_of_the_host_bounds_what_is_streamed():
    given, mem = situation(copy=1e12), memory(layers=11)
    assert 12 == len(choose_residence(given, mem).residence.streamed)
    held = choose_residence(given, replace(mem, host_bytes=5 * LAYER_BYTES))
    assert 5 == len(held.residence.streamed)
    with_kv = situation(copy=1e12, host_rows=200)
    both = replace(mem, host_bytes=5 * LAYER_BYTES + with_kv.host_kv_bytes)
    assert 5 == len(choose_residence(with_kv, both).residence.streamed)


def test_kv_is_where_the_options_want_it():
    given = situation(host_rows=20, copy=1e12)
    mem = memory(layers=11.5)
    assert not choose_residence(given, mem).way.kv_offload
    assert choose_residence(given, mem, needs_offload=True).way.kv_offload
    fixed = choose_residence(situation(copy=1e8), replace(mem, kv_bytes=5 * ROW_BYTES))
    assert 5 == fixed.way.rows_together
    # the most layers beside them
    assert 9 == sum(fixed.residence.is_resident)


def test_weights_that_do_not_fit_at_all_are_refused_with_the_numbers():
    mem = memory(layers=0.9)
    with pytest.raises(ConfigError, match=rf"{SIZES.total_bytes} bytes, {9 << 20} where layers"):
        choose_residence(situation(), mem)
    with pytest.raises(ConfigError, match=r"in 1024 of the host; set engine\.quantization"):
        choose_residence(situation(), memory(layers=3, host_bytes=1024))


@settings(max_examples=examples(12, full=200))
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
    for more in (0, 0.3, 4):
        mem = memory(layers=layers + more, weight_buffers=buffers)
        try:
            choice = choose_residence(given, mem)
        except ConfigError:
            assert not speeds
            continue
        if not choice.residence.streamed:
            break
        taken = choice.residence.device_bytes + mem.step_bytes
        if not choice.way.kv_offload:
            taken += choice.way.rows_together * ROW_BYTES
        assert taken <= mem.device_bytes
        speeds.append(choice.way.tokens_per_s)
    # a near tie keeps KV on the device, and the last run of a step may be short
    for less, more in itertools.pairwise(speeds):
        assert more >= less / 1.06
