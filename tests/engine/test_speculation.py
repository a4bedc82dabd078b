"""Drafts change how many steps there are, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.sampler import Sampler
from raybatch.engine.sequences import DECODE
from tests.engine.fakes import (
    FakeRunner,
    FakeSpec,
    FakeStopChecker,
    generate,
    make_request,
    run_all,
)

VOCAB = 50
MAX_DRAFTS = 5


class ForeseeingDrafter:
    """Drafts of which each token is the right one with the probability `right`.

    Args:
        expected: generated tokens by (request id, sample).
        wrong: tokens that are drafted in place of right ones; None takes any.
    """

    def __init__(self, table, expected, right, *, rng=None, wrong=None):
        self.table, self.expected, self.right, self.wrong = table, expected, right, wrong
        self.rng = rng or np.random.default_rng(0)
        self.slots, self.num_notes = set(), 0

    def add(self, slot):
        self.slots.add(slot)

    def remove(self, slot):
        self.slots.discard(slot)

    def propose(self):
        slots = np.flatnonzero(self.table.phase == DECODE).tolist()
        return {slot: self.draft(slot) for slot in slots if slot in self.slots}

    def draft(self, slot):
        record = self.table.record(slot)
        known = self.table.generated_since(slot, 0)
        truth = self.expected[record.request.request_id, record.sample_idx]
        assert known == truth[: len(known)]
        # some go beyond the end
        length = int(self.rng.integers(0, MAX_DRAFTS + 1)) if self.right < 1 else MAX_DRAFTS
        draft = [*truth[len(known) :], *self.rng.integers(0, VOCAB, MAX_DRAFTS).tolist()][:length]
        return [token if self.rng.random() < self.right else self.other(token) for token in draft]

    def other(self, token):
        if self.wrong is not None:
            return int(self.rng.choice(self.wrong))
        return int((token + self.rng.integers(1, VOCAB)) % VOCAB)

    def note_step(self, num_rows, seconds):
        assert num_rows > 0 and seconds > 0
        self.num_notes += 1


def make_engine(
    *, expected=None, right=1.0, num_blocks=64, eos=(), nan_after=None, seed=0, wrong=None, **config
):
    options = {"block_size_tokens": 4, "max_batched_tokens": 64, "max_num_seqs": 16} | config
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=options["block_size_tokens"],
        spec=FakeSpec(VOCAB, eos, 256),
        nan_after=nan_after,
    )

    def make_drafter(table):
        rng = np.random.default_rng(seed)
        return ForeseeingDrafter(table, expected, right, rng=rng, wrong=wrong)

    sampler = Sampler(VOCAB, options["max_num_seqs"], eos)
    engine = Engine(
        runner,
        sampler,
        FakeStopChecker(),
        EngineConfig(**options),
        make_drafter=None if expected is None else make_drafter,
    )
    return engine, runner


def told(done):
    """All that a user sees of completions."""
    return {
        key: (
            c.token_ids.tolist(),
            c.finish_reason,
            c.stop_reason,
            c.error,
            [(ids.tolist(), values.tolist()) for ids, values in c.logprobs or ()],
        )
        for key, c in done.items()
    }


def tokens_of(done):
    return {key: completion.token_ids.tolist() for key, completion in done.items()}


def any_requests(rng, count):
    """Greedy and random rows with all ways to end, some of which share a prefix."""
    stem = rng.integers(0, VOCAB, 20)
    requests = []
    for i in range(count):
        prompt = np.r_[stem[: rng.integers(0, 20)], rng.integers(0, VOCAB, 1 + rng.integers(8))]
        ends = [{}, {"stop": (f"{rng.integers(VOCAB)},",)}, {"stop_token_ids": (3, 4)}]
        kinds = [{}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 9, "logprobs": 2}]
        kinds += [{"repetition_penalty": 1.3}, {"min_tokens": 8, "temperature": 0.4}]
        options = ends[rng.integers(3)] | kinds[rng.integers(5)]
        requests.append(
            make_request(
                i, prompt, n=int(rng.integers(1, 3)), **({"max_tokens": 24} | options)
            )
        )
    return requests


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_blocks=st.integers(24, 90),
    budget=st.integers(8, 70),
    block_size=st.sampled_from([2, 4, 5]),
    caching=st.booleans(),
)
def test_completions_are_those_without_drafts(
    seed, right, num_blocks, budget, block_size, caching
):
    rng = np.random.default_rng(seed)
    requests = any_requests(rng, 12)
    options = {
        "eos": (7,),
        "num_blocks": num_blocks * 4 // block_size,
        "max_batched_tokens": budget,
        "block_size_tokens": block_size,
        "enable_prefix_caching": caching,
    }
    plain, _ = make_engine(**options)
    plain.add(requests)
    expected = run_all(plain)
    engine, runner = make_engine(
        **options, expected=tokens_of(expected), right=right, seed=seed
    )
    engine.add(requests)
    assert told(run_all(engine)) == told(expected)
    assert all(step.num_tokens <= budget for step in runner.steps)
    stats = engine.stats()
    assert stats.kv_used_fraction == 0.0
    assert stats.num_generated_tokens == plain.stats().num_generated_tokens
    assert stats.num_drafted_tokens >= stats.num_accepted_tokens
    assert (stats.num_accepted_tokens > 0) == (right > 0)


@pytest.mark.parametrize(("right", "num_steps", "num_accepted"), [(1.0, 5, 16), (0.0, 21, 0)])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(right, num_steps, num_accepted):
    expected = generate([1, 2, 3], 21, VOCAB)
    engine, runner = make_engine(expected={(0, 0): expected}, right=right)
    engine.add([make_request(0, [1, 2, 3], max_tokens=21)])
    assert run_all(engine)[0, 0].token_ids.tolist() == expected
    stats = engine.stats()
    assert (len(runner.steps), stats.num_accepted_tokens) == (num_steps, num_accepted)
