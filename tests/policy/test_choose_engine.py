"""Where KV lives, and how many rows meet at the experts: by memory, costs and rows."""

from dataclasses import replace

import pytest

from raybatch.errors import CapacityError
from raybatch.policy.choose_engine import LEAST_GAIN, EngineInputs, choose_engine
from raybatch.policy.cost.layers import (
    KV_SLOTS,
    LayerShape,
    ModelShape,
    ModuleCosts,
    RowsAhead,
    RowShape,
)
from raybatch.policy.cost.roofline import Roofline, link

# a token of a layer is 1 kB
LAYER = LayerShape(
    model_dim=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_dim=192, num_experts=64, top_k=8
)
KB_LAYER = 1024
ROW = RowShape(prompt_tokens=100, output_tokens=28)
ROW_BYTES = 127 * KB_LAYER * 4


def roofline(flops, bytes_per_s):
    return Roofline(fixed_s=1e-6, operation_s=1 / flops, byte_s=1 / bytes_per_s)


def inputs(*, device_rows, host_rows, copy=1e10, layer=LAYER, num_rows=None, **changes):
    costs = ModuleCosts(
        attention=roofline(1e11, 1e10),
        ffn=roofline(1e11, 1e10),
        to_device=link(copy),
        to_host=link(copy),
        copies_overlap=False,
    )
    given = EngineInputs(
        model=ModelShape(layer=layer, num_layers=4),
        costs=costs,
        device_kv_bytes=int(device_rows * ROW_BYTES),
        host_kv_bytes=int(host_rows * ROW_BYTES),
        max_num_seqs=1024,
        token_budgets=(2048,),
        rows=RowsAhead(shape=ROW, num_rows=num_rows),
    )
    return replace(given, **changes)


def test_experts_that_are_read_for_few_rows_want_kv_in_host_memory():
    choice = choose_engine(inputs(device_rows=8, host_rows=512))
    assert choice.best.kv_offload
    assert choice.best.rows_together == 512
    # a buffer has half of the memory, of one of four layers
    assert choice.best.rows_attending == 8 * 127 * 4 // 2 // 114
    assert choice.runner_up.rows_together == 8
    assert choice.best.tokens_per_s > 1.5 * choice.runner_up.tokens_per_s
    assert "512 rows at once, 17 of them attending" in choice.reason


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("slow link", inputs(device_rows=8, host_rows=512, copy=1e8)),
        ("room for all", inputs(device_rows=512, host_rows=512)),
        # as blocks hold them
        ("few rows", inputs(device_rows=9, host_rows=512, num_rows=8)),
        ("few slots", inputs(device_rows=8, host_rows=512, max_num_seqs=8)),
        ("no host memory", inputs(device_rows=8, host_rows=0)),
    ],
)
def test_kv_stays_on_the_device_where_host_memory_gains_nothing(name, given):
    choice = choose_engine(given)
    assert not choice.best.kv_offload, name
    assert choice.best.rows_together == min(
        given.device_kv_bytes // ROW_BYTES, given.max_num_seqs, given.rows.num_rows or 10**9
    )


def test_a_gain_below_the_noise_is_not_worth_the_copies():
    # with more memory on the device, host memory gains less and less, and then nothing
    given = [inputs(device_rows=n, host_rows=512, num_rows=512) for n in range(8, 512, 6)]
    choices = [choose_engine(one) for one in given]
    near = [c for c in choices if not c.best.kv_offload and "not worth the copies" in c.reason]
    assert near
    for choice in near:
        gain = choice.runner_up.tokens_per_s / choice.best.tokens_per_s
        assert 1 < gain < 1 + LEAST_GAIN
    assert all(c.best.tokens_per_s * (1 + LEAST_GAIN) > c.runner_up.tokens_per_s for c in choices)


def test_long_answers_choose_what_suits_decoding():
    given = inputs(device_rows=8, host_rows=512)
    short = replace(given, rows=RowsAhead(shape=RowShape(prompt_tokens=126, output_tokens=2)))
    long = replace(given, rows=RowsAhead(shape=RowShape(prompt_tokens=2, output_tokens=126)))
    gains = [
        choice.best.tokens_per_s / choice.runner_up.tokens_per_s
        for choice in map(choose_engine, (short, long))
    ]
    assert gains[0] < gains[1]


def test_the_memory_that_holds_a_row_is_taken():
    # all layers of a row do not fit, one layer does
    choice = choose_engine(inputs(device_rows=0.9, host_rows=4))
    assert choice.best.kv_offload
    assert choice.runner_up is None
    assert "does not hold all layers of a row" in choice.reason
    choice = choose_engine(inputs(device_rows=2, host_rows=0.5))
    assert not choice.best.kv_offload
    with pytest.raises(CapacityError, match="100 prompt and 28 output tokens fits neither"):
        choose_engine(inputs(device_rows=0.3, host_rows=4))


# tokens of one row that fit the device, the host, and a buffer of one of four layers
MEMORY = {
    "host holds more": (160, 320, 320),
    "device holds more": (480, 160, 960),
    "a buffer holds less": (48, 1600, 96),
}


def in_memory(name, rows, *, copy, **changes):
    device, host, buffer = MEMORY[name]
    given = inputs(device_rows=1, host_rows=1, copy=copy, rows=rows, block_size=16, **changes)
    token_bytes = 4 * KB_LAYER
    given = replace(given, device_kv_bytes=device * token_bytes, host_kv_bytes=host * token_bytes)
    assert buffer == given.device_kv_bytes // KV_SLOTS // KB_LAYER
    return given


@pytest.mark.parametrize(
    ("name", "longest", "is_on_host"),
    [
        # one way holds it
        ("host holds more", 200, True),
        ("device holds more", 400, False),
        ("a buffer holds less", 90, True),
        # none does: the one that ends it last
        ("host holds more", 5000, True),
        ("device holds more", 5000, False),
        ("a buffer holds less", 5000, True),
    ],
)
@pytest.mark.parametrize("copy", [1e6, 1e13], ids=["slow-link", "fast-link"])
def test_no_row_ends_that_another_way_would_finish(name, longest, is_on_host, copy):
    shape = RowShape(prompt_tokens=30, output_tokens=10)
    rows = RowsAhead(shape=shape, num_rows=500, longest_tokens=longest)
    choice = choose_engine(in_memory(name, rows, copy=copy))
    assert {is_on_host} == {mode.kv_offload for mode in choice.candidates}


def test_larger_steps_that_leave_less_memory_for_a_row_are_not_taken():
    # a block of KV less with each
    given = {"token_budgets": (2048, 2064), "activation_bytes": 4 * KB_LAYER, "kv_offload": False}
    shape = RowShape(prompt_tokens=30, output_tokens=10)
    for longest, budgets in ((464, {2048, 2064}), (480, {2048}), (5000, {2048})):
        rows = RowsAhead(shape=shape, longest_tokens=longest)
        choice = choose_engine(in_memory("device holds more", rows, copy=1e9, **given))
        assert budgets == {mode.max_batched_tokens for mode in choice.candidates}


def test_memory_holds_whole_blocks_of_a_row():
    shape = RowShape(prompt_tokens=30, output_tokens=10)
    rows = RowsAhead(shape=shape, longest_tokens=165)
    given = in_memory("host holds more", rows, copy=1e13)
    # ten blocks and a bit on the host, eleven on the device
    given = replace(given, device_kv_bytes=176 * 4 * KB_LAYER, host_kv_bytes=170 * 4 * KB_LAYER)
    assert {False} == {mode.kv_offload for mode in choose_engine(given).candidates}


@pytest.mark.parametrize("shape", [(100, 900), (900, 100), (1, 4000), (4000, 1)])
@pytest.mark.parametrize(
    ("name", "is_on_host"),
    [("host holds more", True), ("device holds more", False), ("a buffer holds less", True)],
)
@pytest.mark.parametrize("copy", [1e6, 1e13], ids=["slow-link", "fast-link"])
def test_rows_that_nothing_holds_run_where_they_end_last(name, is_on_host, shape, copy):
    shape = RowShape(prompt_tokens=shape[0], output_tokens=shape[1])
    rows = RowsAhead(shape=shape, longest_tokens=5000, output_lengths=(1.0, 5000.0))
    given = in_memory(name, rows, copy=copy)
    assert {is_on_host} == {mode.kv_offload for mode in choose_engine(given).candidates}
    # without rows that were seen, these are a guess
    with pytest.raises(CapacityError):
        choose_engine(replace(given, rows=replace(rows, longest_tokens=0)))


def test_the_last_token_of_a_row_takes_no_memory():
    shape = RowShape(prompt_tokens=30, output_tokens=10)
    held = 160 * 4 * KB_LAYER
    for longest, places in ((161, {False, True}), (162, {True})):
        given = in_memory("host holds more", RowsAhead(shape=shape, longest_tokens=longest), copy=1)
        given = replace(given, device_kv_bytes=held, host_kv_bytes=2 * held)
        assert places == {mode.kv_offload for mode in choose_engine(given).candidates}
