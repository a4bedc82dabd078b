"""Memory of GPUs with replicated and shared weights, compared with tensors and the paper."""

import math
from dataclasses import replace

import pytest

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import needed_tensors
from raybatch_extensions.sharing.decode_times import DecodeCurve
from raybatch_extensions.sharing.ownership import Ownership, default_share_by, max_shards
from raybatch_lab.sharing.memory_plan import (
    GpuBudget,
    ModelBytes,
    batch_bounds,
    copied_bytes,
    owned_bytes,
    pays,
    plan_memory,
)
from tests.policy.paper_models import LLAMA_3_1_70B, QWEN2_5_72B, QWEN3_32B, sparse, spec

# a GPU of table 1 of the paper; vLLM's default utilisation, and an assumed reserve
H20 = GpuBudget(gpu_bytes=144 * 10**9)
MODELS = {"qwen3": QWEN3_32B, "qwen2.5": QWEN2_5_72B, "llama": LLAMA_3_1_70B, "moe": sparse()}
SMALL = ModelBytes(
    attention_bytes=(40,) * 4,
    ffn_bytes=(800,) * 4,
    other_bytes=100,
    kv_bytes_per_token=16,
    num_heads=8,
    num_kv_heads=2,
    ffn_dim=64,
    max_shards=8,
)
GPU = GpuBudget(gpu_bytes=4000, utilisation=1.0, reserve_bytes=0)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_tensors_that_a_checkpoint_needs(name):
    of, tensors = ModelBytes.of(MODELS[name], element_bytes=4), needed_tensors(MODELS[name], ())
    bytes_of = {name: 4 * math.prod(shape) for name, shape in tensors.items()}
    is_ffn = {name for name in tensors if ".mlp." in name and ".mlp.gate." not in name}
    for layer in range(of.num_layers):
        here = {name for name in tensors if name.startswith(f"model.layers.{layer}.")}
        assert of.ffn_bytes[layer] == sum(bytes_of[name] for name in here & is_ffn)
        assert of.attention_bytes[layer] == sum(bytes_of[name] for name in here - is_ffn)
    assert of.weight_bytes == sum(bytes_of.values())


def test_biases_count():
    with_biases = spec(2, vocab_size=9, model_dim=8, ffn_dim=16, has_mlp_bias=True, has_o_bias=True)
    assert ModelBytes.of(with_biases).weight_bytes == 2 * sum(
        math.prod(shape) for shape in needed_tensors(with_biases, ()).values()
    )


def test_models_have_their_published_parameters():
    published = {"qwen3": 32_762_123_264, "qwen2.5": 72_706_203_648, "llama": 70_553_706_496}
    for name, parameters in published.items():
        of = ModelBytes.of(MODELS[name])
        assert of.weight_bytes == 2 * parameters
    # 77 % of Qwen3-32B are feed-forward weights (section 2.1)
    of = ModelBytes.of(QWEN3_32B)
    assert sum(of.ffn_bytes) / of.weight_bytes == pytest.approx(0.77, abs=0.005)


@pytest.mark.parametrize(
    ("model", "tp", "size", "paper"),
    [
        # section 5.2 says about 5 % of the first, some 1.7 of the others and up to 1.8 of all
        (QWEN3_32B, 4, 2, 1.06),
        (LLAMA_3_1_70B, 2, 4, 1.76),
        (QWEN2_5_72B, 2, 4, 1.81),
    ],
    ids=["Qwen3-32B TP4 DP2", "Llama-70B TP2 DP4", "Qwen-72B TP2 DP4"],
)
@pytest.mark.parametrize("reserve", [5, 6, 7])
def test_groups_hold_as_much_kv_as_those_of_the_paper(model, tp, size, paper, reserve):
    budget = replace(H20, reserve_bytes=reserve * 10**9)
    plan = plan_memory(ModelBytes.of(model), budget, tp=tp, size=size)
    assert plan.kv_ratio == pytest.approx(paper, abs=0.05)


@pytest.mark.parametrize("model", [LLAMA_3_1_70B, QWEN2_5_72B])
def test_replicas_of_a_large_model_do_not_fit_one_gpu_but_a_group_does(model):
    plan = plan_memory(ModelBytes.of(model), H20, tp=1, size=8)
    assert "weights need 14" in plan.replicated.problem
    assert "of 123.6 GB usable" in plan.replicated.problem
    assert plan.kv_ratio is None
    assert plan.shared.kv_tokens > plan.replicated.kv_tokens
    assert plan.shared.kv_tokens > 100_000


def test_a_small_plan_equals_a_count_by_hand():
    plan = plan_memory(SMALL, GPU, tp=1, size=2)
    # 4 layers of 840 bytes and 100 others
    assert (3460, 0, 540 // 16) == (
        plan.replicated.weight_bytes,
        plan.replicated.slot_bytes,
        plan.replicated.kv_tokens,
    )
    # 260 resident, 2 of 4 layers owned, 2 slots of a layer or 4 of half a layer
    for layout, num_slots in ((plan.by_layer, 2), (plan.by_shard, 4)):
        assert (260 + 1600, 1600, num_slots) == (
            layout.weight_bytes,
            layout.slot_bytes,
            layout.num_slots,
        )
        assert (4000 - 3460) // 16 == layout.kv_tokens
        assert layout.rows(10) == 3
    assert plan.kv_ratio == 1.0


def test_a_split_divides_weights_and_kv_up_to_the_number_of_heads():
    whole, halves = (plan_memory(SMALL, GPU, tp=tp, size=4) for tp in (1, 2))
    assert whole.shared.device_bytes == 2 * halves.shared.device_bytes
    assert [SMALL.kv_token_bytes(tp) for tp in (1, 2, 4, 8)] == [16, 8, 8, 8]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_larger_group_holds_more_where_slots_do_not_grow(name, tp):
    model, gpu = ModelBytes.of(MODELS[name]), GpuBudget(gpu_bytes=10**12)
    tokens = [plan_memory(model, gpu, tp=tp, size=size).by_shard.kv_tokens for size in (2, 4, 8)]
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]


@pytest.mark.parametrize(("size", "by"), [(2, "layer"), (3, "shard"), (8, "shard"), (16, "layer")])
def test_engines_cut_blocks_where_plans_do(size, by):
    # of 8 experts
    model = sparse((True,) * 16)
    assert default_share_by(max_shards(model), size) == by
    plan = plan_memory(ModelBytes.of(model), replace(GPU, gpu_bytes=10**9), tp=1, size=size)
    assert plan.shared.by == by
    assert ("at most 8 shards, not into 16" in plan.by_shard.problem) == (size == 16)


@pytest.mark.parametrize("by", ["layer", "shard"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_own_the_model_once_and_copy_the_rest(size, by):
    model = ModelBytes.of(sparse((True, False, True, True, False)))
    owned = owned_bytes(model, Ownership(size=size, num_layers=5, by=by), tp=2)
    # shards are rounded up to whole bytes
    assert sum(owned) == pytest.approx(sum(model.ffn_bytes) / 2, abs=5 * size)
    even = ModelBytes.of(LLAMA_3_1_70B)
    if by == "layer" and size in (2, 8):
        copied = copied_bytes(even, tp=2, size=size)
        assert copied == sum(even.ffn_bytes) // 2 * (size - 1) // size


def test_the_largest_owner_decides_what_all_hold_and_the_smallest_what_they_copy():
    odd = replace(SMALL, attention_bytes=(40,) * 5, ffn_bytes=(800,) * 5)
    # rank 0 owns layers 0, 2 and 4; rank 1 copies these
    assert plan_memory(odd, GPU, tp=1, size=2).by_layer.weight_bytes == 5 * 40 + 100 + 3 * 800
    assert copied_bytes(odd, tp=1, size=2) == 3 * 800


def test_shards_are_chosen_if_they_need_fewer_bytes():
    large = replace(GPU, gpu_bytes=8000)
    fewer = plan_memory(SMALL, large, tp=1, size=4)
    assert (fewer.shared, fewer.shared.by) == (fewer.by_shard, "shard")
    assert "by layer weights and slots need 0.00 GB more" in fewer.reason
    # with two ranks both take the same number of bytes
    assert plan_memory(SMALL, large, tp=1, size=2).shared.by == "layer"
    # engines without shards
    whole = plan_memory(SMALL, large, tp=1, size=4, shares_shards=False)
    assert whole.shared == whole.by_layer
    assert whole.reason == "by shard weights and slots need 0.00 GB less"


def test_an_impossible_ownership_has_a_reason():
    plan = plan_memory(SMALL, GPU, tp=1, size=4, num_slots=2)
    assert plan.by_layer.problem == "by layer a rank needs at least 3 slots, got 2"
    assert (plan.shared, plan.by_layer.kv_tokens) == (plan.by_shard, 0)
    assert plan.reason == f"not possible by layer: {plan.by_layer.problem}"
    # 4 slots of a layer are 3,200 bytes, 8 shards 1,600
    tight = plan_memory(SMALL, replace(GPU, gpu_bytes=3000), tp=1, size=4)
    assert "no memory for KV" in tight.by_layer.problem
    assert tight.shared == tight.by_shard
    # engines do not choose the other one then
    whole = plan_memory(SMALL, replace(GPU, gpu_bytes=3000), tp=1, size=4, shares_shards=False)
    assert whole.reason == whole.shared.problem == whole.by_layer.problem
    none = plan_memory(SMALL, replace(GPU, gpu_bytes=500), tp=1, size=4)
    assert none.replicated.problem
    assert none.shared.problem == none.reason


def test_what_cannot_be_split_or_shared_is_refused():
    with pytest.raises(ConfigError, match="tp must divide the 8 heads"):
        plan_memory(SMALL, GPU, tp=3, size=2)
    with pytest.raises(ConfigError, match="divide the 3 KV heads"):
        plan_memory(replace(SMALL, num_kv_heads=3), GPU, tp=2, size=2)
    with pytest.raises(ConfigError, match="must be at least 2, got 1"):
        plan_memory(SMALL, GPU, tp=1, size=1)


@pytest.mark.parametrize(
    "wrong", [{"gpu_bytes": 0}, {"utilisation": 0}, {"utilisation": 1.1}, {"reserve_bytes": -1}]
)
def test_a_wrong_budget_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GpuBudget(**{"gpu_bytes": 1, **wrong})


def test_a_model_without_layers_or_kv_is_refused():
    with pytest.raises(ConfigError, match="got 4 and 3"):
        replace(SMALL, ffn_bytes=(1, 1, 1))
    with pytest.raises(ConfigError, match=r"kv_bytes_per_token .* got 0"):
        replace(SMALL, kv_bytes_per_token=0)


def test_bounds_are_those_of_the_curve_and_the_link():
    curve = DecodeCurve(rows=(1.0, 64.0, 256.0), seconds=(0.02, 0.02, 0.08))
    bounds = batch_bounds(curve, pass_bytes=4e9, link_bytes_per_s=1e11)
    assert (bounds.fetch_s, bounds.hiding_rows, bounds.saturation_rows) == (0.04, 128, 64)
    assert batch_bounds(curve, 1e12, 1e11).hiding_rows is None
    with pytest.raises(ConfigError, match="link_bytes_per_s must be above 0, got 0"):
        batch_bounds(curve, 1, 0)


def test_fetching_all_of_llama_has_the_time_of_figure_9():
    # Fetch-1 and Fetch-2 are of all feed-forward weights at TP=2, by NVLink 4 and 5
    half = sum(ModelBytes.of(LLAMA_3_1_70B).ffn_bytes) / 2
    assert [round(1e3 * half / rate) for rate in (450e9, 900e9)] == [125, 63]


def test_sharing_pays_if_a_job_is_5_percent_faster_or_impossible_otherwise():
    assert pays(10.5, 10.0)
    assert not pays(10.4, 10.0)
    assert not pays(9.0, 10.0)
    assert pays(None, 10.0)
