"""The closed form of a step's time compared with the graph of computations and copies."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.policy.cost import layers
from raybatch.policy.cost.cascade import CascadeThresholds
from raybatch.policy.cost.layers import (
    KV_SLOTS,
    KVBuffer,
    LayerShape,
    ModelShape,
    ModuleCosts,
    StepCounts,
    Workload,
    step_seconds,
)
from raybatch.policy.cost.roofline import Roofline, link

LAYER = LayerShape(
    model_dim=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_dim=192, num_experts=64, top_k=8
)
MODEL = ModelShape(layer=LAYER, num_layers=4)
CONTEXT, ROWS = 400, 64
FREE = {"fixed_s": 0.0, "operation_s": 0.0, "byte_s": 0.0}


@pytest.fixture(autouse=True)
def layers_alone(monkeypatch):
    for name in ("_PART_LAYER_S", "_LAUNCHES_S"):
        monkeypatch.setattr(layers, name, 0.0)


def costs(copy, *, overlap):
    def module(byte_s):
        return Roofline(fixed_s=1e-6, operation_s=1e-11, byte_s=byte_s)

    return ModuleCosts(
        attention=module(1e-10),
        ffn=module(1e-10),
        to_device=link(copy),
        to_host=link(copy),
        copies_overlap=overlap,
    )


def counts(rows=0, prompts=0):
    return StepCounts(
        decode_rows=np.array([float(rows)]),
        prefill_tokens=np.array([float(prompts)]),
        prompt_tokens=128,
        prompt_reads=64.5,
        context_tokens=CONTEXT,
    )


def layers_s(model, costs, steps, buffer=None):
    """Return the seconds of a step's layers: a step with twice the layers, minus one without."""
    twice = ModelShape(layer=model.layer, num_layers=2 * model.num_layers)
    both = [step_seconds(m, costs, steps, buffer)[0] for m in (twice, model)]
    return both[0] - both[1]


def graph_s(given, tokens, workload, *, num_layers, on_host=False):
    """Return the seconds of layers by a graph of computations and copies.

    By Algorithm 1 of BatchGen (arXiv:2606.21712): attention runs over parts of `tokens` tokens,
    then all meet at the experts. A computation or copy starts when its resource is free and those
    that it waits for have ended: a slot of KV for the copy that leaves it, experts for all parts.
    """
    free, ended = {}, {}

    def run(name, resource, seconds, *after):
        resource = resource if given.copies_overlap else "compute"
        waited = [ended[one] for one in after if one in ended]
        free[resource] = ended[name] = max([free.get(resource, 0.0), *waited]) + seconds

    for layer in range(num_layers):
        for part, size in enumerate(tokens):
            number = layer * len(tokens) + part
            slot, kv_bytes = ("saved", number - KV_SLOTS), LAYER.kv_bytes_per_token
            if on_host:
                cached_bytes = workload.num_sequences(size) * workload.cached_tokens * kv_bytes
                run(("there", number), "to_device", given.to_device.copy_s(cached_bytes), slot)
            attention_s = given.attention.seconds(LAYER.attention_work(size, workload))
            waits = (("experts", layer - 1), slot, ("there", number))
            run(("attended", number), "compute", attention_s, *waits)
            if on_host:
                save_s = given.to_host.copy_s(size * kv_bytes)
                run(("saved", number), "to_host", save_s, ("attended", number))
        experts_s = given.ffn.seconds(LAYER.ffn_work(sum(tokens)))
        run(("experts", layer), "compute", experts_s, ("attended", number))
    return max(ended.values())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 4, 16])
@pytest.mark.parametrize("copy", [1e9, 1e10, 1e11, 1e12])
def test_decodes_have_the_time_of_the_graph_of_their_layers(copy, parts, overlap):
    given = costs(copy, overlap=overlap)
    tokens, workload = [ROWS // parts] * parts, Workload(cached_tokens=CONTEXT)
    four, two = (graph_s(given, tokens, workload, num_layers=n, on_host=True) for n in (4, 2))
    # the buffer also holds the new token of a row
    buffer = KVBuffer(num_tokens=ROWS // parts * (CONTEXT + 1), num_buffers=KV_SLOTS)
    found = layers_s(MODEL, given, counts(rows=ROWS), buffer)
    # with overlapping copies, waits of the first part of a layer are not modelled
    allowed = 0.15 if overlap else 0.02
    assert found == pytest.approx(MODEL.num_layers * (four - two) / 2, rel=allowed)


def test_kv_on_the_device_has_the_time_of_the_graph():
    given = costs(1e10, overlap=False)
    for steps, tokens, workload in (
        (counts(rows=ROWS), ROWS, Workload(cached_tokens=CONTEXT)),
        (counts(prompts=512), 512, Workload(tokens_per_sequence=128)),
    ):
        expected = graph_s(given, [tokens], workload, num_layers=MODEL.num_layers)
        assert layers_s(MODEL, given, steps) == pytest.approx(expected, rel=0.01)


def test_rows_and_prompts_of_a_step_share_weights():
    given = costs(1e10, overlap=False)
    alone = [layers_s(MODEL, given, one) for one in (counts(rows=64), counts(prompts=512))]
    assert max(alone) < layers_s(MODEL, given, counts(rows=64, prompts=512)) < sum(alone)


def grouped(prefix=100, members=4, rows=ROWS):
    return replace(counts(rows=rows), shared_tokens=float(prefix), group_rows=float(members))


def test_without_times_a_long_enough_prefix_is_read_once_per_group():
    given = costs(1e10, overlap=False)
    once, short = grouped(), grouped(prefix=10)
    as_own = replace(counts(rows=ROWS), context_tokens=CONTEXT + 100 / 4)
    longer = replace(counts(rows=ROWS), context_tokens=CONTEXT + 10)
    assert layers_s(MODEL, given, once) == pytest.approx(layers_s(MODEL, given, as_own))
    assert layers_s(MODEL, given, short) == pytest.approx(layers_s(MODEL, given, longer))


def test_scores_are_computed_for_every_row_also_where_memory_is_read_once():
    attention = Roofline(fixed_s=0.0, operation_s=1e-9, byte_s=0.0)
    given = replace(costs(1e10, overlap=False), attention=attention)
    longer = replace(counts(rows=ROWS), context_tokens=CONTEXT + 100)
    assert layers_s(MODEL, given, grouped()) == pytest.approx(layers_s(MODEL, given, longer))


def test_timed_reads_are_added_for_each_row_but_the_one_that_reads_memory():
    reads = CascadeThresholds(num_rows=(2, 8), min_tokens=(0.0, 0.0), position_s=(1e-6, 4e-6))
    given = replace(costs(1e10, overlap=False), cascade=reads)
    as_own = replace(counts(rows=ROWS), context_tokens=CONTEXT + 100 / 4)
    # four rows take a time between those of two and of eight
    beside_s = MODEL.num_layers * ROWS * 100 * 2e-6 * (1 - 1 / 4)
    found = layers_s(MODEL, given, grouped()) - layers_s(MODEL, given, as_own)
    assert found == pytest.approx(beside_s)
    # the last row of a group shares nothing
    alone = replace(counts(rows=1), context_tokens=CONTEXT + 100.0)
    found = layers_s(MODEL, given, grouped(rows=1))
    assert found == pytest.approx(layers_s(MODEL, given, alone))


def test_a_shared_prefix_is_copied_once_and_again_in_each_further_part():
    given = replace(costs(1e10, overlap=False), attention=Roofline(**FREE), ffn=Roofline(**FREE))
    kv_bytes = LAYER.kv_bytes_per_token
    ample = KVBuffer(num_tokens=10**6, num_buffers=KV_SLOTS)
    # 16 groups of 4
    one_part = MODEL.num_layers * given.to_device.copy_s((ROWS * CONTEXT + 16 * 100) * kv_bytes)
    saved = MODEL.num_layers * given.to_host.copy_s(ROWS * kv_bytes)
    assert layers_s(MODEL, given, grouped(), ample) == pytest.approx(one_part + saved)
    tight = KVBuffer(num_tokens=ROWS * CONTEXT // 2 + 1000, num_buffers=KV_SLOTS)
    again = MODEL.num_layers * given.to_device.copy_s(100 * kv_bytes)
    found = layers_s(MODEL, given, grouped(), tight)
    assert found == pytest.approx(one_part + again + saved)


def test_prompts_with_separate_costs_are_added_and_weights_count_once():
    given = costs(1e10, overlap=False)
    apart = replace(given, prompts=given.attention.times(2.0))
    rows, prompts = counts(rows=64), counts(prompts=512)
    assert layers_s(MODEL, apart, rows) == layers_s(MODEL, given, rows)
    assert layers_s(MODEL, given, prompts) < layers_s(MODEL, apart, prompts)
    mixed = counts(rows=64, prompts=512)
    slower = layers_s(MODEL, apart, mixed) - layers_s(MODEL, given, mixed)
    assert 0 < slower < layers_s(MODEL, apart, prompts)


def test_launches_bound_small_parts_on_a_gpu(monkeypatch):
    monkeypatch.setattr(layers, "_LAUNCHES_S", 1.0)
    buffer = KVBuffer(num_tokens=ROWS // 4 * (CONTEXT + 1), num_buffers=KV_SLOTS)
    rows = counts(rows=ROWS)
    assert layers_s(MODEL, costs(1e12, overlap=True), rows, buffer) == pytest.approx(4 * 4 * 1.0)
    assert layers_s(MODEL, costs(1e12, overlap=True), rows) < 1.0


@pytest.mark.parametrize("rows", [1, 4096])
def test_host_work_is_hidden_if_steps_overlap(rows):
    given, steps = costs(1e-10, overlap=True), counts(rows=rows)
    overlapped = replace(given, steps_overlap=True)
    apart, together = (step_seconds(MODEL, each, steps)[0] for each in (given, overlapped))
    host_s = step_seconds(
        MODEL, replace(given, attention=Roofline(**FREE), ffn=Roofline(**FREE)), steps
    )[0]
    assert together == pytest.approx(max(host_s, apart - host_s))
    # layers are launched one after the other there
    buffer = KVBuffer(num_tokens=10**6, num_buffers=KV_SLOTS)
    assert step_seconds(MODEL, overlapped, steps, buffer) == step_seconds(
        MODEL, given, steps, buffer
    )
