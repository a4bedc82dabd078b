"""Profiles of tiny models measure the counts and shapes that the decoder computes."""

from dataclasses import replace

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.engine.profile.module_profile import (
    AttentionBatch,
    ProfileOptions,
    model_shape,
    probe_decoder,
    profile_layer,
    profile_options,
)
from raybatch.engine.weights.layout import WeightForm, tensors_of
from raybatch.engine.weights.loading import load_weights
from raybatch.errors import ConfigError
from raybatch.kernels.byte_numbers import dequantise
from raybatch.models.config import read_model_spec
from raybatch.policy.cost.layers import Workload
from tests import tolerances
from tests.engine.tiny_models import TOLERANCE, build

CPU = torch.device("cpu")
OPTIONS = ProfileOptions(
    workloads=(Workload(cached_tokens=20), Workload(cached_tokens=3)),
    attention_tokens=(8, 1),
    prompts=(Workload(tokens_per_sequence=4),),
    prompt_tokens=(8, 2),
    ffn_tokens=(1, 16, 4),
    block_size=16,
)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The spec and weights of a variant, with a cache folder for this module."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(folder / "cache"))

        def loaded(variant, byte_dtype=None):
            path = folder / variant
            if not path.exists():
                build(variant).save_pretrained(path)
            spec, form = read_model_spec(path), WeightForm(torch.float32, byte_dtype=byte_dtype)
            return spec, load_weights(path, spec, form, device=CPU)

        yield loaded


class TickingClock:
    """A clock that advances by a second per read."""

    def __init__(self):
        self.reads = 0

    def __call__(self):
        self.reads += 1
        return float(self.reads)


def profile(loaded, options=OPTIONS, **changes):
    options = replace(options, **({"budget_s": 1e9} | changes))
    return profile_layer(*loaded, options, clock=TickingClock())


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen2"])
def test_every_size_is_measured_once_with_its_work(load, variant):
    found = profile(load(variant))
    layer = found.model.layer
    assert [1, 4, 16] == [point.tokens for point in found.ffn]
    assert [layer.ffn_work(n) for n in (1, 4, 16)] == [point.work for point in found.ffn]
    kinds = [(n, workload) for n in (1, 8) for workload in OPTIONS.workloads]
    assert [n for n, _ in kinds] == [point.tokens for point in found.attention]
    works = [layer.attention_work(n, workload) for n, workload in kinds]
    assert works == [point.work for point in found.attention]
    of_prompts = [layer.attention_work(n, OPTIONS.prompts[0]) for n in (2, 8)]
    assert of_prompts == [point.work for point in found.prompts]
    assert len(found.to_device) == len(found.to_host) == 3
    assert all(point.seconds > 0 for point in (*found.attention, *found.ffn, *found.to_device))


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen2"])
def test_8_bit_weights_count_as_bytes(load, variant):
    floats, found = (profile(load(variant, dtype)) for dtype in (None, torch.int8))
    assert replace(floats.model.layer, weight_bytes=1) == found.model.layer
    assert 4 * found.model.layer.attention_bytes == floats.model.layer.attention_bytes
    assert floats.model.other_bytes == found.model.other_bytes


def test_the_shape_is_that_of_the_sparse_layers(load):
    spec, weights = load("qwen3-moe-mlp-only-layers")
    layer = model_shape(spec, dtype=torch.float32).layer
    sparse = weights.layers[0]
    experts = sum(x.numel() for x in tensors_of(sparse.ffn.shard))
    assert 4 * experts == layer.ffn_bytes
    assert (
        4 * (sparse.attention.qkv.weight.numel() + sparse.attention.o.weight.numel())
        == layer.attention_bytes
    )
    assert (8, 3) == (layer.num_experts, layer.top_k)


def test_the_shape_of_a_dense_model_has_one_expert(load):
    spec, weights = load("qwen2")
    model = model_shape(spec, dtype=torch.float32)
    dense = weights.layers[0].ffn.shard
    assert 4 * (dense.gate_up.weight.numel() + dense.down.weight.numel()) == model.layer.ffn_bytes
    assert 4 * (weights.embed.numel() + weights.head.weight.numel()) == model.other_bytes
    assert (1, 1, 3) == (model.layer.num_experts, model.layer.top_k, model.num_layers)


def test_attention_is_measured_over_the_kv_that_an_engine_keeps(load):
    spec, weights = load("qwen3-moe")
    config = EngineConfig(kv_cache_dtype="int8")
    assert "int8" == profile_options(config).kv_cache_dtype
    found = profile((spec, weights), kv_cache_dtype="int8", attention_tokens=(8,), ffn_tokens=(1,))
    assert 2 * spec.num_kv_heads * (spec.head_dim + 4) == found.model.layer.kv_bytes_per_token
    assert 2 * spec.num_kv_heads * spec.head_dim * 4 == (
        model_shape(spec, dtype=torch.float32).layer.kv_bytes_per_token
    )
    batch = AttentionBatch.build(
        probe_decoder(spec, weights, weights.layers),
        spec,
        3,
        Workload(cached_tokens=20),
        like=weights.embed,
        block_size=16,
        kv_dtype=torch.int8,
    )
    assert torch.int8 == batch.cache.k.dtype
    assert 0.5 < float(dequantise(batch.cache.k, spec.head_dim, torch.float32).std()) < 1.5


def test_tied_tables_count_once(load):
    spec, _ = load("qwen3-tied-attention-bias")
    assert 4 * 211 * 48 == model_shape(spec, dtype=torch.float32).other_bytes


def test_runs_take_turns_over_the_layers_of_the_representative_kind(load, monkeypatch):
    seen = []
    run = Decoder.ffn_

    def noted(decoder, layer_idx, x):
        seen.append((decoder.num_layers, layer_idx, len(x)))
        run(decoder, layer_idx, x)

    monkeypatch.setattr(Decoder, "ffn_", noted)
    profile(load("qwen3-moe-mlp-only-layers"), ffn_tokens=(2,), num_repeats=3)
    # one warm-up run and three measured ones, over the two sparse ones of three layers
    assert [(2, 0, 2), (2, 1, 2), (2, 0, 2), (2, 1, 2)] == seen[:4]


def test_sizes_beyond_the_budget_are_left_out_but_never_the_smallest(load):
    # a run takes a tick; three samples and the first run make a size
    found = profile(load("qwen3-moe"), budget_s=0.0)
    assert (1, 1, 1) == tuple(map(len, (found.attention, found.prompts, found.ffn)))
    found = profile(load("qwen3-moe"), budget_s=60.0)
    assert (1, 1) == (found.ffn[0].tokens, found.attention[0].tokens)
    assert 1 < len(found.ffn) < 3


def test_all_sizes_of_copies_are_measured_whatever_the_budget(load):
    found = profile(load("qwen3-moe"), budget_s=0.0)
    assert (3, 3) == (len(found.to_device), len(found.to_host))


def test_batches_whose_kv_is_too_large_are_left_out(load):
    # a token has 256 bytes of KV in each of three layers
    found = profile(load("qwen3-moe"), max_kv_bytes=32 * 3 * 256)
    assert [1, 1, 8] == [point.tokens for point in found.attention]
    assert found.attention[-1].work == found.model.layer.attention_work(8, OPTIONS.workloads[1])


def test_costs_are_fitted_to_all_four_measurements(load):
    found = profile(load("qwen3-moe"))
    costs = found.costs()
    # every run takes one tick of the clock
    assert pytest.approx(1.0) == costs.ffn.seconds(found.ffn[0].work)
    assert pytest.approx(1.0) == costs.to_device.seconds(found.to_device[0].work)
    assert not costs.copies_overlap


@pytest.mark.parametrize(
    "wrong", [{"ffn_tokens": ()}, {"workloads": ()}, {"num_repeats": 0}, {"attention_tokens": (0,)}]
)
def test_a_profile_of_nothing_is_refused(wrong):
    with pytest.raises(ConfigError, match="profile"):
        replace(OPTIONS, **wrong)


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen2", "llama-biases-tied"])
@pytest.mark.parametrize(
    ("tokens", "workload"),
    [
        (5, Workload(cached_tokens=20)),
        (5, Workload(cached_tokens=15)),
        (7, Workload(tokens_per_sequence=3)),
    ],
    ids=["decode", "decode-full-block", "prefill"],
)
def test_modules_that_are_measured_compute_what_the_decoder_does(load, variant, tokens, workload):
    spec, weights = load(variant)
    decoder = probe_decoder(spec, weights, weights.layers)
    batch = AttentionBatch.build(decoder, spec, tokens, workload, like=weights.embed, block_size=16)
    token_ids = torch.arange(tokens) + 3
    # layers of a whole forward pass have separate KV
    cache = KVCache(k=batch.cache.k.contiguous(), v=batch.cache.v.contiguous())
    forward = replace(batch.prepared.batch, token_ids=token_ids)
    expected = Decoder(spec, weights).forward(forward, cache)
    x = weights.embed[token_ids]
    for layer_idx in range(spec.num_layers):
        x = replace(batch, x=x).run(decoder, layer_idx)
        decoder.ffn_(layer_idx, x)
    tolerances.assert_close(decoder.logits(x), expected, TOLERANCE)


def test_decoding_sequences_see_what_is_cached_and_their_own_token(load):
    spec, weights = load("qwen3-moe")
    workload = Workload(cached_tokens=20)
    decoder = probe_decoder(spec, weights, weights.layers)
    batch = AttentionBatch.build(decoder, spec, 3, workload, like=weights.embed, block_size=16)
    forward = batch.prepared.batch
    decode = forward.attention.decode
    assert [20, 20, 20] == forward.positions.tolist()
    assert [20, 52, 84] == forward.slot_mapping.tolist()
    assert [0, 1, 2, 3, 4, 5] == decode.block_ids.tolist()
    assert [0, 0, 1, 1, 2, 2] == decode.owners.tolist()
    assert [16, 5] * 3 == decode.num_valid.tolist()


def test_prompts_see_themselves(load):
    spec, weights = load("qwen3-moe")
    workload = Workload(tokens_per_sequence=4)
    decoder = probe_decoder(spec, weights, weights.layers)
    batch = AttentionBatch.build(decoder, spec, 6, workload, like=weights.embed, block_size=16)
    forward = batch.prepared.batch
    assert [0, 1, 2, 3, 0, 1] == forward.positions.tolist()
    assert [0, 1, 2, 3, 16, 17] == forward.slot_mapping.tolist()
    assert ((0, 4), (4, 2)) == (forward.attention.prefill.starts, forward.attention.prefill.lens)
