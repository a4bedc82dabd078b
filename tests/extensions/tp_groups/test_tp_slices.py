"""What a rank multiplies: slices in every layout, whose products make up those of the whole."""

from dataclasses import replace

import pytest
import torch

from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import ModelWeights, load_weights
from raybatch.kernels.linear import Linear, add_mlp_, linear
from raybatch.kernels.moe import moe_ffn
from raybatch.models.config import read_model_spec
from raybatch_extensions.tp_groups.slices import (
    cut,
    heads_of,
    spec_of,
    vocabulary_of,
    weights_of,
    why_not_cut,
)
from tests.engine.tiny_models import build

CPU = torch.device("cpu")
# heads and parts of feed-forward blocks that end with panels of 32 outputs, and such that do not
WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 192, "num_attention_heads": 4}
WIDE_EXPERTS = WIDE | {"moe_intermediate_size": 96}
NARROW = {"num_attention_heads": 4, "intermediate_size": 72}


@pytest.fixture(scope="module")
def weights_in(tmp_path_factory):
    """Weights of a model in a form, with its spec."""
    root, made = tmp_path_factory.mktemp("slices"), {}

    def get(variant, form, **options):
        key = variant, str(options)
        if key not in made:
            made[key] = root / str(len(made))
            build(variant, **options).save_pretrained(made[key])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAYBATCH_CACHE_DIR", str(root / "cache"))
            spec = read_model_spec(made[key])
            return load_weights(made[key], spec, form, device=CPU), spec

    return get


def rows(count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


FORMS = {
    "rows": WeightForm(torch.float32),
    "panels": WeightForm(torch.float32, panel_width=32),
    "bytes": WeightForm(torch.float32, panel_width=32, byte_dtype=torch.int8),
}


def linears_of(layer):
    """All linears of a dense layer."""
    shard = layer.ffn.shard
    return layer.attention.qkv, layer.attention.o, shard.gate_up, shard.down


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("options", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_dense_block_add_up_to_the_whole(form, options, size, weights_in):
    weights, spec = weights_in("llama-biases-tied", form, **options)
    block, hidden = weights.layers[1].ffn.shard, rows(5, spec.model_dim)
    expected = torch.zeros(5, spec.model_dim)
    add_mlp_(expected, hidden, block.gate_up, block.down)
    made = torch.zeros(5, spec.model_dim)
    for rank in range(size):
        own = weights_of(weights, spec, rank, size)[0].layers[1].ffn.shard
        add_mlp_(made, hidden, own.gate_up, own.down)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("options", [WIDE_EXPERTS, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("num_rows", [3, 200])
def test_parts_of_experts_add_up_to_the_whole(form, options, num_rows, weights_in):
    weights, spec = weights_in("qwen3-moe", form, **options)
    hidden = rows(num_rows, spec.model_dim)

    def of(ffn):
        return moe_ffn(
            hidden,
            ffn.router,
            ffn.shard.experts_gate_up,
            ffn.shard.experts_down,
            top_k=spec.moe.top_k,
            norm_topk_prob=spec.moe.norm_topk_prob,
            gate_up_scales=ffn.shard.experts_gate_up_scales,
            down_scales=ffn.shard.experts_down_scales,
        )

    parts = [weights_of(weights, spec, rank, 2)[0].layers[0].ffn for rank in range(2)]
    made = of(parts[0]) + of(parts[1])
    torch.testing.assert_close(made, of(weights.layers[0].ffn), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("options", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("size", [2, 4])
def test_heads_of_a_rank_are_those_of_the_whole(form, options, size, weights_in):
    weights, spec = weights_in("llama-biases-tied", form, **options)
    hidden, dim = rows(3, spec.model_dim), spec.head_dim
    whole = linear(hidden, weights.layers[0].attention.qkv).view(3, -1, dim)
    for rank in range(size):
        queries, keys = heads_of(spec, rank, size)
        own = weights_of(weights, spec, rank, size)[0].layers[0].attention
        made = linear(hidden, own.qkv).view(3, -1, dim)
        values = spec.num_heads + spec.num_kv_heads
        expected = torch.cat(
            [
                whole[:, queries],
                whole[:, spec.num_heads + keys.start : spec.num_heads + keys.stop],
                whole[:, values + keys.start : values + keys.stop],
            ],
            dim=1,
        )
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_parts_of_the_output_projection_add_up_with_one_bias(form, weights_in):
    weights, spec = weights_in("llama-biases-tied", form, **WIDE)
    attended = rows(3, spec.num_heads * spec.head_dim)
    made = torch.zeros(3, spec.model_dim)
    for rank in range(2):
        heads, _ = heads_of(spec, rank, 2)
        dims = slice(heads.start * spec.head_dim, heads.stop * spec.head_dim)
        made += linear(
            attended[:, dims], weights_of(weights, spec, rank, 2)[0].layers[0].attention.o
        )
    expected = linear(attended, weights.layers[0].attention.o)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("size", [2, 3, 6])
def test_vocabularies_of_ranks_make_up_that_of_the_model(form, size, weights_in):
    weights, spec = weights_in("llama-multi-query", form)
    normed = rows(3, spec.model_dim)
    parts = [linear(normed, weights_of(weights, spec, r, size)[0].head) for r in range(size)]
    torch.testing.assert_close(
        torch.cat(parts, dim=1), linear(normed, weights.head), rtol=1e-5, atol=1e-5
    )
    assert max(part.shape[1] for part in parts) == parts[0].shape[1]


def test_a_head_in_panels_is_not_copied(weights_in):
    weights, spec = weights_in("llama", FORMS["panels"])
    own, cost = weights_of(weights, spec, 0, 2)
    assert own.head.weight.data_ptr() == weights.head.weight.data_ptr()
    assert (
        0
        < cost.num_bytes
        < sum(part.weight.nbytes for layer in weights.layers for part in linears_of(layer))
    )


@pytest.mark.parametrize("form", ["panels", "bytes"])
def test_slices_that_end_with_panels_stay_in_panels(form, weights_in):
    weights, spec = weights_in("llama", FORMS[form], **WIDE)
    layer = weights_of(weights, spec, 1, 2)[0].layers[0]
    assert all(part.is_panelled for part in linears_of(layer))


def test_a_linear_that_lies_across_stays_so(weights_in):
    weights, spec = weights_in("llama", FORMS["rows"])
    layer = weights_of(weights, spec, 1, 2)[0].layers[0]
    assert all(
        part.weight.mT.is_contiguous()
        for part in (layer.attention.qkv, layer.attention.o, layer.ffn.shard.down)
    )


def test_ranks_beyond_the_kv_heads_have_one_of_them_each(weights_in):
    _, spec = weights_in("llama", FORMS["rows"])
    assert [(0, 1)] * 3 + [(1, 2)] * 3 == [
        (keys.start, keys.stop) for keys in (heads_of(spec, rank, 6)[1] for rank in range(6))
    ]
    assert (1, 1) == (
        spec_of(spec, 5, 6, slice(0, 9)).num_heads,
        spec_of(spec, 5, 6, slice(0, 9)).num_kv_heads,
    )


@pytest.mark.parametrize(
    ("size", "reason"),
    [(1, "at least 2"), (4, "6 query heads"), (3, "2 KV heads"), (2, None), (6, None)],
)
def test_a_model_that_cannot_be_cut_says_why(size, reason, weights_in):
    _, spec = weights_in("llama", FORMS["rows"])
    found = why_not_cut(spec, size)
    assert (found is None) if reason is None else reason in found


def test_a_block_that_is_smaller_than_the_tp_group_is_refused(weights_in):
    _, spec = weights_in("llama", FORMS["rows"])
    found = why_not_cut(replace(spec, ffn_dim=1), 2)
    assert "a linear of 1 outputs cannot be cut for 2 ranks" == found


@pytest.mark.parametrize("total", [7, 80, 96, 211])
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("unit", [1, 16, 32])
def test_parts_follow_each_other_without_gap(total, size, unit):
    parts = [cut(total, rank, size, unit) for rank in range(size)]
    assert [0, *(part.stop for part in parts[:-1])] == [part.start for part in parts]
    assert total == parts[-1].stop
    assert all(part.stop > part.start for part in parts)


def test_the_vocabulary_is_cut_at_panels():
    head = Linear(torch.zeros(7, 8, 32), 211)
    weights = ModelWeights(embed=head.weight, layers=(), norm=head.weight, head=head)
    assert [slice(0, 128), slice(128, 211)] == [vocabulary_of(weights, rank, 2) for rank in (0, 1)]
