"""Sequences that leave with their KV, and engines that reuse or recompute it."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.records.types import SequenceState
from tests.engine.fakes import make_request, run_all
from tests.engine.real_engines import Engines, requests_of
from tests.engine.sequences.test_forks import (
    answers,
    make,
    num_prompt_rows,
    random_requests,
    tokens_of,
)
from tests.engine.tiny_models import build
from tests.tiers import examples

WAYS = {
    "plain": {},
    "no-cache": {"enable_prefix_caching": False},
    "swap": {"host": 30},
    "drafts": {"speculative_tokens": 3},
    "kv-offload": {"kv_offload": True, "host": 200},
}


def stepped(engine, count):
    for _ in range(count):
        assert engine.step() == []
    return engine


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_a_moved_row_continues_without_computing_its_prompt_again(options):
    requests = [make_request(i, np.arange(i, 40 + 3 * i), max_tokens=9) for i in range(3)]
    first, second = make(**options)[0], make(**options)
    first.add(requests)
    states = stepped(first, 5).export([0, 1, 2], with_kv=True)
    lengths = [
        len(r.prompt_token_ids) + len(s.token_ids) for r, s in zip(requests, states, strict=True)
    ]
    assert [length - 1 for length in lengths] == [state.kv.num_tokens for state in states]
    assert first.stats().kv_used_fraction == 0.0
    engine, runner = second
    engine.restore(states)
    assert answers(requests) == tokens_of(run_all(engine))
    stats = engine.stats()
    assert (num_prompt_rows(runner), stats.num_recomputed_tokens) == (0, 0)
    assert stats.num_migrated_kv_tokens == sum(lengths) - len(states)


def test_a_row_moved_within_its_prompt_computes_the_rest():
    first, (second, runner) = make(max_batched_tokens=20)[0], make()
    request = make_request(0, np.arange(50), max_tokens=4)
    first.add([request])
    second.restore(stepped(first, 2).export([0], with_kv=True))
    assert answers([request]) == tokens_of(run_all(second))
    assert (num_prompt_rows(runner), second.stats().num_migrated_kv_tokens) == (10, 40)


def test_samples_that_move_share_their_prompt_again():
    first, (second, runner) = make()[0], make()
    request = make_request(0, np.arange(64), n=8, max_tokens=6)
    first.add([request])
    second.restore(stepped(first, 3).export([0], with_kv=True))
    second.step()
    # four blocks of the prompt, and a block of each sample
    assert second.blocks.num_used == 4 + 8
    assert answers([request]) == tokens_of(run_all(second))
    assert num_prompt_rows(runner) == 0


def test_rows_without_kv_have_none():
    engine, _ = make(max_num_seqs=1)
    engine.add([make_request(i, [i, 2, 3], max_tokens=9) for i in range(2)])
    states = stepped(engine, 3).export([0, 1], with_kv=True)
    assert [True, False] == [state.kv is not None for state in states]


def test_kv_is_exported_only_on_request():
    engine, _ = make()
    engine.add([make_request(0, [1, 2, 3], max_tokens=9)])
    (state,) = stepped(engine, 3).export([0])
    assert state.kv is None


@pytest.fixture
def moved():
    """A row of 40 + 4 tokens, whose KV fills eleven blocks except for one slot."""
    engine, _ = make(block_size=4)
    request = make_request(0, np.arange(40), max_tokens=9)
    engine.add([request])
    return request, stepped(engine, 4).export([0], with_kv=True)[0]


def test_kv_is_computed_again_from_a_damaged_block_on(moved, caplog):
    request, state = moved
    blocks = state.kv.blocks.copy()
    blocks[6, 0, 0] ^= 1
    engine, runner = make(block_size=4)
    with caplog.at_level(logging.WARNING):
        engine.restore([replace(state, kv=replace(state.kv, blocks=blocks))])
    assert "the KV of row 0 is damaged, recomputing it from token 24" in caplog.text
    assert answers([request]) == tokens_of(run_all(engine))
    stats = engine.stats()
    assert (stats.num_migrated_kv_tokens, stats.num_recomputed_tokens) == (24, 43 - 24)
    # plus the token that has no KV yet
    assert num_prompt_rows(runner) == 44 - 24


SPOILT = {
    "model": lambda kv: replace(kv, key=kv.key._replace(model="another")),
    "dtype": lambda kv: replace(kv, key=kv.key._replace(dtype="bfloat16")),
    "kv-dtype": lambda kv: replace(kv, key=kv.key._replace(kv_dtype="int8")),
    "block-size": lambda kv: replace(kv, key=kv.key._replace(block_size=16)),
    "first-block": lambda kv: replace(kv, checksums=kv.checksums ^ 1),
    "cut-short": lambda kv: replace(kv, blocks=kv.blocks[:-1]),
    "of-more-tokens": lambda kv: replace(kv, num_tokens=kv.num_tokens + 1),
}


@pytest.mark.parametrize("offload", [False, True], ids=["on-device", "kv-offload"])
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_kv_that_cannot_be_used_is_computed_again(moved, spoil, offload, caplog):
    request, state = moved
    engine, runner = make(block_size=4, **WAYS["kv-offload"] if offload else {})
    with caplog.at_level(logging.INFO):
        engine.restore([replace(state, kv=spoil(state.kv))])
    assert "recomputing" in caplog.text
    assert answers([request]) == tokens_of(run_all(engine))
    assert (num_prompt_rows(runner), engine.stats().num_migrated_kv_tokens) == (44, 0)


def test_the_kv_of_other_tokens_is_not_used(moved):
    _, state = moved
    other = make_request(0, np.arange(1, 41), max_tokens=9)
    engine, _ = make(block_size=4)
    engine.restore([SequenceState(request=other, sample_idx=0, kv=state.kv)])
    assert answers([other]) == tokens_of(run_all(engine))
    assert engine.stats().num_migrated_kv_tokens == 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@settings(max_examples=examples(5, full=80))
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_that_move_with_kv_at_any_time_keep_their_tokens(way, seed):
    """Between two engines with little memory; some blocks are damaged on the way."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 6)
    sizes = {
        "max_batched_tokens": int(rng.integers(9, 60)),
        "max_num_seqs": int(rng.integers(1, 9)),
    }
    engines = [
        make(block_size=4, num_blocks=int(rng.integers(22, 90)), **sizes | way)[0] for _ in range(2)
    ]
    engines[0].add(requests)
    done = {}
    for _ in range(12):
        for engine in engines:
            for _ in range(int(rng.integers(4))):
                done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
                engine.check()
        source, target = engines[:: rng.choice((1, -1))]
        states = source.export([int(i) for i in rng.integers(0, 6, 2)], with_kv=True)
        for state in states:
            if state.kv is not None and rng.random() < 0.2:
                state.kv.blocks[rng.integers(len(state.kv.blocks))] += 1
        target.restore(states)
    for engine in engines:
        done |= run_all(engine)
        assert engine.stats().kv_used_fraction == 0.0
    assert answers(requests) == tokens_of(done)


def members(count, **sampling):
    """Rows of a group that share 64 tokens and have further ones."""
    return [
        replace(
            make_request(i, [*range(64), *range(100 + i, 117 + 3 * i)], **sampling),
            group_id=3,
            prefix_len=64,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_shared_kv_is_copied_once_if_all_rows_leave(options, n):
    requests = members(4, n=n, max_tokens=12)
    (first, _), (second, runner) = make(**options), make(**options)
    first.add(requests)
    num_used = stepped(first, 6).blocks.num_used
    assert first.moves.num_leaving_blocks() == num_used
    states, unstarted, failed = first.leave(with_kv=True)
    assert (len(states), unstarted, failed) == (4 * n, [], [])
    assert num_used == sum(len(state.kv.blocks) for state in states)
    second.restore(states)
    second.step()
    assert second.blocks.num_used in (num_used, num_used + 1)
    done = run_all(second)
    assert answers(requests) == tokens_of(done)
    assert (num_prompt_rows(runner), second.stats().num_recomputed_tokens) == (0, 0)


def test_rows_without_their_first_one_compute_shared_kv_once():
    requests = members(4, max_tokens=12)
    (first, _), (second, runner) = make(), make()
    first.add(requests)
    states, _, _ = stepped(first, 6).leave(with_kv=True)
    second.restore(states)
    second.abort([0])
    assert answers(requests[1:]) == tokens_of(run_all(second))
    assert (num_prompt_rows(runner), second.stats().num_recomputed_tokens) == (64, 64)


def test_a_row_that_moves_alone_takes_its_shared_kv_along():
    requests = members(4, max_tokens=12)
    (first, _), (second, runner) = make(), make()
    first.add(requests)
    (state,) = stepped(first, 6).export([2], with_kv=True)
    assert (state.kv.first_block, len(state.kv.blocks)) == (0, -(-state.kv.num_tokens // 16))
    second.restore([state])
    assert answers(requests[2:3]) == tokens_of(run_all(second))
    assert num_prompt_rows(runner) == 0


def test_rows_that_leave_without_kv_are_computed_again():
    requests = members(3, max_tokens=12)
    (first, _), (second, _) = make(), make()
    first.add(requests)
    states, _, _ = stepped(first, 6).leave(with_kv=False)
    assert {None} == {state.kv for state in states}
    second.restore(states)
    assert answers(requests) == tokens_of(run_all(second))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@settings(max_examples=examples(5, full=80))
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_that_all_leave_again_and_again_keep_their_tokens(way, seed):
    """From one engine with little memory to the next; some blocks are damaged on the way."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 6)
    states, unstarted, done = [], requests, {}
    for _ in range(8):
        sizes = {
            "max_batched_tokens": int(rng.integers(9, 60)),
            "max_num_seqs": int(rng.integers(1, 9)),
        }
        num_blocks = int(rng.integers(22, 90))
        engine, _ = make(block_size=4, num_blocks=num_blocks, **sizes | way)
        for state in states:
            if state.kv is not None and rng.random() < 0.1:
                state.kv.blocks[rng.integers(len(state.kv.blocks))] += 1
        engine.restore(states)
        engine.add(unstarted)
        for _ in range(int(rng.integers(1, 7))):
            done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
            engine.check()
        states, unstarted, failed = engine.leave(with_kv=True)
        assert not failed
        assert engine.stats().kv_used_fraction == 0.0
    engine, _ = make(block_size=4, num_blocks=90, **way)
    engine.restore(states)
    engine.add(unstarted)
    done |= run_all(engine)
    assert answers(requests) == tokens_of(done)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    made = {}
    for theta in (10_000.0, 20_000.0):
        path = tmp_path_factory.mktemp("qwen3")
        build("qwen3", rope_theta=theta).save_pretrained(path)
        made[theta] = Engines(path)
    return list(made.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"kv_offload": True, "num_host_blocks": 90},
    ],
    ids=["float32", "int8", "bfloat16", "kv-offload"],
)
def test_real_kv_goes_from_engine_to_engine(engines, options, rng):
    made = engines[0]
    config = made.config(block_size_tokens=4, **options)
    prompts = [rng.integers(1, 200, count).tolist() for count in (5, 18, 40)]
    requests = requests_of(prompts, max_tokens=12, n=2, temperature=0.9)
    alone = made.make(config)
    alone.add(requests)
    expected = tokens_of(run_all(alone))
    first = made.make(config)
    first.add(requests)
    states = stepped(first, 4).export(range(3), with_kv=True)
    bits = {"bfloat16": np.int16, "int8": np.uint8}
    wanted = bits.get(options.get("kv_cache_dtype", options.get("dtype")), np.int32)
    spec = made.make(config).runner.spec
    for state in states:
        shape = state.kv.blocks.shape
        assert (state.kv.blocks.dtype, shape[1:5]) == (
            wanted,
            (2, spec.num_layers, spec.num_kv_heads, 4),
        )
    second = made.make(config)
    second.restore(states)
    assert expected == tokens_of(run_all(second))
    assert second.stats().num_recomputed_tokens == 0


def test_another_model_or_type_has_another_key(engines):
    config = engines[0].config(block_size_tokens=4)
    others = [
        engines[1].make(engines[1].config(block_size_tokens=4)),
        engines[0].make(engines[0].config(block_size_tokens=8)),
        engines[0].make(engines[0].config(block_size_tokens=4, dtype="bfloat16")),
        engines[0].make(engines[0].config(block_size_tokens=4, kv_cache_dtype="int8")),
    ]
    keys = {engine.runner.kv_key for engine in (engines[0].make(config), *others)}
    assert len(keys) == 5
