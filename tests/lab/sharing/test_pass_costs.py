"""Costs of a decode pass from sizes of a model and rates of a GPU."""

import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import LayerShape, ModelShape
from raybatch.policy.cost.roofline import Roofline
from raybatch_extensions.sharing.decode_times import GpuRates
from raybatch_lab.sharing.pass_costs import PassCosts, split

LAYER = LayerShape(
    model_dim=64, num_heads=8, num_kv_heads=2, head_dim=8, ffn_dim=256, element_bytes=2
)
MODEL = ModelShape(layer=LAYER, num_layers=3, other_bytes=400, head_bytes=200)
RATES = GpuRates(bytes_per_s=1e9, flops=1e11, link_bytes_per_s=1e8)
ROOFLINE = Roofline(fixed_s=0.0, operation_s=1e-11, byte_s=1e-9)


def costs(**more):
    given = {"cached_tokens": 100, "module_s": 1e-5, "step_s": 1e-3, "shard_s": 1e-6}
    return PassCosts.of(MODEL, RATES, **{**given, **more})


def test_a_pass_is_the_sum_of_its_modules():
    plain = costs()
    for rows in (1, 7, 600):
        layer_s = plain.attention_s(rows) + plain.ffn_s(rows)
        assert plain.pass_s(rows) == pytest.approx(3 * layer_s + plain.rest_s(rows))
        assert plain.rest_s(rows) == pytest.approx(1e-3 + max(200 / 1e9, rows * 200 / 1e11))
    # weights of a block in 2 bytes each, and nothing else that counts
    assert plain.ffn_s(1) == pytest.approx(1e-5 + 3 * 64 * 256 * 2 / 1e9, rel=0.03)
    assert plain.ffn_s(0) == plain.attention_s(0) == 0


def test_tiles_take_what_the_block_takes_and_their_launches():
    plain = costs()
    for num_shards in (2, 4):
        shards_s = num_shards * plain.ffn_s(9, num_shards)
        assert shards_s == pytest.approx(plain.ffn_s(9) + (num_shards - 1) * 1e-6)
    assert plain.pass_s(9, 4) == pytest.approx(plain.pass_s(9) + 3 * 3 * 1e-6)


def test_several_gpus_add_up_rows_over_their_links():
    alone, pair = costs(reduce_s=2e-5), costs(tp=2, reduce_s=2e-5)
    assert alone.row_s == 0
    # half of a row goes to the other GPU and half of a sum comes back
    assert pair.row_s == pytest.approx(64 * 2 / 1e8)
    half = split(MODEL, 2).layer
    work_s = ROOFLINE.seconds(half.ffn_work(9))
    assert pair.ffn_s(9) == pytest.approx(1e-5 + 2e-5 + work_s + 9 * pair.row_s)
    assert alone.ffn_s(9) == pytest.approx(1e-5 + ROOFLINE.seconds(LAYER.ffn_work(9)))


def test_a_curve_of_costs_has_their_seconds_at_its_sizes():
    curve = costs().curve(100)
    assert (curve.rows[0], curve.rows[-1]) == (1, 100)
    assert curve.at(48) == pytest.approx(costs().pass_s(48))


def test_a_part_of_a_model_has_its_share_and_whole_kv_heads():
    half, eighth = split(MODEL, 2), split(MODEL, 8)
    assert 2 * half.layer.ffn_bytes == LAYER.ffn_bytes
    assert 2 * half.layer.attention_bytes == LAYER.attention_bytes
    assert (1, 1) == (half.layer.num_kv_heads, eighth.layer.num_kv_heads)
    assert (200, 100) == (half.other_bytes, half.head_bytes)
    with pytest.raises(ConfigError, match="tp must divide the 8 heads"):
        split(MODEL, 3)
