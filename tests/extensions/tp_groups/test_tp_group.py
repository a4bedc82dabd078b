"""TP groups of real processes give the tokens of one engine, also if a rank fails."""

import itertools
import os
import signal
import threading

import numpy as np
import pytest

from raybatch.errors import RankError
from raybatch_extensions.ranks.records import Served
from tests.engine.real_engines import requests_of, tokens_of
from tests.extensions.tp_groups.tp_ranks import (
    HASTY_S,
    PATIENT_S,
    Fault,
    Workers,
    faulty_connect,
    make_engine,
    tp_groups_of,
)
from tests.tiers import some

MAX_TOKENS = 12
# operations of a group before the commit, at each of which a worker rank may be lost: to connect,
# the message and the payload of KV, those of its checksums, and the message of the commit
FORMING = {"connect": 0, "copy": 1, "payload": 2, "check": 3, "checksum": 4, "commit": 5}
_generations = itertools.count(1)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def workers(cache_dir):
    started = Workers(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def engine_of(tiny_checkpoint, cache_dir):
    """An idle engine of a variant, reused by tests, and its checkpoint."""
    made = {}

    def get(variant, **options):
        key = variant, str(options)
        if key not in made:
            path = tiny_checkpoint(variant)
            made[key] = make_engine(path, **options), path
        return made[key]

    return get


def prompts():
    generator = np.random.default_rng(5)
    shared = generator.integers(1, 200, 9).tolist()
    lens = (3, 17, 40)
    return [shared + generator.integers(1, 200, count).tolist() for count in lens]


def rows(**sampling):
    return requests_of(prompts(), max_tokens=MAX_TOKENS, **sampling)


def run(engine, events=None, requests=None):
    """Run to the end; `events` are called before the steps of their number."""
    engine.add(rows() if requests is None else requests)
    done, num_steps = {}, 0
    while engine.num_unfinished():
        (events or {}).get(num_steps, lambda: None)()
        for completion in engine.step():
            done[completion.request_id, completion.sample_idx] = completion
        num_steps += 1
    return tokens_of(done)


@pytest.fixture(scope="module")
def expected(engine_of):
    """Tokens of an engine alone, by variant."""
    known = {}

    def get(variant, **options):
        key = variant, str(options)
        if key not in known:
            known[key] = run(engine_of(variant, **options)[0])
        return known[key]

    return get


def end_of(engine):
    return tp_groups_of(engine).reunite


def form(engine, workers, path, size=2, *, timeout_s=PATIENT_S, **how):
    calls = tp_groups_of(engine).rank_inits(
        next(_generations), size, host="127.0.0.1", timeout_s=timeout_s
    )
    workers.send(calls[1:], path, **how)
    workers.wait_until_ready(size - 1)
    return tp_groups_of(engine).lead(calls[0])


@pytest.mark.parametrize(
    ("variant", "size"),
    some(
        [
            ("qwen3-moe", 2),
            ("mixtral-window", 2),
            ("llama-multi-query", 3),
            ("llama", 2),
            ("qwen3-tied-attention-bias", 2),
            ("llama-biases-tied", 2),
        ],
        3,
    ),
)
def test_a_tp_group_from_the_first_step_gives_the_tokens_of_one_engine(
    variant, size, workers, engine_of, expected
):
    engine, path = engine_of(variant)
    want = expected(variant)
    made = run(engine, {0: lambda: form(engine, workers, path, size)})
    served = workers.answers(size - 1)
    assert want == made
    assert all(answer.is_committed and answer.num_steps >= MAX_TOKENS for answer in served)


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("begin", [1, 2, 6])
def test_forming_and_ending_a_tp_group_in_the_middle_changes_no_token(
    variant, begin, workers, engine_of, expected
):
    engine, path = engine_of(variant)
    want = expected(variant)
    made = run(
        engine,
        {begin: lambda: form(engine, workers, path), begin + 4: tp_groups_of(engine).reunite},
    )
    assert [Served(is_committed=True, num_steps=4)] == workers.answers(1)
    assert want == made


def test_kv_of_all_heads_comes_back_when_a_tp_group_ends(workers, engine_of):
    engine, path = engine_of("llama")
    num_computed = engine.stats().num_recomputed_tokens
    run(engine, {4: lambda: form(engine, workers, path), 8: end_of(engine)})
    workers.answers(1)
    assert num_computed == engine.stats().num_recomputed_tokens


def test_kv_heads_that_several_ranks_hold_come_back_once(workers, engine_of, expected):
    engine, path = engine_of("llama-multi-query")
    want = expected("llama-multi-query")
    made = run(engine, {4: lambda: form(engine, workers, path, 3), 8: end_of(engine)})
    workers.answers(2)
    assert want == made


def test_weights_of_8_bits_are_cut_like_others(workers, engine_of, expected):
    engine, path = engine_of("llama", quantization="int8")
    want = expected("llama", quantization="int8")
    options = {"quantization": "int8"}
    made = run(engine, {3: lambda: form(engine, workers, path, **options)})
    workers.answers(1)
    assert want == made


def test_kv_of_8_bits_is_cut_by_heads(workers, engine_of, expected):
    engine, path = engine_of("llama", kv_cache_dtype="int8")
    want = expected("llama", kv_cache_dtype="int8")
    options = {"kv_cache_dtype": "int8"}
    made = run(
        engine, {3: lambda: form(engine, workers, path, **options), 9: tp_groups_of(engine).reunite}
    )
    workers.answers(1)
    assert want == made


def test_samples_of_one_prompt_continue_in_a_tp_group(workers, engine_of):
    engine, path = engine_of("llama")
    sampled = rows(n=3, temperature=0.8)
    want = run(engine, requests=sampled)
    made = run(engine, {2: lambda: form(engine, workers, path)}, requests=sampled)
    workers.answers(1)
    assert want == made


def test_a_tp_group_over_tcp_gives_the_same_tokens(workers, engine_of, tiny_checkpoint, expected):
    path, want = tiny_checkpoint("llama"), expected("llama")
    engine = make_engine(path, connect=faulty_connect(None, by_gloo=True))
    made = run(engine, {3: lambda: form(engine, workers, path, by_gloo=True), 8: end_of(engine)})
    assert [Served(is_committed=True, num_steps=5)] == workers.answers(1)
    assert want == made


def state_of(engine):
    """State that a failure before the commit must not change."""
    inner = engine.engine
    pool = inner.runner.cache
    return (
        inner.blocks.num_refs.copy(),
        inner.table.block_table.copy(),
        inner.table.num_computed.copy(),
        pool.k.clone().numpy(),
        pool.v.clone().numpy(),
    )


@pytest.mark.parametrize("at", FORMING.values(), ids=FORMING)
def test_a_worker_that_leaves_before_the_commit_leaves_the_driver_as_it_was(
    at, workers, engine_of, expected
):
    engine, path = engine_of("llama")
    want = expected("llama")

    def form_in_vain():
        before = state_of(engine)
        fault = Fault(at=at, kind="leave")
        # the driver rank commits when all have the KV, and a rank may be gone before the message
        if at == FORMING["commit"]:
            form(engine, workers, path, fault=fault, timeout_s=HASTY_S)
            return
        with pytest.raises(RankError, match=r"could not form|connect|timeout"):
            form(engine, workers, path, fault=fault, timeout_s=HASTY_S)
        for old, new in zip(before, state_of(engine), strict=True):
            np.testing.assert_array_equal(old, new)

    made = run(engine, {5: form_in_vain})
    assert ["a fault"] == [text[:7] for text in workers.answers(1)]
    assert want == made


def test_damaged_kv_is_found_before_the_commit(workers, engine_of, expected):
    engine, path = engine_of("llama")
    want = expected("llama")

    def form_in_vain():
        fault = Fault(at=FORMING["payload"], kind="damage")
        with pytest.raises(RankError, match="received damaged KV"):
            form(engine, workers, path, fault=fault)

    made = run(engine, {5: form_in_vain})
    assert ["rank 0 has left the group"] == workers.answers(1)
    assert want == made


def test_workers_of_a_tp_group_that_could_not_form_are_free(workers, engine_of, expected):
    engine, path = engine_of("llama")
    want = expected("llama")

    def form_at_last():
        fault = Fault(at=FORMING["check"], kind="leave")
        with pytest.raises(RankError):
            form(engine, workers, path, fault=fault, timeout_s=HASTY_S)
        workers.answers(1)
        form(engine, workers, path)

    made = run(engine, {5: form_at_last})
    (served,) = workers.answers(1)
    assert served.is_committed
    assert want == made


# in the first step: its message, a sum and the gather of logits; and in later steps
@pytest.mark.parametrize("at", [6, 9, 12, 13, 20, 23])
def test_a_worker_that_leaves_in_a_step_changes_no_token(at, workers, engine_of, expected):
    engine, path = engine_of("llama")
    want, fault = expected("llama"), Fault(at=at, kind="leave")
    made = run(engine, {5: lambda: form(engine, workers, path, fault=fault)})
    workers.answers(1)
    assert want == made


def test_a_worker_that_hangs_is_survived_within_the_timeout(workers, engine_of, expected):
    engine, path = engine_of("llama")
    want, fault = expected("llama"), Fault(at=15, kind="hang")
    made = run(engine, {5: lambda: form(engine, workers, path, fault=fault, timeout_s=HASTY_S)})
    workers.answers(1)
    assert want == made


def test_a_worker_that_is_lost_while_prompts_run_changes_no_token(workers, engine_of, expected):
    engine, path = engine_of("llama")
    want, fault = expected("llama"), Fault(at=5, kind="leave")
    # no block is in use before the first step, so its message is the third one
    made = run(engine, {0: lambda: form(engine, workers, path, fault=fault)})
    workers.answers(1)
    assert want == made


def test_rows_that_wait_for_a_slot_are_not_lost_with_a_worker(workers, engine_of):
    engine, path = engine_of("llama")
    many = requests_of([[i + 1, 7, 9 + i] for i in range(12)], max_tokens=5)
    want, fault = run(engine, requests=many), Fault(at=15, kind="leave")
    made = run(engine, {1: lambda: form(engine, workers, path, fault=fault)}, requests=many)
    workers.answers(1)
    assert want == made


def test_a_former_worker_finds_no_own_prefix_in_its_pool(engine_of, expected):
    engine, path = engine_of("llama")
    want, worker = expected("llama"), make_engine(path)
    assert want == run(worker)
    calls = tp_groups_of(engine).rank_inits(
        next(_generations), 2, host="127.0.0.1", timeout_s=PATIENT_S
    )
    thread = threading.Thread(target=tp_groups_of(worker).follow, args=(calls[1],))

    def lead():
        thread.start()
        tp_groups_of(engine).lead(calls[0])

    assert want == run(engine, {5: lead})
    thread.join()
    assert want == run(worker)


def test_a_worker_that_is_killed_is_survived(workers, engine_of, expected):
    engine, path = engine_of("qwen3-moe")
    want = expected("qwen3-moe")
    events = {
        5: lambda: form(engine, workers, path, timeout_s=HASTY_S),
        8: lambda: os.kill(workers.pid(1), signal.SIGKILL),
    }
    made = run(engine, events)
    assert [None] == workers.answers(1)
    assert want == made


def test_a_worker_that_dies_when_the_tp_group_ends_changes_no_token(workers, engine_of, expected):
    engine, path = engine_of("llama")
    want = expected("llama")

    def kill_and_reunite():
        os.kill(workers.pid(1), signal.SIGKILL)
        tp_groups_of(engine).reunite()

    events = {5: lambda: form(engine, workers, path, timeout_s=HASTY_S), 8: kill_and_reunite}
    made = run(engine, events)
    assert [None] == workers.answers(1)
    assert want == made


def test_rows_leave_a_tp_group_with_their_kv(workers, engine_of, expected):
    engine, path = engine_of("llama")
    want, states = expected("llama"), []

    def leave():
        form(engine, workers, path)
        states.extend(engine.export([row.request_id for row in rows()], with_kv=True))

    assert {} == run(engine, {5: leave})
    workers.answers(1)
    engine.restore(states)
    assert want == run(engine, requests=[])
    assert all(state.kv is not None for state in states)


def test_another_model_is_refused(workers, engine_of, expected):
    engine, _ = engine_of("llama")
    _, path = engine_of("qwen3-tied-attention-bias")
    with pytest.raises(RankError, match="rank 1 cannot join the TP group: its weights"):
        form(engine, workers, path)
    workers.answers(1)


def test_an_engine_with_rows_does_not_join(engine_of):
    engine, _ = engine_of("llama")
    calls = tp_groups_of(engine).rank_inits(
        next(_generations), 2, host="127.0.0.1", timeout_s=HASTY_S
    )
    engine.add(rows())
    with pytest.raises(RankError, match="has rows"):
        tp_groups_of(engine).follow(calls[1])
    engine.abort([row.request_id for row in rows()])
