"""Prefix groups: their queue, their pinned blocks, and what they compute."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import generate, make_request, run_all
from tests.engine.test_engine import VOCAB, make_engine, tokens_of
from tests.tiers import examples


def member(request_id, group_id, prefix, suffix, *, max_tokens=4, **sampling):
    prompt = np.r_[prefix, suffix].astype(np.int32)
    request = make_request(request_id, prompt, max_tokens=max_tokens, **sampling)
    return dataclasses.replace(request, group_id=group_id, prefix_len=len(prefix))


def expected(requests):
    return {
        (r.request_id, i): generate(r.prompt_token_ids.tolist(), r.sampling.max_tokens, VOCAB)
        for r in requests
        for i in range(r.sampling.n)
    }


def groups(rng, *, count, size, prefix, suffix, **options):
    """Requests of `count` groups, group after group."""
    requests = []
    for group in range(count):
        shared = rng.integers(0, VOCAB, prefix)
        for _ in range(size):
            own = np.r_[len(requests) % VOCAB, rng.integers(0, VOCAB, suffix - 1)]
            requests.append(member(len(requests), group, shared, own, **options))
    return requests


def computed_prefill(runner):
    return sum(sum(step.chunk_lens) for step in runner.steps)


def test_members_go_before_new_groups(rng):
    engine, _ = make_engine(max_num_seqs=2)
    requests = groups(rng, count=2, size=3, prefix=8, suffix=2)
    order = [requests[i] for i in (0, 3, 1, 4, 2, 5)]
    engine.add(order)
    engine.step()
    assert [3, 4, 2, 5] == [request.request_id for request in engine.drain()]


def test_members_that_come_late_go_before_new_groups(rng):
    engine, _ = make_engine(max_num_seqs=1)
    requests = groups(rng, count=2, size=2, prefix=8, suffix=2)
    engine.add([requests[0]])
    engine.step()
    engine.add([requests[2], requests[1]])
    assert [1, 2] == [record.request.request_id for record in engine._scheduler.waiting()]


def test_rows_in_any_order_compute_each_prefix_once(rng):
    engine, runner = make_engine(
        num_blocks=12, max_num_seqs=4, enable_prefix_caching=False, full_step_tokens=0
    )
    requests = groups(rng, count=8, size=5, prefix=24, suffix=4)
    engine.add(requests[i] for i in rng.permutation(len(requests)))
    assert expected(requests) == tokens_of(run_all(engine))
    assert engine.stats().num_preemptions == 0
    assert computed_prefill(runner) == 8 * (24 + 5 * 4)


def num_pinned(engine):
    """Return the blocks that are held for prefix groups."""
    return engine._scheduler.shared.num_pinned


def test_a_prefix_without_running_members_is_kept(rng):
    engine, runner = make_engine(num_blocks=16, enable_prefix_caching=False, max_num_seqs=1)
    first, second = groups(rng, count=1, size=2, prefix=40, suffix=2, max_tokens=1)
    engine.add([first, second])
    engine.step()
    assert (engine.stats().num_running, num_pinned(engine)) == (0, 10)
    engine.step()
    assert computed_prefill(runner) == 44
    assert num_pinned(engine) == 0


def test_a_late_member_joins(rng):
    engine, runner = make_engine(enable_prefix_caching=False)
    first, second = groups(rng, count=1, size=2, prefix=40, suffix=2, max_tokens=9)
    engine.add([first])
    for _ in range(3):
        engine.step()
    engine.add([second])
    run_all(engine)
    assert computed_prefill(runner) == 44


def test_what_an_aborted_member_computed_of_the_prefix_is_kept(rng):
    engine, runner = make_engine(enable_prefix_caching=False, max_batched_tokens=17)
    requests = groups(rng, count=1, size=3, prefix=40, suffix=2)
    engine.add(requests)
    engine.step()
    engine.abort([0])
    assert num_pinned(engine) == 4
    assert expected(requests[1:]) == tokens_of(run_all(engine))
    # one token of the fifth block is lost
    assert computed_prefill(runner) == 17 + (40 - 16) + 2 * 2


def test_a_prefix_shorter_than_a_block_is_not_pinned(rng):
    engine, _ = make_engine()
    engine.add(groups(rng, count=1, size=3, prefix=3, suffix=2))
    engine.step()
    assert num_pinned(engine) == 0


def test_a_member_with_other_tokens_keeps_its_own_output(rng):
    engine, _ = make_engine(enable_prefix_caching=False)
    requests = [
        member(0, 7, rng.integers(0, VOCAB, 8), [1, 2]),
        member(1, 7, rng.integers(0, VOCAB, 8), [1, 2]),
    ]
    engine.add(requests)
    assert expected(requests) == tokens_of(run_all(engine))


def test_members_that_are_nothing_but_their_prefix_run_one_by_one_in_a_full_pool(rng):
    engine, _ = make_engine(num_blocks=5, enable_prefix_caching=False)
    shared = rng.integers(0, VOCAB, 16)
    requests = [member(i, i % 2, shared, [], max_tokens=2 + i) for i in range(4)]
    engine.add(requests)
    done = run_all(engine)
    assert {c.finish_reason for c in done.values()} == {"length"}
    assert expected(requests) == tokens_of(done)


def test_a_row_of_another_group_gets_the_memory_of_idle_prefixes(rng):
    engine, _ = make_engine(num_blocks=12, enable_prefix_caching=False, max_num_seqs=1)
    (short, late), (long, _) = (
        groups(rng, count=1, size=2, prefix=n, suffix=2, max_tokens=1) for n in (24, 40)
    )
    engine.add([short, dataclasses.replace(late, request_id=1)])
    engine.step()
    assert num_pinned(engine) == 6
    (state,) = _states([dataclasses.replace(long, request_id=2, group_id=9)])
    engine.restore([state])
    done = run_all(engine)
    assert {(1, 0), (2, 0)} == set(done)
    assert {c.finish_reason for c in done.values()} == {"length"}


def _states(requests):
    other, _ = make_engine()
    other.add(requests)
    return other.export([r.request_id for r in requests])


def test_the_prefix_of_a_row_with_bad_logits_is_computed_again(rng):
    engine, runner = make_engine(nan_after=999, enable_prefix_caching=False, max_num_seqs=1)
    shared = np.arange(8)
    engine.add([member(0, 3, shared, [999]), member(1, 3, shared, [5], max_tokens=1)])
    engine.step()
    assert num_pinned(engine) == 0
    run_all(engine)
    assert computed_prefill(runner) == 18


@settings(max_examples=examples(25, full=50))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(14, 60),
    budget=st.integers(6, 60),
    caching=st.booleans(),
    full=st.sampled_from([0, 8, math.inf]),
    events=st.lists(st.integers(0, 7), max_size=40),
)
def test_the_books_are_right_whatever_happens(seed, num_blocks, budget, caching, full, events):
    rng = np.random.default_rng(seed)
    engine, _ = make_engine(
        num_blocks=num_blocks,
        max_batched_tokens=budget,
        max_num_seqs=6,
        enable_prefix_caching=caching,
        full_step_tokens=full,
    )
    requests = _mixed_requests(rng)
    new, done, gone = list(requests), {}, set()
    for event in events:
        ids = rng.choice(len(requests), 4).tolist()
        if event == 0:
            engine.abort(ids)
            gone |= set(ids)
        elif event == 1:
            engine.restore(engine.export(ids))
        elif event == 2:
            new += engine.drain()
        elif event in (3, 4) and new:
            batch = [r for r in new[:6] if r.request_id not in gone]
            engine.add(batch)
            new = new[6:]
        else:
            done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
        engine.check()
    engine.add(r for r in new if r.request_id not in gone)
    done |= run_all(engine)
    outputs = tokens_of({k: c for k, c in done.items() if k[0] not in gone})
    assert {k: v for k, v in expected(requests).items() if k[0] not in gone} == outputs
    assert (num_pinned(engine), engine.stats().kv_used_fraction) == (0, 0.0)


def _mixed_requests(rng):
    """Rows of four groups and rows of none, mixed; two groups have the same prefix."""
    prefixes = [rng.integers(0, VOCAB, int(rng.integers(3, 28))) for _ in range(3)]
    prefixes.append(prefixes[0])
    requests = []
    for i in range(20):
        group = int(rng.integers(0, 5))
        suffix = rng.integers(0, VOCAB, int(rng.integers(1, 6)))
        count, length = int(rng.integers(1, 3)), int(rng.integers(1, 14))
        if group == 4:
            requests.append(make_request(i, suffix, max_tokens=length, n=count))
        else:
            requests.append(member(i, group, prefixes[group], suffix, max_tokens=length, n=count))
    return requests


@pytest.mark.parametrize("caching", [True, False], ids=["hashes", "pins-alone"])
@pytest.mark.parametrize(
    ("num_rows", "degree"),
    [
        (192, 2),
        (192, 16),
        *(pytest.param(1024, degree, marks=pytest.mark.exhaustive) for degree in (2, 4, 16, 64)),
    ],
)
def test_computed_prefill_tokens_are_those_of_the_closed_form(rng, num_rows, degree, caching):
    num_groups, prefix, distinct, block_size = num_rows // degree, 256, 32, 16
    engine, runner = make_engine(
        num_blocks=num_groups * prefix // 4 // block_size,
        block_size_tokens=block_size,
        max_batched_tokens=512,
        max_num_seqs=256,
        enable_prefix_caching=caching,
        full_step_tokens=0,
    )
    engine.add(
        groups(rng, count=num_groups, size=degree, prefix=prefix, suffix=distinct, max_tokens=16)
    )
    run_all(engine, check=False)
    closed_form = num_groups * (prefix + degree * distinct)
    assert abs(computed_prefill(runner) / closed_form - 1) < 0.01
    assert num_pinned(engine) == 0
