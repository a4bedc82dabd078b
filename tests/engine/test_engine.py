import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from tests.engine.fakes import (
    FakeRunner,
    FakeSampler,
    FakeSpec,
    FakeStopChecker,
    generate,
    make_request,
    run_all,
)
from tests.tiers import examples

VOCAB = 1000


def make_engine(
    *,
    num_blocks=64,
    eos=(),
    max_model_len=512,
    nan_after=None,
    host=0,
    rounded=0,
    recovery=None,
    full_step_tokens=math.inf,
    **config,
):
    options = {"block_size_tokens": 4, "max_batched_tokens": 64, "max_num_seqs": 16} | config
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=options["block_size_tokens"],
        spec=FakeSpec(VOCAB, eos, max_model_len),
        nan_after=nan_after,
        num_host_blocks=host,
        num_rounded_blocks=rounded,
        full_step_tokens=full_step_tokens,
    )
    parts = (FakeSampler(), FakeStopChecker())
    engine = Engine(runner, *parts, EngineConfig(**options), recovery=recovery)
    return engine, runner


def run_one(prompt, *, eos=(), **sampling):
    engine, _ = make_engine(eos=eos)
    engine.add([make_request(0, prompt, **sampling)])
    return run_all(engine)[0, 0]


def tokens_of(done):
    return {key: completion.token_ids.tolist() for key, completion in done.items()}


def shared_prompts(rng, count):
    """Prompts that branch from a small tree of shared prefixes at random positions."""
    stems = [rng.integers(0, VOCAB, 40) for _ in range(3)]
    stems.append(np.r_[stems[0][:20], rng.integers(0, VOCAB, 20)])
    return [
        np.r_[
            stems[rng.integers(4)][: rng.integers(1, 40)], rng.integers(0, VOCAB, rng.integers(9))
        ]
        for _ in range(count)
    ]


@settings(max_examples=examples(10, full=25))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(20, 90),
    budget=st.integers(5, 70),
    block_size=st.sampled_from([2, 4, 5]),
    caching=st.booleans(),
)
def test_tokens_are_those_of_one_by_one_generation(seed, num_blocks, budget, block_size, caching):
    rng = np.random.default_rng(seed)
    engine, runner = make_engine(
        num_blocks=num_blocks * 4 // block_size,
        max_batched_tokens=budget,
        block_size_tokens=block_size,
        enable_prefix_caching=caching,
    )
    requests = [
        make_request(i, prompt, max_tokens=int(rng.integers(1, 20)), n=int(rng.integers(1, 3)))
        for i, prompt in enumerate(shared_prompts(rng, 20))
    ]
    engine.add(requests[:12])
    done = {}
    for _ in range(5):
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
    engine.add(requests[12:])
    done |= run_all(engine)
    assert all(step.num_tokens <= budget for step in runner.steps)
    expected = {
        (r.request_id, i): generate(r.prompt_token_ids.tolist(), r.sampling.max_tokens, VOCAB)
        for r in requests
        for i in range(r.sampling.n)
    }
    assert tokens_of(done) == expected
    assert engine.stats().kv_used_fraction == 0.0


def test_preemption_keeps_the_outputs(rng):
    prompts = [rng.integers(0, VOCAB, 6) for _ in range(8)]
    engine, _ = make_engine(num_blocks=20)
    engine.add(make_request(i, p, max_tokens=40) for i, p in enumerate(prompts))
    done = run_all(engine)
    assert engine.stats().num_preemptions > 0
    assert tokens_of(done) == {
        (i, 0): generate(p.tolist(), 40, VOCAB) for i, p in enumerate(prompts)
    }


def test_recomputed_tokens_are_counted(rng):
    engine, runner = make_engine(num_blocks=20, enable_prefix_caching=False)
    engine.add(make_request(i, rng.integers(0, VOCAB, 6), max_tokens=40) for i in range(8))
    run_all(engine)
    stats = engine.stats()
    num_fed_back = stats.generated_tokens - 8
    computed = sum(step.num_tokens for step in runner.steps)
    # a recomputed prompt yields a token at once, without a plain decode
    expected = stats.prompt_tokens + num_fed_back + stats.num_recomputed_tokens
    assert computed == expected


@pytest.mark.parametrize("budget", [97, 512, 2048])
def test_a_prefix_is_computed_once_per_group(rng, budget):
    num_groups, members, prefix, distinct = 64, 16, 256, 32
    engine, runner = make_engine(
        num_blocks=1200, block_size_tokens=16, max_batched_tokens=budget, max_num_seqs=budget
    )
    requests = []
    for _ in range(num_groups):
        shared = rng.integers(0, VOCAB, prefix)
        for _ in range(members):
            prompt = np.r_[shared, len(requests) % VOCAB, rng.integers(0, VOCAB, distinct - 1)]
            requests.append(make_request(len(requests), prompt, max_tokens=2))
    engine.add(requests)
    done = run_all(engine, check=False)
    computed = sum(sum(step.chunk_lens) for step in runner.steps)
    assert computed == num_groups * (prefix + members * distinct)
    assert engine.stats().cached_tokens == num_groups * (members - 1) * prefix
    assert {c.num_cached_tokens for c in done.values()} == {0, prefix}
    # the last steps drain; all before them are full
    assert [s.num_tokens for s in runner.steps if sum(s.chunk_lens)][:-1] == [budget] * (
        len([s for s in runner.steps if sum(s.chunk_lens)]) - 1
    )


def test_a_group_read_by_many_decodes_takes_one_context(rng):
    engine, runner = make_engine(num_blocks=200, max_num_seqs=40, max_batched_tokens=600)
    shared = rng.integers(0, VOCAB, 400)
    engine.add(make_request(i, np.r_[shared, i, i], max_tokens=3) for i in range(30))
    run_all(engine)
    assert [step.num_segments for step in runner.steps] == [1, 1, 1]


def test_a_dense_pool_is_walked_as_one_range(rng):
    engine, runner = make_engine(num_blocks=200, max_batched_tokens=128)
    engine.add(make_request(i, rng.integers(0, VOCAB, 9), max_tokens=8) for i in range(10))
    run_all(engine)
    assert all(step.is_contiguous for step in runner.steps if step.num_decode)


def test_the_end_token_stops_and_is_kept():
    prompt = [1, 2, 3]
    expected = generate(prompt, 10, VOCAB)
    completion = run_one(prompt, eos=(expected[4],), max_tokens=10)
    assert (completion.token_ids.tolist(), completion.finish_reason, completion.stop_reason) == (
        expected[:5],
        "stop",
        None,
    )


def test_ignore_eos_continues_after_the_end_token():
    expected = generate([1, 2, 3], 10, VOCAB)
    completion = run_one([1, 2, 3], eos=(expected[4],), max_tokens=10, ignore_eos=True)
    assert (completion.token_ids.tolist(), completion.finish_reason) == (expected, "length")


def test_the_end_token_does_not_count_before_min_tokens():
    expected = generate([1, 2, 3], 10, VOCAB)
    completion = run_one([1, 2, 3], eos=(expected[4], expected[6]), max_tokens=10, min_tokens=7)
    assert completion.token_ids.tolist() == expected[:7]


def test_a_stop_token_is_the_stop_reason():
    expected = generate([1, 2, 3], 10, VOCAB)
    completion = run_one([1, 2, 3], max_tokens=10, stop_token_ids=(1001, expected[2]))
    assert (completion.token_ids.tolist(), completion.stop_reason) == (expected[:3], expected[2])


def test_a_stop_string_is_the_stop_reason():
    expected = generate([1, 2, 3], 10, VOCAB)
    stop = f"{expected[3]},{expected[4]},"
    completion = run_one([1, 2, 3], max_tokens=10, stop=(stop,))
    assert (completion.token_ids.tolist(), completion.stop_reason) == (expected[:5], stop)


def test_a_stop_string_across_a_preemption_is_found(rng):
    prompts = [rng.integers(0, VOCAB, 6) for _ in range(8)]
    engine, _ = make_engine(num_blocks=20)
    outputs = [generate(p.tolist(), 40, VOCAB) for p in prompts]
    # every token but the first is a stop string together with the one before it
    requests = [
        make_request(i, p, max_tokens=40, stop=(f"{out[28]},{out[29]},",))
        for i, (p, out) in enumerate(zip(prompts, outputs, strict=True))
    ]
    engine.add(requests)
    done = run_all(engine)
    assert engine.stats().num_preemptions > 0
    assert tokens_of(done) == {(i, 0): out[:30] for i, out in enumerate(outputs)}


def test_max_tokens_are_clamped_to_the_context():
    engine, _ = make_engine(max_model_len=20)
    engine.add([make_request(0, range(15), max_tokens=100)])
    completion = run_all(engine)[0, 0]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


def test_a_prompt_that_leaves_no_room_is_an_error():
    engine, _ = make_engine(max_model_len=20)
    engine.add([make_request(0, range(20)), make_request(1, range(19), max_tokens=4)])
    done = run_all(engine)
    assert done[0, 0].error.startswith("PromptTooLong: 20 tokens,")
    assert (done[0, 0].finish_reason, len(done[1, 0].token_ids)) == ("error", 1)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], "EmptyPrompt: "), ([5, VOCAB], "BadTokenId: "), ([-1], "BadTokenId: ")],
)
def test_a_bad_prompt_is_an_error_for_each_sample(prompt, error):
    engine, runner = make_engine()
    engine.add([make_request(0, prompt, n=2)])
    done = run_all(engine)
    assert [done[0, i].error.startswith(error) for i in range(2)] == [True, True]
    assert not runner.steps


def test_a_prompt_larger_than_the_cache_ends_by_capacity():
    engine, _ = make_engine(num_blocks=4)
    engine.add([make_request(0, range(17)), make_request(1, range(3), max_tokens=2)])
    done = run_all(engine)
    assert done[0, 0].finish_reason == "capacity"
    message = "CapacityError: 17 tokens, but the KV cache holds 16; raise engine.kv_cache_bytes"
    assert done[0, 0].error == message
    assert done[1, 0].finish_reason == "length"


def test_a_sequence_that_outgrows_the_cache_ends_by_capacity_with_its_tokens():
    engine, _ = make_engine(num_blocks=4)
    engine.add(
        [make_request(0, range(10), max_tokens=50), make_request(1, range(6), max_tokens=50)]
    )
    done = run_all(engine)
    assert {c.finish_reason for c in done.values()} == {"capacity"}
    assert done[0, 0].token_ids.tolist() == generate(list(range(10)), 7, VOCAB)
    assert done[1, 0].token_ids.tolist() == generate(list(range(6)), 11, VOCAB)


def test_rows_with_bad_logits_fail_alone():
    good, bad = [1, 2, 3], [4, 5, 6]
    token = generate(bad, 4, VOCAB)[3]
    assert token not in generate(good, 10, VOCAB)
    engine, _ = make_engine(nan_after=token)
    engine.add(make_request(i, p, max_tokens=10) for i, p in enumerate((good, bad)))
    done = run_all(engine)
    assert done[0, 0].token_ids.tolist() == generate(good, 10, VOCAB)
    assert done[1, 0].finish_reason == "error"
    assert done[1, 0].error.startswith("NonFiniteLogits: ")
    assert done[1, 0].error.endswith(" after 7 tokens")


def test_the_prefix_of_a_row_with_bad_logits_is_not_shared():
    engine, _ = make_engine(nan_after=8)
    prompt = list(range(9))
    engine.add([make_request(0, prompt, max_tokens=2)])
    run_all(engine)
    engine.add([make_request(1, [*prompt[:8], 99], max_tokens=2)])
    assert run_all(engine)[1, 0].num_cached_tokens == 0


def test_blocks_of_a_row_with_bad_logits_are_cleared_before_reuse():
    engine, runner = make_engine(nan_after=10)
    engine.add(
        [make_request(0, range(11), max_tokens=4), make_request(1, [*range(8), 77], max_tokens=9)]
    )
    engine.step()
    # the first two blocks have another reader, which would fail as well if they were bad
    assert runner.cleared == [2]
    run_all(engine)


def test_an_exception_of_the_runner_propagates():
    engine, runner = make_engine()

    def fail(batch):
        raise MemoryError("out of memory")

    runner.forward = fail
    engine.add([make_request(0, [1])])
    with pytest.raises(MemoryError):
        engine.step()


def test_exported_sequences_continue_elsewhere_with_the_same_tokens(rng):
    prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))) for _ in range(10)]
    source, _ = make_engine(max_num_seqs=8)
    target, _ = make_engine(block_size_tokens=8)
    source.add(make_request(i, p, max_tokens=30, logprobs=0) for i, p in enumerate(prompts))
    for _ in range(7):
        source.step()
    moved = source.export([0, 3, 7, 9])
    target.restore(moved)
    done = run_all(source) | run_all(target)
    assert tokens_of(done) == {
        (i, 0): generate(p.tolist(), 30, VOCAB) for i, p in enumerate(prompts)
    }
    assert {len(c.logprobs) for c in done.values()} == {30}
    assert [s.request.request_id for s in moved] == [0, 3, 7, 9]


def test_drain_gives_back_what_has_not_started():
    engine, _ = make_engine(max_num_seqs=2)
    requests = [make_request(i, [i, 1, 2], n=2, max_tokens=3) for i in range(4)]
    engine.add(requests)
    engine.step()
    assert engine.drain() == requests[1:]
    assert {0} == {request_id for request_id, _ in run_all(engine)}


def test_a_request_with_a_started_sample_is_not_drained():
    engine, _ = make_engine(max_num_seqs=1)
    engine.add([make_request(0, [1, 2], n=2)])
    engine.step()
    assert engine.drain() == []


def test_a_request_with_a_finished_sample_is_not_drained():
    engine, _ = make_engine(max_num_seqs=1)
    engine.add([make_request(0, [1, 2], n=2, max_tokens=1), make_request(1, [3], max_tokens=1)])
    assert [0] == [c.sample_idx for c in engine.step()]
    assert [1] == [request.request_id for request in engine.drain()]
    assert {(0, 1)} == set(run_all(engine))


def test_aborted_requests_vanish():
    engine, _ = make_engine(max_num_seqs=2)
    engine.add([make_request(i, [i, 1, 2], max_tokens=5) for i in range(4)])
    engine.add([make_request(4, [])])
    engine.step()
    engine.abort([0, 3, 4, 77])
    assert {(1, 0), (2, 0)} == set(run_all(engine))


def test_a_request_id_in_flight_is_refused():
    engine, _ = make_engine()
    engine.add([make_request(0, [1])])
    with pytest.raises(ValueError, match="request 0 is already in the engine"):
        engine.add([make_request(0, [1])])


def test_logprobs_have_one_entry_per_token():
    assert len(run_one([1, 2], max_tokens=6, logprobs=0).logprobs) == 6
    assert run_one([1, 2], max_tokens=6).logprobs is None


def test_capacity_states_the_limits():
    engine, _ = make_engine(max_batched_tokens=8, max_num_seqs=100, max_model_len=99)
    capacity = engine.capacity()
    assert (capacity.kv_tokens, capacity.max_model_len) == (256, 99)
    assert (capacity.max_num_seqs, capacity.block_size) == (8, 4)


def test_a_step_without_work_does_nothing():
    engine, runner = make_engine()
    assert engine.step() == []
    assert runner.steps == []


@pytest.mark.parametrize("is_checked", ["1", "0"])
def test_the_books_are_checked_when_an_engine_runs_dry(is_checked, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CHECK_ENGINE", is_checked)
    engine, _ = make_engine()
    engine.add([make_request(0, [1, 2, 3], max_tokens=2)])
    engine.step()
    # a reference that is never released
    engine.blocks.allocate(1)
    if is_checked == "0":
        assert [0] == [completion.request_id for completion in engine.step()]
        return
    with pytest.raises(RuntimeError, match="block"):
        engine.step()
    assert [0] == [completion.request_id for completion in engine.leave(with_kv=False)[2]]
