"""Rows that move between two engines that decode; their KV is copied ahead."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import make_request, run_all
from tests.engine.memory.test_kv_moves import WAYS, stepped
from tests.engine.real_engines import Engines, requests_of
from tests.engine.sequences.test_forks import answers, make, num_prompt_rows, tokens_of
from tests.engine.tiny_models import build
from tests.tiers import examples

BLOCK = 4


def engines(**options):
    return [make(block_size=BLOCK, **options) for _ in range(2)]


def copy_ahead(source, target, request_id, *, rounds, max_blocks=2, num_steps=1):
    """Copy blocks in rounds while the source runs; return the blocks that the target has."""
    num_blocks = 0
    for _ in range(rounds):
        state = source.moves.peek(request_id, num_blocks, max_blocks)
        if state is not None and state.kv is not None and target.moves.receive(state):
            num_blocks += len(state.kv.blocks)
        stepped(source, num_steps)
    return num_blocks


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_a_row_that_was_copied_ahead_continues_with_all_of_its_kv(options):
    (source, _), (target, runner) = engines(**options)
    request = make_request(0, np.arange(30), max_tokens=30)
    source.add([request])
    stepped(source, 3)
    assert target.moves.reserve(0, 33)
    num_blocks = copy_ahead(source, target, 0, rounds=6)
    assert num_blocks > 30 // BLOCK
    states = source.moves.depart(0, num_blocks)
    assert len(states[0].kv.blocks) <= 2
    target.restore(states)
    assert answers([request]) == tokens_of(run_all(target))
    stats = target.stats()
    assert (num_prompt_rows(runner), stats.num_recomputed_tokens) == (0, 0)
    source.moves.forget(0)
    for engine in (source, target):
        engine.check()
        assert engine.stats().kv_used_fraction == 0.0


@pytest.mark.parametrize("length", [16, 64, 256, 400])
def test_the_last_copy_of_a_row_does_not_grow_with_its_length(length):
    (source, _), (target, _) = engines(num_blocks=600)
    source.add([make_request(0, np.arange(length) % 250, max_tokens=80)])
    stepped(source, 2)
    assert target.moves.reserve(0, length)
    num_blocks = copy_ahead(source, target, 0, rounds=24, max_blocks=16)
    (state,) = source.moves.depart(0, num_blocks)
    assert len(state.kv.blocks) <= 2


def test_a_row_that_stays_after_all_continues_without_recomputation():
    (source, runner), _ = engines()
    request = make_request(0, np.arange(30), max_tokens=30)
    source.add([request])
    stepped(source, 5)
    before = num_prompt_rows(runner)
    states = source.moves.depart(0, 7)
    stepped(source, 2)
    source.restore(states)
    source.check()
    assert answers([request]) == tokens_of(run_all(source))
    assert (num_prompt_rows(runner), source.stats().num_recomputed_tokens) == (before, 0)
    assert source.stats().kv_used_fraction == 0.0


def test_blocks_of_a_row_that_left_are_free_once_it_is_forgotten():
    (source, _), _ = engines(enable_prefix_caching=False)
    source.add([make_request(0, np.arange(30), max_tokens=30)])
    stepped(source, 5)
    source.moves.depart(0, 0)
    source.check()
    assert source.stats().kv_used_fraction > 0
    source.moves.forget(0)
    source.check()
    assert source.stats().kv_used_fraction == 0.0


def test_no_blocks_are_reserved_for_a_row_if_others_need_them():
    _, (target, _) = engines(num_blocks=16)
    target.add([make_request(1, np.arange(30), max_tokens=20)])
    stepped(target, 2)
    # eight of sixteen blocks are used, and the running row wants more
    assert not target.moves.reserve(0, 8)
    assert target.moves.reserve(0, 6)
    target.check()


def test_blocks_are_reserved_for_a_row_once():
    _, (target, _) = engines()
    assert target.moves.reserve(0, 8)
    assert not target.moves.reserve(0, 8)
    target.moves.forget(0)
    target.check()
    assert target.moves.reserve(0, 8)


@pytest.mark.parametrize(("num_blocks", "is_received"), [(6, False), (7, True)])
def test_a_row_that_has_grown_takes_the_last_free_blocks_and_no_more(num_blocks, is_received):
    (source, _), _ = engines()
    target, _ = make(block_size=BLOCK, num_blocks=num_blocks)
    source.add([make_request(0, np.arange(30), max_tokens=9)])
    stepped(source, 3)
    state = source.moves.peek(0, 0, 7)
    assert (len(state.kv.blocks), True) == (7, target.moves.reserve(0, 4))
    assert is_received == target.moves.receive(state)
    target.check()


def test_a_block_with_a_token_that_is_not_read_yet_is_not_copied():
    """A GPU may be ahead: it has computed with a token that the host does not know."""
    (source, _), _ = engines()
    source.add([make_request(0, np.arange(30), max_tokens=9)])
    while source.table.num_tokens[0] < 32:
        source.step()
    # the block of the last token
    source.table.num_computed[0] = 32
    assert len(source.moves.peek(0, 0, 99).kv.blocks) == 7


def test_no_blocks_are_reserved_for_a_row_if_others_wait():
    _, (target, _) = engines(max_num_seqs=1)
    target.add([make_request(i, np.arange(8), max_tokens=9) for i in (1, 2)])
    stepped(target, 2)
    assert not target.moves.reserve(0, 8)


@pytest.mark.parametrize("bit", [0, 1])
def test_damaged_blocks_are_not_received(bit, caplog):
    (source, _), (target, _) = engines()
    source.add([make_request(0, np.arange(30), max_tokens=9)])
    stepped(source, 3)
    target.moves.reserve(0, 33)
    state = source.moves.peek(0, 0, 4)
    blocks = state.kv.blocks.copy()
    blocks[2, bit, 0] ^= 1
    with caplog.at_level(logging.WARNING):
        assert not target.moves.receive(replace(state, kv=replace(state.kv, blocks=blocks)))
    assert "KV of row 0" in caplog.text
    assert target.moves.receive(state)


def test_blocks_after_a_gap_are_not_received():
    (source, _), (target, _) = engines()
    source.add([make_request(0, np.arange(30), max_tokens=9)])
    stepped(source, 3)
    target.moves.reserve(0, 33)
    assert not target.moves.receive(source.moves.peek(0, 1, 2))
    assert target.moves.receive(source.moves.peek(0, 0, 2))


def test_nothing_is_received_without_a_reservation():
    (source, _), (target, _) = engines()
    source.add([make_request(0, np.arange(30), max_tokens=9)])
    stepped(source, 3)
    assert not target.moves.receive(source.moves.peek(0, 0, 2))


@pytest.mark.parametrize("num_samples", [2, 3])
def test_a_row_with_several_samples_is_not_copied_ahead(num_samples):
    (source, _), (target, _) = engines()
    request = make_request(0, np.arange(16), n=num_samples, max_tokens=9)
    source.add([request])
    stepped(source, 3)
    assert source.moves.peek(0, 0, 2) is None
    target.restore(source.moves.depart(0, 0))
    assert answers([request]) == tokens_of(run_all(target))


def test_a_row_that_has_ended_cannot_leave():
    (source, _), _ = engines()
    source.add([make_request(0, np.arange(8), max_tokens=2)])
    run_all(source)
    assert source.moves.peek(0, 0, 2) is None
    assert source.moves.depart(0, 0) == []


def test_an_incomplete_prompt_is_not_copied_ahead():
    (source, _), _ = engines(max_batched_tokens=20)
    source.add([make_request(0, np.arange(50), max_tokens=4)])
    stepped(source, 2)
    assert source.moves.peek(0, 0, 2) is None


def test_progress_covers_each_running_sequence():
    (source, _), _ = engines()
    source.add([make_request(i, np.arange(8 + i), max_tokens=20) for i in range(3)])
    stepped(source, 4)
    progress = source.moves.progress()
    assert [0, 1, 2] == progress.request_ids.tolist()
    assert [4, 4, 4] == progress.num_generated.tolist()
    assert [12, 13, 14] == progress.num_tokens.tolist()


@settings(max_examples=examples(60, full=2000))
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 25)), min_size=1, max_size=6),
    st.lists(st.integers(0, 99), min_size=1, max_size=40),
)
def test_random_moves_change_no_token(shapes, choices):
    """Each choice steps an engine, continues the move of a row, or ends one."""
    both = [engine for engine, _ in engines(num_blocks=120)]
    requests = [
        make_request(i, np.arange(i, i + n), max_tokens=m) for i, (n, m) in enumerate(shapes)
    ]
    both[0].add(requests)
    found, place, copied = {}, dict.fromkeys(range(len(requests)), 0), {}
    for choice in choices:
        row = choice % len(requests)
        source, target = both[place[row]], both[1 - place[row]]
        match choice % 7:
            case 0 | 1 | 2:
                for engine in both:
                    found |= {(c.request_id, c.sample_idx): c for c in engine.step()}
            case 3:
                if source.moves.peek(row, 0, 1) and target.moves.reserve(row, 8):
                    copied[row] = 0
            case 4:
                state = source.moves.peek(row, copied.get(row, 0), 2)
                if state and row in copied and target.moves.receive(state):
                    copied[row] += len(state.kv.blocks)
            case 5:
                states = source.moves.depart(row, copied.pop(row, 0))
                target.restore(states)
                source.moves.forget(row)
                place[row] = 1 - place[row] if states else place[row]
                if not states:
                    target.moves.forget(row)
            case 6:
                source.restore(source.moves.depart(row, copied.get(row, 0)))
        for engine in both:
            engine.check()
    for engine in both:
        found |= run_all(engine)
    assert answers(requests) == tokens_of(found)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Three makers of engines of one model, with separate pools."""
    path = tmp_path_factory.mktemp("qwen3")
    build("qwen3").save_pretrained(path)
    return [Engines(path) for _ in range(3)]


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_dtype": "int8"}, {"kv_offload": True, "num_host_blocks": 90}],
    ids=["float32", "int8", "kv-offload"],
)
def test_a_moved_row_of_a_real_model_has_the_tokens_of_a_row_that_stayed(real, options):
    source, target, alone = (
        made.make(made.config(block_size_tokens=4, **options)) for made in real
    )
    (request,) = requests_of([np.arange(3, 40)], max_tokens=40)
    alone.add([request])
    source.add([request])
    stepped(source, 4)
    target.moves.reserve(0, 48)
    num_blocks = copy_ahead(source, target, 0, rounds=5)
    target.restore(source.moves.depart(0, num_blocks))
    assert num_blocks > 0
    assert tokens_of(run_all(alone)) == tokens_of(run_all(target))
    assert target.stats().num_recomputed_tokens == 0
