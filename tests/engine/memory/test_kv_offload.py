"""KV in host memory: parts that fit the window, failures, rows that move."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.forward.coroutine import combine_at_experts
from raybatch.errors import ConfigError
from tests.engine.fakes import (
    FakeSampler,
    FakeSpec,
    FakeStopChecker,
    generate,
    make_request,
    run_all,
)
from tests.engine.sequences.test_groups import expected
from tests.engine.test_engine import VOCAB, shared_prompts, tokens_of
from tests.engine.test_runtime import AnyOrder
from tests.engine.window_runner import WindowRunner
from tests.tiers import examples

BLOCK = 4


def make(
    *, pool_blocks=20, host=100, nan_after=-1, failing=(), part_blocks=None, order=None, **config
):
    """An engine whose parts need `part_blocks` at most and run in a random `order`, if given."""
    options = {"max_batched_tokens": 32, "max_num_seqs": 16, "kv_offload": True} | config
    runner = WindowRunner(
        pool_blocks=pool_blocks,
        host_blocks=host,
        block_size=BLOCK,
        spec=FakeSpec(VOCAB, (), 512),
        nan_after=nan_after,
        failing=failing,
        choose=combine_at_experts if order is None else AnyOrder(order),
    )
    config = EngineConfig(host_kv_bytes=1, block_size_tokens=BLOCK, **options)
    engine = Engine(runner, FakeSampler(), FakeStopChecker(), config)
    if part_blocks is not None:
        runner.num_window_blocks = min(part_blocks, runner.num_window_blocks)
    return engine, runner


def rows(rng, count=12, prompt=10, max_tokens=20):
    return [
        make_request(i, rng.integers(0, VOCAB, prompt), max_tokens=max_tokens) for i in range(count)
    ]


def spread(rng, count):
    """Failing ones of the first 200 copies; three failures in a row would end the engine."""
    failing = rng.choice(200, count, replace=False)
    return [int(i) for i in failing if not {i - 1, i - 2} <= set(failing.tolist())]


@settings(max_examples=examples(25, full=150))
@given(
    seed=st.integers(0, 2**32 - 1),
    pool_blocks=st.integers(20, 60),
    host=st.integers(20, 150),
    budget=st.integers(3, 70),
    slots=st.integers(1, 16),
    part_blocks=st.none() | st.integers(1, 12),
    order=st.none() | st.integers(0, 2**32 - 1),
    caching=st.booleans(),
    num_failing=st.integers(0, 15),
)
def test_tokens_are_those_of_one_by_one_generation(
    seed, pool_blocks, host, budget, slots, part_blocks, order, caching, num_failing
):
    """In any firing order, with any sizes of parts and steps, while copies fail."""
    rng = np.random.default_rng(seed)
    engine, runner = make(
        pool_blocks=pool_blocks,
        host=host,
        max_batched_tokens=budget,
        max_num_seqs=slots,
        failing=spread(rng, num_failing),
        part_blocks=part_blocks,
        order=order,
        enable_prefix_caching=caching,
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
    # in any order, each row was in one run of the feed-forward block of a layer
    assert all(sum(step.gates) == sum(step.parts) for step in runner.steps)


def test_experts_compute_more_rows_than_the_device_has_kv_for(rng):
    # a buffer holds 8 blocks, which is two rows; the host has room for all
    engine, runner = make(pool_blocks=8, host=200, max_batched_tokens=300)
    requests = rows(rng, count=16, prompt=13, max_tokens=3)
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    assert [len(step.parts) for step in runner.steps] == [8, 8, 8]
    assert [step.gates for step in runner.steps] == [[16 * 13], [16], [16]]


def test_each_step_copies_in_what_it_reads_and_out_only_its_tokens(rng):
    engine, runner = make(pool_blocks=40, host=200, max_batched_tokens=200)
    engine.add(rows(rng, count=5, prompt=13, max_tokens=4))
    run_all(engine)
    counters, row = runner.window_counters, runner.tiers.block_bytes // BLOCK
    # 12 tokens of a prompt fill blocks; the next block and, later, all blocks are copied in
    assert counters.loaded_bytes == 5 * (1 + 4 + 4 + 4) * BLOCK * row
    assert counters.saved_bytes == 5 * (13 + 3) * row
    assert engine.stats().swapped_bytes == counters.loaded_bytes + counters.saved_bytes


def test_members_of_a_group_attend_together_in_any_slots(rng):
    # a buffer holds one document of 6 blocks with the 2 of each of its 4 rows
    engine, runner = make(pool_blocks=14, host=300, max_batched_tokens=200)
    documents = rng.integers(0, VOCAB, (3, 24))
    requests = [
        make_request(i, np.r_[documents[i % 3], rng.integers(0, VOCAB, 5)], max_tokens=3)
        for i in range(12)
    ]
    engine.add(requests)
    done = {}
    while not any(step.gates == [12] for step in runner.steps):
        before = runner.window_counters.loaded_bytes
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
    loaded = runner.window_counters.loaded_bytes - before
    assert loaded == 3 * (6 + 4 * 2) * runner.tiers.block_bytes
    assert tokens_of(done | run_all(engine)) == expected(requests)


def test_a_prefix_is_copied_in_once_for_rows_that_attend_together(rng):
    engine, runner = make(pool_blocks=60, host=300, max_batched_tokens=200)
    prefix = rng.integers(0, VOCAB, 24)
    requests = [
        make_request(i, np.r_[prefix, rng.integers(0, VOCAB, 5)], max_tokens=2) for i in range(9)
    ]
    engine.add(requests)
    while not any(len(step.parts) and step.gates == [9] for step in runner.steps):
        before = runner.window_counters.loaded_bytes
        engine.step()
    loaded = runner.window_counters.loaded_bytes - before
    assert loaded == (6 + 9 * 2) * runner.tiers.block_bytes
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (9 * 29, 8 * 24)


def test_parts_that_read_the_output_of_another_part_run_after_it(rng):
    # two prompts with one prefix need 14 blocks, and a buffer has ten
    engine, runner = make(pool_blocks=10, host=100, max_batched_tokens=100)
    prefix = rng.integers(0, VOCAB, 24)
    requests = [
        make_request(i, np.r_[prefix, rng.integers(0, VOCAB, 13)], max_tokens=2) for i in range(2)
    ]
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    assert runner.steps[0].parts == [37, 13]


def test_a_row_that_no_buffer_holds_ends_with_its_tokens(rng):
    engine, _ = make(pool_blocks=5, host=100)
    requests = [make_request(0, rng.integers(0, VOCAB, 10), max_tokens=60), *rows(rng, 3)[1:]]
    engine.add(requests)
    done = run_all(engine)
    assert done[0, 0].finish_reason == "capacity"
    assert len(done[0, 0].token_ids) == 5 * BLOCK - 10 + 1
    assert done[1, 0].finish_reason == "capacity"


def test_a_small_host_preempts_and_computes_again(rng):
    engine, _ = make(pool_blocks=60, host=40)
    requests = rows(rng, count=20, max_tokens=60)
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens > 0


@settings(max_examples=examples(12, full=40))
@given(seed=st.integers(0, 2**32 - 1))
def test_failing_copies_cost_time_and_no_token(seed):
    rng = np.random.default_rng(seed)
    failing = spread(rng, 20)
    engine, runner = make(pool_blocks=24, host=60, failing=failing)
    requests = rows(rng, count=12, max_tokens=30)
    engine.add(requests)
    assert tokens_of(run_all(engine)) == expected(requests)
    assert runner.host.num_copies > 200
    assert engine.stats().num_failed_copies == len(failing)


def test_a_host_whose_copies_all_fail_ends_the_engine_with_the_reason(rng):
    engine, _ = make(failing=range(10_000))
    engine.add(rows(rng))
    with pytest.raises(RuntimeError, match="copy engine has failed"):
        run_all(engine)


@settings(max_examples=examples(10, full=30))
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_that_leave_at_any_step_continue_elsewhere(seed):
    rng = np.random.default_rng(seed)
    first, _ = make(pool_blocks=24, host=60)
    second, _ = make(pool_blocks=24, host=60)
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
    assert len(runner.cleared) == (3 if is_prompt else 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv_bytes": None}, "kv_offload needs host memory for KV"),
        ({"speculative_tokens": 4}, "speculative_tokens cannot be set with engine.kv_offload"),
        ({"cuda_graphs": True}, "cuda_graphs cannot be set"),
        ({"kv_offload": "yes"}, "kv_offload must be true or false"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**({"kv_offload": True, "host_kv_bytes": 1 << 20} | options))
