"""Samples of one request: the prompt is computed once, and what they write goes into copies."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from tests.engine.fakes import (
    FakeRunner,
    FakeSampler,
    FakeSpec,
    FakeStopChecker,
    make_request,
    next_token,
    run_all,
)
from tests.engine.window_runner import WindowRunner
from tests.tiers import examples

VOCAB, EOS = 300, (7, 8)


class Apart(FakeSampler):
    """Draws other tokens for each sample, so that one who reads those of another is found out."""

    def __init__(self):
        super().__init__()
        self.sample_idx = {}

    def add(self, slot, sampling, seed, sample_idx, prompt_token_ids, generated):
        super().add(slot, sampling, seed, sample_idx, prompt_token_ids, generated)
        self.sample_idx[slot] = sample_idx

    def sample(self, logits, slots, num_generated):
        shifts = [13 * self.sample_idx[slot] for slot in slots.tolist()]
        rows = [row.roll(shift) for row, shift in zip(logits, shifts, strict=True)]
        return super().sample(torch.stack(rows), slots, num_generated)

    def is_stateless(self, sampling):
        return True


def make(
    *, num_blocks=400, block_size=16, host=0, nan_after=None, eos=(), part_blocks=None, **config
):
    options = {"max_batched_tokens": 256, "max_num_seqs": 16, "block_size_tokens": block_size}
    kind = {"block_size": block_size, "spec": FakeSpec(VOCAB, eos, 512), "nan_after": nan_after}
    kind["full_step_tokens"] = config.pop("full_step_tokens", math.inf)
    if config.get("kv_offload"):
        runner = WindowRunner(pool_blocks=num_blocks, host_blocks=host, **kind)
    else:
        runner = FakeRunner(num_blocks=num_blocks, num_host_blocks=host, **kind)
    config = EngineConfig(host_kv_bytes=host or None, **options | config)
    engine = Engine(runner, Apart(), FakeStopChecker(), config)
    if part_blocks is not None:
        runner.num_window_blocks = part_blocks
    return engine, runner


def answer(request, sample_idx, eos=()):
    tokens, num_prompt = request.prompt_token_ids.tolist(), len(request.prompt_token_ids)
    while len(tokens) - num_prompt < request.sampling.max_tokens:
        tokens.append((next_token(tokens, VOCAB) + 13 * sample_idx) % VOCAB)
        if tokens[-1] in eos:
            break
    return tokens[num_prompt:]


def answers(requests, eos=()):
    return {(r.request_id, i): answer(r, i, eos) for r in requests for i in range(r.sampling.n)}


def tokens_of(done):
    return {key: completion.token_ids.tolist() for key, completion in done.items()}


def num_prompt_rows(runner):
    return sum(sum(step.chunk_lens) for step in runner.steps)


WAYS = {
    "on-device": {},
    "few-slots": {"max_num_seqs": 5},
    "one-slot": {"max_num_seqs": 1},
    "drafts": {"speculative_tokens": 3},
    "no-cache": {"enable_prefix_caching": False},
    "small-steps": {"max_batched_tokens": 16},
    "forecast": {"full_step_tokens": 0, "max_num_seqs": 4},
    "kv-offload": {"kv_offload": True, "host": 400, "max_num_seqs": 5},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("length", [1, 63, 64])
def test_samples_compute_their_prompt_once(length, options):
    engine, runner = make(**options)
    request = make_request(0, np.arange(length), n=16, max_tokens=4)
    engine.add([request])
    assert answers([request]) == tokens_of(run_all(engine))
    stats = engine.stats()
    assert stats.prompt_tokens - stats.cached_tokens == length
    assert num_prompt_rows(runner) - stats.num_recomputed_tokens == length
    assert stats.kv_used_fraction == 0.0


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_copies"), [(63, 4, 15), (63, 1, 0), (64, 4, 0), (65, 2, 15)]
)
def test_all_samples_but_the_last_write_into_a_copy(length, max_tokens, num_copies):
    engine, runner = make()
    engine.add([make_request(0, np.arange(length), n=16, max_tokens=max_tokens)])
    run_all(engine)
    assert engine.stats().num_copied_blocks == len(runner.copied) == num_copies
    # all in the one step in which all of them write
    assert len({source for source, _ in runner.copied}) == min(1, num_copies)


def test_a_prompt_is_held_no_longer_than_samples_wait():
    engine, _ = make(num_blocks=8, max_num_seqs=2, enable_prefix_caching=False)
    engine.add([make_request(0, np.arange(40), n=3, max_tokens=2, ignore_eos=True)])
    used = [engine.blocks.num_used for _ in range(4) if engine.step() is not None]
    # three blocks of the prompt, and a copy of the last for each of the two that write
    assert used == [3, 3, 3, 0]


def test_samples_of_a_broken_prompt_all_fail_and_leave_clean_blocks():
    engine, runner = make(nan_after=62, max_num_seqs=5)
    good = make_request(1, np.arange(40), n=2, max_tokens=3)
    engine.add([make_request(0, np.arange(63), n=8), good])
    done = run_all(engine)
    failed = [done[0, i].error.partition(":")[0] for i in range(8)]
    assert failed == ["NonFiniteLogits"] * 8
    assert answers([good]) == tokens_of({key: done[key] for key in ((1, 0), (1, 1))})
    assert {0, 1, 2, 3} <= set(runner.cleared)
    assert engine.stats().kv_used_fraction == 0.0


def test_a_broken_prompt_is_held_for_nobody():
    engine, runner = make(nan_after=62, max_num_seqs=1)
    engine.add([make_request(0, np.arange(63), n=3)])
    assert len(engine.step()) == 1
    engine.abort([0])
    assert [0, 1, 2, 3] == sorted(runner.cleared)


def test_a_sample_that_starts_late_draws_from_the_logits_of_the_prompt():
    """Even in a step in which nothing is computed."""
    engine, runner = make(max_num_seqs=4)
    engine.add([make_request(0, np.arange(63), n=10, max_tokens=1)])
    assert [len(engine.step()) for _ in range(3)] == [4, 4, 2]
    assert [step.num_tokens for step in runner.steps] == [63]


def test_the_first_sample_alone_tells_what_came_from_other_requests():
    engine, _ = make(block_size=4)
    requests = [make_request(i, np.arange(14), n=3, max_tokens=2) for i in range(2)]
    engine.add(requests[:1])
    run_all(engine)
    engine.add(requests[1:])
    done = run_all(engine)
    assert [done[1, i].num_cached_tokens for i in range(3)] == [12, 0, 0]


def random_requests(rng, count):
    """Return requests with leading tokens in common; every other one is of a group."""
    stem = rng.integers(0, VOCAB, 60)
    lengths = np.where(np.arange(count) % 2, 20, rng.integers(0, 30, count)).tolist()
    requests = [
        make_request(
            i,
            np.r_[stem[:length], rng.integers(0, VOCAB, rng.integers(1, 30))],
            n=int(rng.integers(1, 7)),
            max_tokens=int(rng.integers(1, 20)),
        )
        for i, length in enumerate(lengths)
    ]
    return [replace(r, group_id=3, prefix_len=20) if i % 2 else r for i, r in enumerate(requests)]


def random_engine(rng, way):
    block_size = int(rng.choice([2, 4, 5, 16]))
    options = {
        "num_blocks": int(rng.integers(90, 300)) // block_size,
        "block_size": block_size,
        "max_batched_tokens": int(rng.integers(8, 90)),
        "max_num_seqs": int(rng.integers(1, 9)),
        "enable_prefix_caching": bool(rng.integers(2)),
        "eos": EOS,
        **way,
    }
    if way.get("kv_offload"):
        options["host"] = int(rng.integers(100, 400)) // block_size
    return make(**options)


MOVING = {
    "plain": {},
    "swap": {"host": 30},
    "drafts": {"speculative_tokens": 3},
    "forecast": {"full_step_tokens": 0},
    "kv-offload": {"kv_offload": True},
    "small-parts": {"kv_offload": True, "part_blocks": 3},
}


@pytest.mark.parametrize("way", MOVING.values(), ids=MOVING.keys())
@settings(max_examples=examples(6, full=80))
@given(seed=st.integers(0, 2**32 - 1))
def test_tokens_are_those_of_samples_alone(way, seed):
    """Whatever happens to samples: little memory, preemption, ends, aborts, moves."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 6)
    engine, runner = random_engine(rng, way)
    engine.add(requests[:4])
    done, aborted = {}, int(rng.integers(12))
    for _ in range(int(rng.integers(12))):
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
        engine.check()
    engine.abort([aborted])
    engine.add(requests[4:])
    for _ in range(3):
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
        engine.check()
        engine.restore(engine.export([int(rng.integers(6))]))
    done |= run_all(engine)
    expected = answers(requests, EOS)
    assert {key: expected[key] for key in done} == tokens_of(done)
    assert {key[0] for key in expected.keys() - done.keys()} <= {aborted}
    assert engine.stats().kv_used_fraction == 0.0
    assert engine.stats().num_copied_blocks == len(runner.copied)
    assert not engine._forward._prompt_logits or not engine.num_unfinished()
