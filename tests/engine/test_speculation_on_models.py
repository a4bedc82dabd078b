"""Any drafts on real (tiny) models give the tokens of transformers."""

import itertools

import numpy as np
import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.sampling.sampler import Sampler
from raybatch.models.config import read_model_spec
from raybatch.records.types import Request, Sampling
from tests.engine.fakes import FakeStopChecker, run_all
from tests.engine.references import reference_tokens
from tests.engine.test_speculation import ForeseeingDrafter

NUM_TOKENS = 24
BLOCK = 4
# attention over all of the past, over a window, and with experts
VARIANTS = ("qwen3", "mistral-window", "qwen3-moe")

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param), request.param


def make_engine(path, *, num_blocks=120, expected=None, right=1.0, **options):
    spec = read_model_spec(path)
    config = EngineConfig(
        block_size_tokens=BLOCK,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=num_blocks * BLOCK * kv_bytes_per_token(spec, torch.float32),
        # an engine that measures may choose coroutines, which take none of a drafter's drafts
        **options,
    )

    def make_drafter(table):
        return ForeseeingDrafter(table, expected, right, rng=np.random.default_rng(1))

    runner = ModelRunner.load(str(path), config)
    sampler = Sampler(spec.vocab_size, config.max_num_seqs, spec.eos_token_ids)
    given = None if expected is None else make_drafter
    return Engine(runner, sampler, FakeStopChecker(), config, make_drafter=given)


def prompts():
    """Prompts, some with a shared prefix that drafts of several sequences read."""
    rng = np.random.default_rng(3)
    stem = rng.integers(1, 211, 5 * BLOCK)
    alone = [rng.integers(1, 211, n) for n in (1, 9, 30)]
    return [*alone, *(np.r_[stem, rng.integers(1, 211, n)] for n in (1, 4, 6))]


def requests(**sampling):
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=prompt.astype(np.int32),
            sampling=Sampling(max_tokens=NUM_TOKENS, **sampling),
            seed=i,
        )
        for i, prompt in enumerate(prompts())
    ]


def answers(engine, rows):
    engine.add(rows)
    return {key: c.token_ids.tolist() for key, c in run_all(engine).items()}


def reference(variant):
    all_tokens = reference_tokens(variant, prompts(), NUM_TOKENS)
    return {(i, 0): tokens for i, tokens in enumerate(all_tokens)}


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_greedy_tokens_are_those_of_transformers(checkpoint, right):
    path, variant = checkpoint
    expected = reference(variant)
    engine = make_engine(path, expected=expected, right=right)
    assert answers(engine, requests()) == expected
    stats = engine.stats()
    assert stats.num_drafted_tokens > 0
    # without drafts: a step for the prompts, and one for each token but the first
    assert (stats.num_steps < NUM_TOKENS) == (right > 0)


def test_sampled_tokens_are_those_without_drafts_also_with_little_memory(checkpoint):
    path, _ = checkpoint
    rows = requests(temperature=0.9, top_p=0.95, n=2, logprobs=1)
    expected = answers(make_engine(path), rows)
    engine = make_engine(path, expected=expected, right=0.8, num_blocks=36)
    assert answers(engine, rows) == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_accepted_tokens > 0


def test_lookup_drafts_change_no_token(checkpoint):
    path, _ = checkpoint
    rows = requests()
    expected = answers(make_engine(path), rows)
    engine = make_engine(path, speculative_tokens=4)
    # all steps take equally long, so drafts always pay
    engine._clock = itertools.count().__next__
    assert answers(engine, rows) == expected
    # the same rows again: their tokens were answers before
    assert answers(engine, rows) == expected
    assert engine.stats().num_accepted_tokens > 0
