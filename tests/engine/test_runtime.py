"""Steps as coroutines: any order of firing gives the tokens of the plain forward pass."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.forward.coroutine import CoroutineRuntime
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.sampling.sampler import Sampler
from raybatch.models.config import read_model_spec
from raybatch.records.types import Request, Sampling
from tests import tolerances
from tests.engine.fakes import FakeStopChecker
from tests.engine.references import reference_tokens
from tests.engine.tiny_models import TOLERANCE
from tests.tiers import examples, pairs

NUM_TOKENS = 10
BLOCK = 4
# attention over all of the past, over a window, and with experts
VARIANTS = ("qwen3", "mistral-window", "qwen3-moe")


class AnyOrder:
    """Fires some of the coroutines of some yield point."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def choose(self, waiting):
        here = waiting[self._random.choice(sorted(waiting))]
        return self._random.sample(list(here), self._random.randint(1, len(here)))


class CountedDecoder:
    """A decoder that counts the calls of its modules, and the rows of feed forward networks."""

    def __init__(self, decoder):
        self._decoder, self.calls = decoder, Counter()

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def attention(self, *args):
        self.calls["attention"] += 1
        return self._decoder.attention(*args)

    def ffn_(self, layer_idx, hidden):
        self.calls["ffn"] += 1
        self.calls["ffn_rows"] += len(hidden)
        self._decoder.ffn_(layer_idx, hidden)


def count_calls(runner):
    """Count from now on the calls of modules by coroutines."""
    counted = CountedDecoder(runner.decoder)
    runner.runtime = replace(runner.runtime, _decoder=counted)
    return counted.calls


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param), request.param


@pytest.fixture(scope="module")
def sparse(tiny_checkpoint):
    return tiny_checkpoint("qwen3-moe")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def make_engine(path, *, num_blocks=120, policy=None, **options):
    spec = read_model_spec(path)
    # what is no coroutine is plain here, whatever was measured
    options = {"attn_batch_tokens": None, **options}
    config = EngineConfig(
        block_size_tokens=BLOCK,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=num_blocks * BLOCK * kv_bytes_per_token(spec, torch.float32),
        **options,
    )
    runner = ModelRunner.load(str(path), config)
    if policy is not None:
        runner.runtime = CoroutineRuntime(runner.decoder, runner.cache, policy)
    sampler = Sampler(spec.vocab_size, config.max_num_seqs, spec.eos_token_ids)
    return Engine(runner, sampler, FakeStopChecker(), config), runner


def prompts(seed=3, count=9):
    """Prompts of which several share blocks that are filled in one step."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(1, 211, 3 * BLOCK)
    return [
        np.r_[stem[: rng.integers(len(stem))], rng.integers(1, 211, rng.integers(1, 20))]
        for _ in range(count)
    ]


def requests(seed=3, count=9, **sampling):
    options = Sampling(max_tokens=NUM_TOKENS, **sampling)
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=prompt.astype(np.int32),
            sampling=options,
            seed=i,
        )
        for i, prompt in enumerate(prompts(seed, count))
    ]


def finish(engine):
    backend, done = NativeBackend(engine), {}
    while backend.num_unfinished():
        for completion in backend.poll():
            done[completion.request_id] = completion
        engine.check()
    return done


def tokens_of(done):
    return {i: completion.token_ids.tolist() for i, completion in done.items()}


def run(path, **options):
    engine, runner = make_engine(path, **options)
    calls = count_calls(runner)
    engine.add(requests())
    return tokens_of(finish(engine)), calls


@pytest.mark.parametrize(
    ("checkpoint", "attn", "moe"),
    pairs(VARIANTS, [1, 3, 7, 64], [0, 5, None]),
    indirect=["checkpoint"],
)
def test_every_pair_of_batch_sizes_gives_the_tokens_of_transformers(checkpoint, attn, moe):
    path, variant = checkpoint
    found, calls = run(path, attn_batch_tokens=attn, moe_batch_tokens=moe)
    expected = reference_tokens(variant, prompts(), NUM_TOKENS)
    assert expected == [found[i] for i in range(len(expected))]
    assert calls["attention"] > 0


def test_experts_run_once_per_layer_for_all_parts_of_a_step(sparse):
    _, together = run(sparse, attn_batch_tokens=2)
    _, apart = run(sparse, attn_batch_tokens=2, moe_batch_tokens=0)
    num_layers = read_model_spec(sparse).num_layers
    assert together["ffn"] % num_layers == 0
    assert together["ffn"] < together["attention"] / 3
    assert apart["ffn"] == apart["attention"] == together["attention"]
    assert apart["ffn_rows"] == together["ffn_rows"]


@settings(max_examples=examples(10, full=25))
@given(seed=st.integers(0, 2**32 - 1), attn=st.integers(1, 12))
def test_whole_runs_in_any_order_of_firing_give_the_same_tokens(sparse, seed, attn):
    engine, _ = make_engine(sparse, policy=AnyOrder(seed), attn_batch_tokens=attn)
    engine.add(requests(seed=seed % 5))
    plain, _ = make_engine(sparse)
    plain.add(requests(seed=seed % 5))
    assert tokens_of(finish(engine)) == tokens_of(finish(plain))


@pytest.mark.parametrize("orders_per_step", [10, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_interleavings_give_the_logits_of_the_plain_forward_pass(checkpoint, orders_per_step):
    path, _ = checkpoint
    engine, runner = make_engine(path, attn_batch_tokens=2, max_batched_tokens=40)
    num_orders = Counter()

    def in_many_orders(parts):
        expected = torch.cat([runner.forward(part.batch) for part in parts])
        for seed in range(orders_per_step):
            runtime = CoroutineRuntime(runner.decoder, runner.cache, AnyOrder(seed))
            result = runtime.forward(parts)
            tolerances.assert_close(result, expected, TOLERANCE)
            num_orders[len(parts)] += 1
        return result

    runner.forward_parts = in_many_orders
    engine.add(requests())
    finish(engine)
    assert num_orders.total() >= 10 * orders_per_step
    assert max(num_orders) > 5


@settings(max_examples=examples(5, full=10))
@given(num_steps=st.integers(1, 12), moved=st.sets(st.integers(0, 8)), attn=st.integers(1, 9))
def test_sequences_that_move_to_another_engine_end_with_the_same_tokens(
    sparse, num_steps, moved, attn
):
    first, _ = make_engine(sparse, attn_batch_tokens=attn)
    second, _ = make_engine(sparse)
    first.add(requests())
    done = {}
    for _ in range(num_steps):
        done |= {completion.request_id: completion for completion in first.step()}
    second.restore(first.export(moved))
    done |= finish(first) | finish(second)
    plain, _ = make_engine(sparse)
    plain.add(requests())
    assert tokens_of(done) == tokens_of(finish(plain))
