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
from raybatch.engine.forward.coroutine import Module
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

pytestmark = pytest.mark.usefixtures("shared_cache")


class AnyOrder:
    """Fires some of the coroutines of some yield point.

    Parts that read the output of others attend in a layer after them.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)

    def __call__(self, waiting):
        ready = {point: self._ready(point, waiting) for point in sorted(waiting)}
        here = self._random.choice([coroutines for coroutines in ready.values() if coroutines])
        return self._random.sample(here, self._random.randint(1, len(here)))

    def _ready(self, point, waiting):
        here = list(waiting[point])
        if point.module is Module.FFN or not here[0].moves.follows_writer:
            return here
        first = min(c.index for before, cs in waiting.items() if before <= point for c in cs)
        return [coroutine for coroutine in here if coroutine.index == first]


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
    """Reset the counts, and count the calls of modules by coroutines."""
    counted = CountedDecoder(runner.decoder)
    runner.runtime = replace(runner.runtime, _decoder=counted)
    return counted.calls


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param), request.param


@pytest.fixture(scope="module")
def sparse(tiny_checkpoint):
    return tiny_checkpoint("qwen3-moe")


def make_engine(path, *, num_blocks=120, part_blocks=None, choose=None, **options):
    """An engine that runs plain steps; with `part_blocks`, coroutines of parts with these blocks.

    `choose` picks those that run next.
    """
    spec = read_model_spec(path)
    token_bytes = kv_bytes_per_token(spec, torch.float32)
    if part_blocks is not None:
        options |= {"kv_offload": True, "host_kv_bytes": num_blocks * BLOCK * token_bytes}
    config = EngineConfig(
        block_size_tokens=BLOCK,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=num_blocks * BLOCK * token_bytes,
        **options,
    )
    runner = ModelRunner.load(str(path), config)
    sampler = Sampler(spec.vocab_size, config.max_num_seqs, spec.eos_token_ids)
    engine = Engine(runner, sampler, FakeStopChecker(), config)
    if part_blocks is not None:
        # the buffer holds more; rows that exceed the limit of a part are parts by themselves
        runner.num_window_blocks = min(part_blocks, runner.num_window_blocks)
    if choose is not None:
        runner.runtime = replace(runner.runtime, _choose=choose)
    return engine, runner


def prompts(seed=3, count=9):
    """Prompts with shared blocks that are filled in one step."""
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
    ("checkpoint", "part_blocks", "rows"),
    pairs(VARIANTS, [1, 8, 16, 64], [1, 5, 64]),
    indirect=["checkpoint"],
)
def test_every_pair_of_batch_sizes_gives_the_tokens_of_transformers(checkpoint, part_blocks, rows):
    path, variant = checkpoint
    found, calls = run(
        path, part_blocks=part_blocks, max_num_seqs=rows, max_batched_tokens=max(16, rows)
    )
    expected = reference_tokens(variant, prompts(), NUM_TOKENS)
    assert expected == [found[i] for i in range(len(expected))]
    assert calls["attention"] > 0


def test_experts_run_once_per_layer_for_all_parts_of_a_step(sparse):
    engine, runner = make_engine(sparse, part_blocks=1)
    calls = count_calls(runner)
    engine.add(requests())
    finish(engine)
    num_layers = read_model_spec(sparse).num_layers
    assert calls["ffn"] == num_layers * engine.stats().num_steps
    assert calls["ffn"] < calls["attention"] / 3


@settings(max_examples=examples(10, full=25))
@given(
    seed=st.integers(0, 2**32 - 1),
    part_blocks=st.integers(1, 24),
    rows=st.integers(1, 12),
    caching=st.booleans(),
)
def test_whole_runs_in_any_order_of_firing_give_the_same_tokens(
    sparse, seed, part_blocks, rows, caching
):
    engine, _ = make_engine(
        sparse,
        choose=AnyOrder(seed),
        part_blocks=part_blocks,
        max_num_seqs=rows,
        enable_prefix_caching=caching,
    )
    engine.add(requests(seed=seed % 5))
    plain, _ = make_engine(sparse)
    plain.add(requests(seed=seed % 5))
    assert tokens_of(finish(engine)) == tokens_of(finish(plain))


@pytest.mark.parametrize("orders_per_step", [10, pytest.param(40, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("caching", [False, True])
def test_interleavings_give_the_logits_of_the_plain_forward_pass(
    checkpoint, caching, orders_per_step
):
    path, _ = checkpoint
    options = {"max_batched_tokens": 40, "enable_prefix_caching": caching}
    plain, plain_runner = make_engine(path, **options)
    engine, runner = make_engine(path, part_blocks=1, **options)
    expected, num_orders = [], Counter()
    forward = plain_runner.forward

    def noted(batch):
        expected.append(forward(batch))
        return expected[-1]

    def in_many_orders(parts):
        runtimes = [replace(runner.runtime, _choose=AnyOrder(s)) for s in range(orders_per_step)]
        results = [runner.runtime.forward(parts), *(each.forward(parts) for each in runtimes)]
        num_orders[len(parts)] += orders_per_step
        for result in results:
            tolerances.assert_close(result, results[-1], TOLERANCE)
        return results[-1]

    in_parts = engine._forward._logits

    def compared(schedule, unread):
        logits = in_parts(schedule, unread)
        tolerances.assert_close(logits, expected[-1], TOLERANCE)
        return logits

    plain_runner.forward, runner.forward_parts = noted, in_many_orders
    engine._forward._logits = compared
    for each in (plain, engine):
        each.add(requests())
    while plain.num_unfinished():
        plain.step()
        engine.step()
    assert not engine.num_unfinished()
    assert num_orders.total() >= 10 * orders_per_step
    assert max(num_orders) > 5


@settings(max_examples=examples(5, full=10))
@given(num_steps=st.integers(1, 12), moved=st.sets(st.integers(0, 8)), blocks=st.integers(1, 20))
def test_sequences_that_move_to_another_engine_end_with_the_same_tokens(
    sparse, num_steps, moved, blocks
):
    first, _ = make_engine(sparse, part_blocks=blocks)
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
