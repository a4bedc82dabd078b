"""KV that lives in host memory: rounds of prompts, page boundaries, failures, and moved rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.errors import ConfigError
from tests.engine.fakes import (
    FakeRunner,
    FakeSampler,
    FakeSpec,
    FakeStopChecker,
    generate,
    make_request,
    run_all,
)
from tests.engine.test_engine import VOCAB, shared_prompts, tokens_of
from tests.engine.test_groups import expected
from tests.tiers import examples

BLOCK = 4


def make(*, num_blocks=20, host=100, nan_after=None, failing=(), **config):
    options = {"max_batched_tokens": 32, "max_num_seqs": 16, "kv_offload": True} | config
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=BLOCK,
        spec=FakeSpec(VOCAB, (), 512),
        nan_after=nan_after,
        num_host_blocks=host,
        num_window_blocks=num_blocks,
        forgets_loaded=False,
        failing_moves=set(failing),
    )
    config = EngineConfig(host_kv_bytes=1, block_size_tokens=BLOCK, **options)
    return Engine(runner, FakeSampler(), FakeStopChecker(), config), runner


def rows(rng, count=12, prompt=10, max_tokens=20):
    return [
        make_request(i, rng.integers(0, VOCAB, prompt), max_tokens=max_tokens) for i in range(count)
    ]


def is_empty(engine):
    store = engine._scheduler.store
    return (store.blocks.num_used, engine.stats().kv_used_fraction) == (0, 0.0)


@settings(max_examples=examples(14, full=60))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(20, 60),
    host=st.integers(20, 150),
    budget=st.integers(3, 70),
    slots=st.integers(1, 16),
    interval=st.integers(1, 3),
    extra=st.integers(0, 2),
    victims=st.sampled_from(["least", "most", "lifo"]),
)
def test_tokens_are_those_of_one_by_one_generation(
    seed, num_blocks, host, budget, slots, interval, extra, victims
):
    rng = np.random.default_rng(seed)
    engine, _ = make(
        num_blocks=num_blocks,
        host=host,
        max_batched_tokens=budget,
        max_num_seqs=slots,
        offload_initial_blocks=interval + extra,
        offload_extension_blocks=interval + extra,
        offload_interval_blocks=interval,
        offload_victims=victims,
    )
    requests = [
        make_request(i, prompt, max_tokens=int(rng.integers(1, 24)), n=int(rng.integers(1, 3)))
        for i, prompt in enumerate(shared_prompts(rng, 20))
    ]
    engine.add(requests[:12])
    done = {}
    for _ in range(int(rng.integers(1, 30))):
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
        engine.check()
    engine.add(requests[12:])
    done |= run_all(engine)
    assert tokens_of(done) == expected(requests)
    assert is_empty(engine)


def test_prompts_run_in_rounds_and_never_beside_decodes(rng):
    engine, runner = make()
    engine.add(rows(rng, count=30))
    run_all(engine)
    assert all(not step.num_decode for step in runner.steps if step.chunk_lens)
    rounds = [bool(step.chunk_lens) for step in runner.steps]
    num_rounds = sum(now and not was for was, now in itertools.pairwise([False, *rounds]))
    assert 2 <= num_rounds < 10


def test_a_round_computes_more_prompts_than_the_device_can_decode(rng):
    engine, runner = make(num_blocks=12, host=200)
    engine.add(rows(rng, count=16))
    done = {}
    while not any(step.num_decode for step in runner.steps):
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
    assert sum(map(len, (step.chunk_lens for step in runner.steps))) >= 16
    # 10 tokens are 3 blocks, and two more are set aside for each
    assert runner.steps[-1].num_decode == 2
    run_all(engine)


def test_long_prompts_are_cut_and_steps_of_a_round_are_full(rng):
    engine, runner = make(num_blocks=60, max_batched_tokens=16)
    requests = rows(rng, count=6, prompt=41)
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    prompts = [step.num_tokens for step in runner.steps if step.chunk_lens]
    assert prompts[:-1] == [16] * (len(prompts) - 1)
    assert sum(prompts) == 6 * 41


def test_nothing_is_computed_twice_while_the_host_has_room(rng):
    engine, runner = make(host=300)
    requests = rows(rng, count=30)
    engine.add(requests)
    run_all(engine)
    stats = engine.stats()
    computed = sum(step.num_tokens for step in runner.steps)
    assert computed == stats.prompt_tokens + stats.generated_tokens - len(requests)
    assert stats.num_recomputed_tokens == 0
    assert stats.swapped_bytes > 0


def test_a_prefix_is_computed_once_and_copied_to_all_that_have_it(rng):
    engine, runner = make(num_blocks=60, host=300)
    prefix = rng.integers(0, VOCAB, 24)
    requests = [
        make_request(i, np.r_[prefix, rng.integers(0, VOCAB, 5)], max_tokens=4) for i in range(9)
    ]
    engine.add(requests)
    done = run_all(engine)
    assert tokens_of(done) == expected(requests)
    # the others wait for the first, though the budget of its step has three tokens left
    prompts = [step.chunk_lens for step in runner.steps if step.chunk_lens]
    assert prompts == [(29,), (5, 5, 5, 5, 5, 5, 2), (3, 5)]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (9 * 29, 8 * 24)
    assert sorted(done[i, 0].num_cached_tokens for i in range(9)) == [0, *[24] * 8]


def test_who_waits_for_a_prefix_lets_others_pass(rng):
    engine, runner = make(num_blocks=60, host=300, max_batched_tokens=16)
    shared = rng.integers(0, VOCAB, 20)
    prompts = [shared, np.r_[shared, 7, 7], rng.integers(0, VOCAB, 9), rng.integers(0, VOCAB, 3)]
    requests = [make_request(i, prompt, max_tokens=2) for i, prompt in enumerate(prompts)]
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    # the second has all but two tokens from the first, in the step after its end
    assert [s.chunk_lens for s in runner.steps if s.chunk_lens] == [(16,), (4, 9, 3), (2,)]


@pytest.mark.parametrize("caching", [True, False])
def test_without_prefix_caching_only_samples_of_a_request_share(rng, caching):
    engine, _ = make(num_blocks=60, host=300, enable_prefix_caching=caching)
    prompt = rng.integers(0, VOCAB, 21)
    requests = [make_request(i, prompt, max_tokens=3, n=2) for i in range(2)]
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    # a sample takes the whole prompt of the one before, another row its full blocks
    assert engine.stats().cached_tokens == 2 * 21 + (20 if caching else 0)


def test_a_boundary_does_not_look_at_all_rows_that_wait(rng):
    engine, _ = make(max_num_seqs=4, host=60)
    requests = rows(rng, count=200, max_tokens=3)
    engine.add(requests)
    largest, done = 0, {}
    while engine.num_unfinished():
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
        largest = max(largest, len(engine._scheduler._sequences))
    assert tokens_of(done) == expected(requests)
    # four that decode, four prompts that are computed, and as many behind them
    assert largest <= 12


def test_a_small_host_evicts_and_what_was_evicted_is_computed_again(rng):
    engine, runner = make(num_blocks=60, host=40)
    requests = rows(rng, count=20, max_tokens=60)
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens > 0
    computed = sum(step.num_tokens for step in runner.steps)
    once = stats.prompt_tokens + stats.generated_tokens - len(requests)
    assert computed == once + stats.num_recomputed_tokens


@pytest.mark.parametrize("victims", ["least", "most", "lifo"])
def test_a_short_device_suspends_in_every_order_of_victims(rng, victims):
    engine, _ = make(num_blocks=24, host=300, offload_victims=victims)
    requests = rows(rng, count=16, max_tokens=60)
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens == 0
    assert stats.num_swapped_tokens > stats.num_preemptions


def test_what_comes_to_the_device_for_the_first_time_has_not_come_back(rng):
    engine, _ = make(num_blocks=100, host=300)
    engine.add(rows(rng, count=8))
    engine.step()
    # 8 rows of 3 blocks, or some less, and room for four boundaries more
    assert engine.stats().kv_used_fraction > 20 / 300
    run_all(engine)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_swapped_tokens) == (0, 0)
    assert stats.swapped_bytes > 0


def test_places_of_short_rows_are_filled_before_the_interval_is_over(rng):
    # memory for four rows at a time, of which one is long
    engine, runner = make(
        num_blocks=26,
        offload_initial_blocks=3,
        offload_extension_blocks=3,
        offload_interval_blocks=3,
    )
    lengths = [60, *[2] * 15]
    engine.add(
        make_request(i, rng.integers(0, VOCAB, 10), max_tokens=length)
        for i, length in enumerate(lengths)
    )
    num_done = 0
    while sum(bool(step.num_decode) for step in runner.steps) < 12:
        num_done += len(engine.step())
    assert num_done >= 12


@settings(max_examples=examples(12, full=40))
@given(seed=st.integers(0, 2**32 - 1))
def test_failing_copies_cost_time_and_no_token(seed):
    rng = np.random.default_rng(seed)
    # a third time in a row would end the engine
    failing = rng.choice(40, 2, replace=False).tolist()
    engine, runner = make(num_blocks=24, host=60, failing=failing)
    requests = rows(rng, count=12, max_tokens=30)
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    assert is_empty(engine)
    assert runner.num_moves > max(failing)


def test_a_host_that_gives_nothing_back_ends_the_engine_with_its_reason(rng):
    engine, _ = make(failing=range(10_000))
    engine.add(rows(rng))
    with pytest.raises(RuntimeError, match="on strike"):
        run_all(engine)


@settings(max_examples=examples(10, full=30))
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_that_are_taken_out_at_any_step_go_on_elsewhere(seed):
    rng = np.random.default_rng(seed)
    first, _ = make(num_blocks=24, host=60)
    second, _ = make(num_blocks=24, host=60)
    requests = rows(rng, count=12, max_tokens=30)
    first.add(requests)
    done, moved = {}, set()
    while first.num_unfinished():
        done |= {(c.request_id, c.sample_idx): c for c in first.step()}
        first.check()
        if rng.random() < 0.2:
            ids = {int(i) for i in rng.integers(0, len(requests), 2)} - moved
            second.restore(first.export(ids))
            moved |= ids
            first.check()
    done |= run_all(second)
    assert tokens_of(done) == expected(requests)
    assert is_empty(first)
    assert is_empty(second)


def test_what_has_not_started_can_be_given_back(rng):
    engine, _ = make(max_num_seqs=4)
    requests = rows(rng, count=10)
    engine.add(requests)
    engine.step()
    given_back = engine.drain()
    assert [request.request_id for request in given_back] == [4, 5, 6, 7, 8, 9][-len(given_back) :]
    assert 6 <= len(given_back) < 10
    engine.check()
    done = run_all(engine)
    assert len(done) == 10 - len(given_back)


@pytest.mark.parametrize("is_prompt", [True, False])
def test_a_row_with_broken_logits_fails_alone(rng, is_prompt):
    requests = rows(rng)
    prompt = requests[3].prompt_token_ids.tolist()
    broken = prompt[-1] if is_prompt else generate(prompt, 5, VOCAB)[4]
    others = [r for i, r in enumerate(requests) if i != 3]
    assert all(broken not in tokens for tokens in expected(others).values())
    engine, runner = make(nan_after=broken)
    engine.add(requests)
    done = run_all(engine)
    assert done.pop((3, 0)).finish_reason == "error"
    assert tokens_of(done) == expected(others)
    # the window of a prompt may lie anywhere in the pool
    assert (sorted(runner.cleared) == list(range(20))) == is_prompt
    assert is_empty(engine)


def test_books_that_do_not_add_up_are_found(rng):
    engine, _ = make()
    engine.add(rows(rng))
    for _ in range(12):
        engine.step()
    scheduler = engine._scheduler
    stored = next(s for s in scheduler._sequences.values() if s.host_blocks)
    lost = stored.host_blocks.pop()
    with pytest.raises(RuntimeError, match="host blocks"):
        engine.check()
    stored.host_blocks.append(lost)
    engine.check()
    stored.num_stored += 100
    with pytest.raises(RuntimeError, match="host memory has"):
        engine.check()
    stored.num_stored -= 100
    scheduler.store.prefixes.drop(stored)
    engine.check()
    scheduler.store.prefixes.add(stored)
    stored.num_stored = 0
    with pytest.raises(RuntimeError, match="blocks that it has not stored"):
        engine.check()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"host_kv_bytes": None}, "kv_offload needs host memory for KV"),
        ({"kv_offload": False, "offload_victims": "most"}, "engine.offload_victims is for KV"),
        ({"kv_offload": False, "offload_initial_blocks": 3}, "set kv_offload and host_kv_bytes"),
        ({"speculative_tokens": 4}, "speculative_tokens cannot be set with engine.kv_offload"),
        ({"kv_checkpoint_blocks": 4}, "kv_checkpoint_blocks cannot be set"),
        ({"admission": "shortest"}, "admission cannot be set"),
        ({"kv_admission_fraction": 0.9}, "kv_admission_fraction cannot be set"),
        ({"cuda_graphs": True}, "cuda_graphs cannot be set"),
        ({"kv_offload": "yes"}, "kv_offload must be true or false"),
        ({"offload_victims": "oldest"}, "offload_victims"),
        ({"offload_initial_blocks": 1, "offload_interval_blocks": 2}, "offload_initial_blocks"),
        ({"offload_extension_blocks": 0}, "offload_extension_blocks"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        EngineConfig(**({"kv_offload": True, "host_kv_bytes": 1 << 20} | options))
