"""Time and memory of one plan, against sums by hand and against all layers laid out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.batches.forward_dag import critical_path, forward_dag, forward_time
from raybatch.policy.batches.layer_plan import (
    BatchPlan,
    LayerShape,
    ModelShape,
    Workload,
    memory_need,
)
from raybatch.policy.cost.roofline import Roofline, Work
from tests.policy.layers import MODEL, SPARSE, costs

DECODE = Workload(cached_tokens=100)
HERE = BatchPlan(attention_tokens=16, gate_tokens=40)
TINY = ModelShape(
    layer=LayerShape(
        model_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=6, num_experts=4, top_k=2
    ),
    num_layers=3,
    other_bytes=1000,
    num_pieces=2,
)


def attention_s(found, *sizes, workload=DECODE):
    return sum(found.attention.seconds(SPARSE.attention_work(n, workload)) for n in sizes)


def piece_s(found, tokens, num_pieces):
    whole = SPARSE.ffn_work(tokens)
    return found.ffn.seconds(
        Work(operations=whole.operations / num_pieces, moved_bytes=whole.moved_bytes / num_pieces)
    )


def load_s(found):
    return found.to_device.seconds(Work(operations=0, moved_bytes=SPARSE.ffn_bytes / 4))


def test_with_everything_on_the_device_a_pass_is_the_sum_of_its_runs():
    found = costs()
    layer_s = attention_s(found, 16, 16, 8) + piece_s(found, 40, 1)
    time = forward_time(MODEL, found, HERE, DECODE)
    assert pytest.approx(12 * layer_s) == time.seconds
    assert pytest.approx({"compute": 1.0}) == time.busy_fraction


def test_a_slow_link_bounds_a_layer_by_its_loads():
    found = costs(link_bytes_per_s=1e9)
    plan = replace(HERE, parameter_buffers=8)
    time = forward_time(MODEL, found, plan, DECODE)
    assert pytest.approx(4 * load_s(found)) == time.layer_s


def test_a_fast_link_hides_its_loads_behind_computing():
    found = costs(link_bytes_per_s=1e14, to_device=Roofline(fixed_s=0, operation_s=0, byte_s=1e-14))
    plan = replace(HERE, parameter_buffers=8)
    layer_s = attention_s(found, 16, 16, 8) + 4 * piece_s(found, 40, 4)
    assert pytest.approx(layer_s) == forward_time(MODEL, found, plan, DECODE).layer_s


def test_one_buffer_lets_a_load_wait_for_the_experts_before_it():
    found = costs(link_bytes_per_s=1e9)
    plan = replace(HERE, parameter_buffers=1)
    time = forward_time(MODEL, found, plan, DECODE)
    # the first piece loads beside attention, which is shorter; the others find no buffer
    assert pytest.approx(4 * (load_s(found) + piece_s(found, 40, 4))) == time.layer_s


def test_copies_that_take_the_processor_add_up():
    found = costs(copies_overlap=False)
    plan = replace(HERE, parameter_buffers=8, has_kv_on_host=True)
    kv = SPARSE.kv_bytes_per_token
    copies = [100 * kv * n for n in (16, 16, 8)] + [kv * n for n in (16, 16, 8)]
    copies_s = sum(found.to_device.seconds(Work(operations=0, moved_bytes=c)) for c in copies)
    layer_s = attention_s(found, 16, 16, 8) + 4 * (piece_s(found, 40, 4) + load_s(found))
    time = forward_time(MODEL, found, plan, DECODE)
    assert pytest.approx(12 * (layer_s + copies_s)) == time.seconds


def test_kv_on_the_host_is_restored_beside_attention():
    found = costs(link_bytes_per_s=1e9)
    plan = replace(HERE, has_kv_on_host=True)
    sizes = [100 * SPARSE.kv_bytes_per_token * n for n in (16, 16, 8)]
    restores_s = sum(found.to_device.seconds(Work(operations=0, moved_bytes=b)) for b in sizes)
    layer_s = forward_time(MODEL, found, plan, DECODE).layer_s
    assert pytest.approx(restores_s) == layer_s


def test_a_third_sub_batch_waits_for_the_slot_of_the_first():
    nodes = {
        n.name: n
        for n in forward_dag(
            MODEL, costs(), replace(HERE, has_kv_on_host=True), DECODE, num_layers=2
        )
    }
    assert () == nodes["0.restore.1"].after
    assert ("0.checkpoint.0",) == nodes["0.restore.2"].after
    assert ("0.checkpoint.1",) == nodes["1.restore.0"].after


def test_prefill_keeps_its_kv_and_restores_none():
    plan = replace(HERE, has_kv_on_host=True)
    prefill = Workload(tokens_per_sequence=8)
    names = [n.name for n in forward_dag(MODEL, costs(), plan, prefill, num_layers=2)]
    assert 6 == sum("checkpoint" in name for name in names)
    assert 0 == sum("restore" in name for name in names)


@pytest.mark.parametrize("buffers", [1, 2, 3, 4, 7, 8, 20])
@pytest.mark.parametrize("on_host", [False, True])
def test_every_node_comes_after_all_that_it_waits_for(buffers, on_host):
    plan = replace(HERE, parameter_buffers=buffers, has_kv_on_host=on_host)
    seen = set()
    loads = 0
    for current in forward_dag(MODEL, costs(), plan, DECODE, num_layers=3):
        assert set(current.after) <= seen
        seen.add(current.name)
        loads += "load" in current.name
    assert 3 * 4 == loads


@given(
    buffers=st.sampled_from((None, 1, 2, 3, 4, 8)),
    on_host=st.booleans(),
    overlap=st.booleans(),
    bandwidth=st.sampled_from((1e8, 1e9, 1e10, 1e11, 1e12)),
    attention=st.sampled_from((1, 3, 16, 40)),
)
@settings(max_examples=80, deadline=None)
def test_a_pass_takes_what_all_its_layers_laid_out_take(
    buffers, on_host, overlap, bandwidth, attention
):
    found = costs(link_bytes_per_s=bandwidth, copies_overlap=overlap)
    plan = BatchPlan(
        attention_tokens=attention,
        gate_tokens=40,
        parameter_buffers=buffers,
        has_kv_on_host=on_host,
    )
    model = replace(MODEL, num_layers=30)
    laid = critical_path(forward_dag(model, found, plan, DECODE, num_layers=30))
    assert pytest.approx(laid.seconds, rel=0.01) == forward_time(model, found, plan, DECODE).seconds


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_models_of_few_layers_are_laid_out_whole(num_layers):
    model = replace(MODEL, num_layers=num_layers)
    plan = replace(HERE, parameter_buffers=2)
    laid = critical_path(forward_dag(model, costs(), plan, DECODE, num_layers=num_layers))
    assert laid.seconds == forward_time(model, costs(), plan, DECODE).seconds


# of the tiny model: 4 bytes x (8 x 16 + 8 x 8) of attention, 4 x 4 x 3 x 6 x 8 of experts a layer
ATTENTION, EXPERTS = 3 * 768, 3 * 2304
# hidden states in and out; 10 x 2 rows of 2 x 6 + 8, more than attention takes
WORKSPACE = 4 * (2 * 10 * 8 + 10 * 2 * 20)


def test_everything_on_the_device_takes_no_memory_of_the_host():
    plan = BatchPlan(attention_tokens=4, gate_tokens=10)
    need = memory_need(TINY, plan, Workload(cached_tokens=20, reserved_tokens=9))
    kv = 10 * 30 * 32 * 3
    assert (1000 + ATTENTION + EXPERTS + kv + WORKSPACE, 0) == (need.device_bytes, need.host_bytes)
    assert kv == need.kv_bytes


def test_streamed_experts_leave_their_buffers_on_the_device():
    plan = BatchPlan(attention_tokens=4, gate_tokens=10, parameter_buffers=3)
    need = memory_need(TINY, plan, Workload(cached_tokens=20))
    kv = 10 * 21 * 32 * 3
    assert 1000 + ATTENTION + 3 * 1152 + kv + WORKSPACE == need.device_bytes
    assert EXPERTS == need.host_bytes


def test_kv_on_the_host_leaves_two_sub_batches_of_one_layer_on_the_device():
    plan = BatchPlan(attention_tokens=4, gate_tokens=10, has_kv_on_host=True)
    need = memory_need(TINY, plan, Workload(cached_tokens=20))
    assert 1000 + ATTENTION + EXPERTS + 2 * 4 * 21 * 32 + WORKSPACE == need.device_bytes
    assert 10 * 21 * 32 * 3 == need.host_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(HERE, attention_tokens=41), r"must be within 1\.\.40"),
        (lambda: replace(HERE, attention_tokens=0), "attention_tokens is 0"),
        (lambda: replace(HERE, parameter_buffers=0), "parameter_buffers is 0"),
        (lambda: replace(MODEL, num_pieces=65), r"within 1\.\.64"),
        (lambda: replace(MODEL, num_layers=0), "0 layers"),
    ],
)
def test_plans_and_models_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
