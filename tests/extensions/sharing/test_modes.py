"""Engines of a group that copy weights or pass in rounds: thresholds, sizes, ranks that fail."""

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.errors import RankError
from raybatch.records.types import ReplicaStats
from raybatch_extensions.sharing.engine import SharingModes
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_extensions.sharing.threshold import measure_threshold
from tests.engine.tiny_models import build
from tests.engine.weights.steps import prompt_batch, prompt_logits
from tests.extensions.sharing.groups import in_threads, load_group

NUM_LAYERS = 5
TIMEOUT_S = 2.0

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    build("qwen3", num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    return folder


def config(**options):
    given = {"kv_cache_bytes": 1 << 20, **options}
    return EngineConfig(
        device="cpu",
        dtype="float32",
        weights="shared",
        block_size_tokens=4,
        compile_kernels=False,
        **given,
    )


@pytest.fixture
def engines(path):
    """Makes a runner with its modes for each rank of a group."""

    def make(*, num_slots=None, size=2, by="layer", **options):
        group = Ownership(size=size, num_layers=NUM_LAYERS, by=by)
        made, configs = [], [config(**options)] * size
        for model in load_group(path, group, num_slots=num_slots, configs=configs):
            prepared = PreparedModel.of(model, config(**options))
            modes = SharingModes(prepared)
            runner = ModelRunner.of(prepared, None)
            modes.attach(runner)
            made.append((runner, modes))
        return made

    return make


def enter(engines):
    calls = engines[0][1].calls(1, 2, "127.0.0.1", TIMEOUT_S)
    pairs = zip(engines, calls, strict=True)
    in_threads([lambda m=modes, c=call: m.enter(c) for (_, modes), call in pairs])


@pytest.mark.parametrize(
    ("size", "by", "num_slots"),
    [(2, "layer", 1), (2, "layer", 2), (2, "layer", 4), (2, "shard", 2), (4, "shard", None)],
)
def test_measuring_leaves_the_weights_in_slots_as_they_are(engines, size, by, num_slots):
    ((runner, _), *_) = engines(size=size, by=by, num_slots=num_slots)
    layers = runner.decoder.layers
    expected = prompt_logits(runner.decoder, runner.spec)
    copies, before = layers.counters.num_copies, runner.decoder.layers
    assert measure_threshold(runner, layers, fetch_s=1e-3, rows_s=lambda _: 0.0, most_rows=512) > 0
    # those of one pass, which puts weights in slots
    assert layers.counters.num_copies - copies <= 2 * size * NUM_LAYERS
    assert runner.decoder.layers is before
    assert torch.equal(prompt_logits(runner.decoder, runner.spec), expected)
    layers.buffers.check()


def test_measuring_leaves_no_kv_where_slots_hold_tiles_of_another_form(tmp_path):
    """Whose bytes are scales that are no numbers, here."""
    build("qwen3-moe-sparse-step", num_hidden_layers=6).save_pretrained(tmp_path)
    of_all = config(quantization="int8")
    group = Ownership(size=3, num_layers=6)
    for model in load_group(tmp_path, group, configs=[of_all] * 3):
        prepared = PreparedModel.of(model, of_all)
        modes, runner = SharingModes(prepared), ModelRunner.of(prepared, None)
        modes.attach(runner)
        # block 0 is what rows of no sequence are written to
        assert not runner.cache.k[:, 1:].any()
        assert not runner.cache.v[:, 1:].any()


def test_passes_with_drafts_are_measured_without_them(engines):
    options = {"speculative_tokens": 8, "kv_cache_bytes": 200_000, "max_num_seqs": 64}
    ((runner, modes), _) = engines(**options)
    assert runner.num_blocks * runner.config.block_size_tokens < 64 * 9
    assert 0 < modes.stats(ReplicaStats()).threshold_rows <= 64


@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_others_do_not_wait_for_one_that_refuses(engines, refuses):
    three = engines(size=3)
    three[refuses][1].leave(1, False)
    # longer than `in_threads` waits
    calls = three[0][1].calls(1, 3, "127.0.0.1", 600.0)
    pairs = zip(three, calls, strict=True)
    found = in_threads([lambda m=modes, c=call: error_of(m, c) for (_, modes), call in pairs])
    why = "cannot start generation 1: this engine has been in generation 1"
    assert found[refuses] == why
    assert refuses == 0 or f"rank {refuses} cannot join the group: {why}" in found[0]
    assert all(why in text for text in found)
    assert all(not modes.is_exchanging for _, modes in three)


def counts(modes):
    return modes.stats(ReplicaStats())


def error_of(modes, call):
    with pytest.raises(RankError) as error:
        modes.enter(call)
    return str(error.value)


def test_a_pass_of_a_round_is_one_with_copies(engines):
    (runner, modes), (other, others) = both = engines()
    batch = prompt_batch(runner.spec)
    expected = runner.forward(batch).clone()
    assert runner.most_step_tokens is None
    enter(both)
    assert modes.is_exchanging
    assert runner.most_step_tokens == runner.config.token_budget // 2
    assert not modes.is_awaited()
    found, _ = in_threads([lambda: runner.forward(batch), lambda: serve(others)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (counts(modes).num_exchanges, counts(others).num_dummy_exchanges) == (1, 1)
    # of a generation before, which has ended by itself
    assert modes.leave(0, True) == 1
    assert modes.leave(1, False) == 1
    in_threads([lambda: runner.forward(batch), lambda: serve(others)])
    assert not modes.is_exchanging
    assert not others.is_exchanging
    assert modes.num_lost == others.num_lost == 0
    assert (modes.leave(2, False), modes.leave(1, False)) == (2, 2)
    assert runner.passes is other.passes is None


def serve(modes):
    """Serve one round, as an engine without rows does."""
    while not modes.is_awaited():
        pass
    modes.serve()


def test_a_pass_whose_round_fails_is_computed_again_with_copies(engines):
    (runner, modes), (_, others) = both = engines()
    batch = prompt_batch(runner.spec)
    expected = runner.forward(batch).clone()
    enter(both)
    # it begins a round and is gone in it
    found, _ = in_threads(
        [lambda: runner.forward(batch), lambda: (others._exchange.begin(0, 0), others.give_up())]
    )
    assert torch.equal(found, expected)
    assert not modes.is_exchanging
    assert modes.num_lost == 1
    assert torch.equal(runner.forward(batch), expected)


def test_a_round_of_more_rows_than_a_step_may_have_is_passed_with_copies(engines):
    both = engines(max_batched_tokens=16, max_num_seqs=8)
    batches = [prompt_batch(both[0][0].spec, lens=(9, 5), seed=seed) for seed in range(2)]
    expected = [r.forward(b).clone() for (r, _), b in zip(both, batches, strict=True)]
    enter(both)
    runs = zip(both, batches, strict=True)
    found = in_threads([lambda r=runner, b=batch: r.forward(b) for (runner, _), batch in runs])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(modes.is_exchanging and not modes.num_lost for _, modes in both)
    # the next one is a round again
    (runner, modes), (_, others) = both
    found, _ = in_threads([lambda: runner.forward(batches[0]), lambda: serve(others)])
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
    assert (counts(modes).num_exchanges, counts(modes).num_dummy_exchanges) == (1, 0)
    assert (counts(others).num_exchanges, counts(others).num_dummy_exchanges) == (1, 1)


@pytest.mark.parametrize("leaves", [0, 1])
def test_rounds_end_behind_one_that_was_passed_with_copies(engines, leaves):
    both = engines(max_batched_tokens=16, max_num_seqs=8)
    batches = [prompt_batch(both[0][0].spec, lens=(9, 5), seed=seed) for seed in range(2)]
    enter(both)
    both[leaves][1].leave(1, False)
    runs = zip(both, batches, strict=True)
    in_threads([lambda r=runner, b=batch: r.forward(b) for (runner, _), batch in runs])
    assert not any(modes.is_exchanging for _, modes in both)
    assert not any(modes.num_lost for _, modes in both)


def test_rounds_of_a_generation_that_is_over_do_not_begin(engines):
    both = engines()
    enter(both)
    for _, modes in both:
        assert modes.leave(3, True) == 3
    calls = both[0][1].calls(2, 2, "127.0.0.1", TIMEOUT_S)
    for (_, modes), call in zip(both, calls, strict=True):
        with pytest.raises(
            RankError, match="cannot start generation 2: this engine has been in generation 3"
        ):
            modes.enter(call)
        assert not modes.is_exchanging
