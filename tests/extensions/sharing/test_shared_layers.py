"""Replicas that share feed-forward weights: same logits and bits, one copy of the weights."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.ops_choice import check_ops
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.weights.layout import has_data, packed_bytes
from raybatch.errors import ConfigError
from raybatch.kernels.dispatch import REFERENCE
from raybatch_extensions.sharing import weights as shared_weights
from raybatch_extensions.sharing.layers import SharedLayers
from raybatch_extensions.sharing.ownership import Ownership
from tests.engine.tiny_models import build
from tests.engine.weights.steps import prompt_logits
from tests.extensions.sharing.groups import ShardedLayers, Table, decoder_of, load_group

NUM_LAYERS = 5
# with biases, with experts in all layers, and in some
VARIANTS = ("llama-biases-tied", "qwen3-moe", "qwen3-moe-sparse-step")

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module", params=VARIANTS)
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    return folder


def group(size, by):
    return Ownership(size=size, num_layers=NUM_LAYERS, by=by)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("by", ["layer", "shard"])
@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_the_model_and_bits_those_of_its_shards(path, size, by, quantization):
    config = EngineConfig(device="cpu", dtype="float32", quantization=quantization)
    whole = load_model(str(path), config)
    expected = prompt_logits(decoder_of(whole), whole.spec)
    by_shards = ShardedLayers(whole.weights, group(size, by))
    bits = prompt_logits(decoder_of(whole, by_shards), whole.spec)
    models = load_group(path, group(size, by), configs=[config] * size)
    for model in models:
        decoder = decoder_of(model, model.placed)
        # the second pass finds what the first one has fetched ahead
        for _ in range(3):
            found = prompt_logits(decoder, model.spec)
            assert torch.equal(found, bits)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
        model.placed.buffers.check()
        assert model.placed.counters.num_restarts == 0
        model.placed.buffers.close()


@pytest.mark.parametrize("by", ["layer", "shard"])
@pytest.mark.parametrize("size", [2, 4])
def test_owned_shards_cover_the_model_once(path, size, by):
    whole = load_model(str(path), EngineConfig(device="cpu", dtype="float32"))
    models = load_group(path, group(size, by))
    ffn_bytes = sum(packed_bytes(layer.ffn.shard) for layer in whole.weights.layers)
    owned = [sum(map(packed_bytes, model.placed.owned.values())) for model in models]
    # tensors of shards are aligned
    assert ffn_bytes <= sum(owned) <= 1.2 * ffn_bytes
    for model in models:
        here = [layer for layer in model.weights.layers if has_data(layer.ffn.shard)]
        assert len(here) == len(model.placed.owned)
        units = {*model.placed.owned, *model.placed.sources}
        assert units == {*group(size, by).units()}
        assert model.placed.buffers.num_slots <= group(size, by).default_slots


def test_a_placeholder_that_is_read_raises(path):
    models = load_group(path, group(2, "layer"))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        prompt_logits(decoder_of(models[0]), models[0].spec)


@pytest.mark.parametrize("by", ["layer", "shard"])
def test_ops_are_chosen_by_the_shards_in_memory(path, by):
    for model in load_group(path, group(2, by)):
        checks = check_ops(
            replace(REFERENCE, rms_norm=lambda *args: REFERENCE.rms_norm(*args)),
            model.spec,
            model.weights,
            block_size=4,
            kv_dtype=torch.float32,
        )
        assert all(check.agrees and not check.failure for check in checks)


def test_a_pass_fetches_each_shard_of_peers_once(path):
    model = load_group(path, group(4, "shard"))[1]
    decoder, shared = decoder_of(model, model.placed), model.placed
    assert isinstance(shared, SharedLayers)
    fetches = group(4, "shard").fetches(1)
    for num_passes in range(1, 4):
        prompt_logits(decoder, model.spec)
        # after all copies that have begun
        shared.buffers.copier._thread.submit(int).result()
        ahead = shared.buffers.num_slots
        assert shared.counters.num_copies == num_passes * len(fetches) + ahead
    one_pass = sum(packed_bytes(shared.sources[unit]) for unit in fetches)
    assert shared.counters.num_bytes <= 4 * one_pass


@pytest.mark.parametrize("by", ["layer", "shard"])
def test_no_rank_waits_for_the_progress_of_another_one(path, by):
    slow, quick = load_group(path, group(2, by))
    decoders = [decoder_of(model, model.placed) for model in (slow, quick)]
    expected = prompt_logits(decoders[1], quick.spec)
    is_in_step, goes_on = threading.Event(), threading.Event()

    def stops(unit, *, plain=slow.placed._lent):
        """Stop in the middle of a layer of the slow rank."""
        if unit.layer == 2:
            is_in_step.set()
            goes_on.wait(60)
        return plain(unit)

    slow.placed._lent = stops
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(prompt_logits, decoders[0], slow.spec)
        assert is_in_step.wait(60)
        found = [prompt_logits(decoders[1], quick.spec) for _ in range(5)]
        assert not late.done()
        goes_on.set()
        assert torch.equal(late.result(), expected)
    assert all(torch.equal(logits, expected) for logits in found)


def test_ranks_that_differ_are_refused(path):
    configs = [EngineConfig(device="cpu", quantization=form) for form in (None, "int8")]
    with pytest.raises(ConfigError, match=r"replicas \d and \d of a weight-sharing group differ"):
        load_group(path, group(2, "layer"), configs=configs)


def test_too_few_slots_are_refused_with_the_number(path):
    with pytest.raises(ConfigError, match=r"engine\.weight_buffers is 2, .* at least 3"):
        load_group(path, group(4, "layer"), num_slots=2)


def test_no_rank_continues_before_all_have_opened_the_segments_of_peers(tmp_path, monkeypatch):
    build("qwen3", num_hidden_layers=3).save_pretrained(tmp_path)
    seen = []

    def opening(handle, device, *, plain=shared_weights.open_segment):
        seen.append(("opened", threading.get_ident()))
        return plain(handle, device)

    def exchanging(table, rank, text, *, plain=Table.exchange):
        # returns once all ranks have reached it
        seen.append(("came", threading.get_ident()))
        return plain(table, rank, text)

    monkeypatch.setattr(shared_weights, "open_segment", opening)
    monkeypatch.setattr(Table, "exchange", exchanging)
    load_group(tmp_path, Ownership(size=3, num_layers=3))
    for thread in {thread for _, thread in seen}:
        assert [what for what, by in seen if by == thread] == ["came", "opened", "opened", "came"]


def test_a_model_that_cannot_be_cut_is_refused(tmp_path):
    build("qwen3-moe", num_hidden_layers=2, num_experts=3).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="at most 3 shards, not into 4"):
        load_group(tmp_path, Ownership(size=4, num_layers=2, by="shard"))
