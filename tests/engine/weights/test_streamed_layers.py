"""Models whose weights do not fit: streamed layers give the same tokens."""

import dataclasses
import logging
import math
import random

import numpy as np
import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.profile.module_profile import profile_layer
from raybatch.engine.sampling.sampler import Sampler
from raybatch.engine.weights.layer_store import StreamedLayers
from raybatch.engine.weights.layout import packed_bytes, tensors_of
from raybatch.engine.weights.weight_copies import HostCopies
from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import full_step_tokens
from tests.engine.fakes import FakeStopChecker
from tests.engine.profile.test_module_profile import OPTIONS, TickingClock
from tests.engine.test_runtime import NUM_TOKENS, AnyOrder, finish, make_engine, requests, tokens_of
from tests.engine.tiny_models import build

CPU = torch.device("cpu")
NUM_LAYERS = 5
# with biases, with experts in all layers, and in some
VARIANTS = ("qwen2", "qwen3-moe", "qwen3-moe-sparse-step")

pytestmark = pytest.mark.usefixtures("shared_cache")


def held_bytes(store):
    """Return the bytes of the buffers and of the resident layers on the device."""
    stays = zip(store.layers, store._placement.is_resident, strict=True)
    return store.buffers.num_bytes + sum(
        packed_bytes(layer.ffn.shard) for layer, kept in stays if kept
    )


@pytest.fixture(scope="module", params=VARIANTS)
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    build("qwen3", num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    return folder


def sizes_of(path):
    return load_model(str(path), EngineConfig(device="cpu")).sizes


def budget(path, num_resident, buffers):
    """Return a budget for this number of the largest layers and of buffers."""
    sizes = sizes_of(path)
    return sizes.other_bytes + (num_resident + buffers) * max(sizes.ffn_bytes)


def run(path, **options):
    engine, runner = make_engine(path, **options)
    engine.add(requests())
    return tokens_of(finish(engine)), engine.stats(), runner


@pytest.fixture(scope="module")
def resident(path):
    """Tokens of the model with all of its weights on the device."""
    found, stats, _ = run(path)
    assert (stats.num_weight_copies, stats.weight_copy_bytes) == (0, 0)
    return found


@pytest.mark.parametrize("part_blocks", [None, 8], ids=["forward", "coroutines"])
@pytest.mark.parametrize(
    ("num_resident", "buffers"), [(0, 1), (0, 2), (0, 4), (1, 2), (2, 2), (3, 1), (3, 2)]
)
def test_greedy_tokens_are_those_of_the_resident_model(
    path, resident, buffers, num_resident, part_blocks
):
    found, stats, runner = run(
        path,
        part_blocks=part_blocks,
        device_weight_bytes=budget(path, num_resident, buffers),
        weight_buffers=buffers,
    )
    assert resident == found
    streamed = load_model(str(path), runner.config).placement.streamed
    assert (num_resident + buffers < NUM_LAYERS) >= bool(streamed)
    # one copy of a layer serves all rows of a step
    assert stats.num_steps * len(streamed) == stats.num_weight_copies
    assert stats.num_weight_stalls == stats.num_weight_copies


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_8_bit_weights_are_streamed_with_their_scales(path, form):
    expected, _, _ = run(path, quantization=form)
    config = EngineConfig(device="cpu", quantization=form)
    sizes = load_model(str(path), config).sizes
    least = sizes.other_bytes + 2 * max(sizes.ffn_bytes)
    found, stats, runner = run(path, quantization=form, device_weight_bytes=least)
    assert expected == found
    assert stats.num_weight_copies > 0
    model = load_model(str(path), runner.config)
    store = StreamedLayers(model.weights.layers, model.placement, CPU)
    assert held_bytes(store) + sizes.other_bytes == model.placement.device_bytes <= least


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_firing_gives_the_same_tokens(path, resident, seed):
    found, stats, _ = run(
        path, choose=AnyOrder(seed), part_blocks=1, device_weight_bytes=budget(path, 0, 2)
    )
    assert resident == found
    # rows are in many layers at once, which only costs copies
    assert stats.num_weight_copies > 2 * stats.num_steps * NUM_LAYERS


def test_random_tokens_are_those_of_the_resident_model(dense):
    def drawn(**options):
        engine, _ = make_engine(dense, **options)
        engine.add(requests(temperature=0.8, top_p=0.9))
        return tokens_of(finish(engine))

    assert drawn() == drawn(device_weight_bytes=budget(dense, 0, 2))


def test_the_bytes_that_are_copied_are_those_of_the_layers(path):
    _, stats, runner = run(path, device_weight_bytes=budget(path, 0, 2))
    model = load_model(str(path), runner.config)
    whole = sum(tensor.nbytes for x in model.weights.layers for tensor in tensors_of(x.ffn.shard))
    assert stats.num_steps * whole == stats.weight_copy_bytes


def test_the_device_holds_no_more_than_planned(path):
    for num_resident in (0, 1):
        config = EngineConfig(
            device="cpu", device_weight_bytes=budget(path, num_resident, 2), weight_buffers=2
        )
        model = load_model(str(path), config)
        store = StreamedLayers(model.weights.layers, model.placement, CPU)
        assert held_bytes(store) + model.sizes.other_bytes == model.placement.device_bytes
        assert model.placement.device_bytes <= config.device_weight_bytes


def test_a_budget_below_the_buffers_is_refused_by_name(dense):
    sizes = sizes_of(dense)
    least = sizes.other_bytes + 2 * max(sizes.ffn_bytes)
    with pytest.raises(
        ConfigError, match=rf"device_weight_bytes is {least - 1}, but must be at least {least}:"
    ):
        make_engine(dense, device_weight_bytes=least - 1)
    make_engine(dense, device_weight_bytes=least)


def test_the_log_has_the_streamed_layers_and_their_cost(dense, caplog):
    with caplog.at_level(logging.INFO, logger="raybatch.engine.loading.loaded_model"):
        make_engine(dense, device_weight_bytes=budget(dense, 1, 2))
        make_engine(dense)
    (warning,) = [text for text in caplog.messages if "keeps" in text]
    assert "keeps 1 of 5 layers on the device" in warning
    assert "the others are streamed through 2 buffers" in warning
    assert "ms longer" in warning


@pytest.mark.parametrize(
    "wrong", [{"device_weight_bytes": -1}, {"device_weight_bytes": 0.5}, {"weight_buffers": 0}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_buffers_are_refused_if_all_layers_are_resident():
    with pytest.raises(ConfigError, match=r"weight_buffers has no effect .* leave one of them out"):
        EngineConfig(weight_buffers=3, device_weight_bytes=None)
    assert 3 == EngineConfig(weight_buffers=3).weight_buffers
    assert 2 == EngineConfig(weight_buffers=2).weight_buffers
    assert 3 == EngineConfig(weight_buffers=3, device_weight_bytes=0).weight_buffers


class TornCopies(HostCopies):
    """Copies of which some fail in the middle, after the first tensor."""

    seed = 0
    share = 0.0

    def __init__(self, pairs):
        super().__init__(pairs)
        self._random = random.Random(self.seed)

    def copy(self, unit, slot):
        if self._random.random() < self.share:
            source, target = self._pairs(unit, slot)[0]
            target.copy_(source)
            raise OSError("the host is gone")
        super().copy(unit, slot)


def make_torn_engine(path, *, share, seed, **options):
    _, runner = make_engine(path, **options)
    model = load_model(str(path), runner.config)
    copies = type("Copies", (TornCopies,), {"share": share, "seed": seed})
    layers = StreamedLayers(model.weights.layers, model.placement, CPU, make_copier=copies)
    decoder = Decoder(model.spec, model.weights, layers=layers)
    runner = ModelRunner(spec=model.spec, config=runner.config, decoder=decoder, cache=runner.cache)
    sampler = Sampler(model.spec.vocab_size, 1024, model.spec.eos_token_ids)
    return Engine(runner, sampler, FakeStopChecker(), runner.config), layers


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part_blocks", [None, 8], ids=["forward", "coroutines"])
def test_a_failed_copy_ends_its_step_and_the_next_engine_uses_the_buffers(dense, part_blocks, seed):
    options = {"device_weight_bytes": budget(dense, 1, 2), "part_blocks": part_blocks}
    expected, _, _ = run(dense)
    engine, layers = make_torn_engine(dense, share=0.04, seed=seed, **options)
    engine.add(requests())
    done, messages = {}, []
    while len(done) < len(expected):
        try:
            done |= {c.request_id: c.token_ids.tolist() for c in engine.step()}
        except RuntimeError as error:
            messages.append(str(error))
            # a pool continues the sequences of a failed engine elsewhere, here with the same
            # buffers
            states = engine.export(set(expected) - set(done))
            layers.buffers.check()
            engine = Engine(engine.runner, engine._sampler, FakeStopChecker(), engine.runner.config)
            engine.restore(states)
    assert expected == done
    expected_end = "to the device: OSError: the host is gone"
    assert all(text.endswith(expected_end) for text in messages)
    assert layers.counters.num_failures == len(messages) > 0
    layers.buffers.check()


def test_layers_in_host_memory_are_measured_as_those_of_the_device(dense):
    config = EngineConfig(device="cpu", device_weight_bytes=budget(dense, 0, 1), weight_buffers=1)
    model = load_model(str(dense), config)
    found = profile_layer(model.spec, model.weights, OPTIONS, clock=TickingClock())
    assert found.model.num_layers == NUM_LAYERS


def test_no_buffers_are_made_for_a_model_that_fits(dense):
    sizes = sizes_of(dense)
    _, stats, runner = run(dense, device_weight_bytes=sizes.total_bytes)
    assert not runner.decoder.layers.is_streamed
    assert stats.num_weight_copies == 0


@pytest.mark.gpu
def test_layers_come_from_pinned_memory_while_others_compute(dense):
    options = {"dtype": "float32", "device": "cuda", "kv_cache_bytes": 1 << 20}
    prompt = np.arange(1, 40)
    found = []
    for more in ({}, {"device_weight_bytes": budget(dense, 1, 2)}):
        config = EngineConfig(**options, **more)
        runner = ModelRunner.load(str(dense), config)
        sampler = Sampler(runner.spec.vocab_size, 64, runner.spec.eos_token_ids)
        engine = Engine(runner, sampler, FakeStopChecker(), config)
        engine.add(dataclasses.replace(r, prompt_token_ids=prompt) for r in requests(count=3))
        found.append(tokens_of(finish(engine)))
    assert found[0] == found[1]
    assert all(len(tokens) == NUM_TOKENS for tokens in found[1].values())


def test_rows_never_wait_for_memory_where_layers_are_copied_in(dense):
    config = EngineConfig(device="cpu", kv_cache_bytes=1 << 20, compile_kernels=False)
    sizes = load_model(str(dense), config).sizes
    budget = sizes.total_bytes - sizes.ffn_bytes[0]
    resident = ModelRunner.load(str(dense), config)
    streamed = ModelRunner.load(
        str(dense), dataclasses.replace(config, device_weight_bytes=budget, weight_buffers=1)
    )
    num_bytes = 2 * resident.cache.k[:, : resident.num_blocks].nbytes
    assert resident.full_step_tokens == full_step_tokens(
        weight_bytes=sizes.total_bytes, kv_bytes=num_bytes
    )
    assert streamed.full_step_tokens == math.inf
