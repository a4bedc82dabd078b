"""Teams of real processes: their tokens are those of one engine, whatever happens to a rank."""

import itertools
import os
import signal
import threading

import numpy as np
import pytest

from raybatch.errors import TeamError
from raybatch.records.team import Served
from tests.engine.ext.teams.team_ranks import (
    HASTY_S,
    PATIENT_S,
    Fault,
    Followers,
    faulty_connect,
    make_engine,
    teams_of,
)
from tests.engine.real_engines import requests_of, tokens_of

MAX_TOKENS = 12
# operations of a group before the commit, at each of which a follower may be lost: to connect,
# the message and the payload of KV, those of its checksums, and the message of the commit
FORMING = {"connect": 0, "copy": 1, "payload": 2, "check": 3, "checksum": 4, "commit": 5}
_epochs = itertools.count(1)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def followers(cache_dir):
    started = Followers(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def engine_of(tiny_checkpoint, cache_dir):
    """An idle engine of a variant, kept between tests; and its checkpoint."""
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
    return teams_of(engine).reunite


def form(engine, followers, path, size=2, *, timeout_s=PATIENT_S, **how):
    calls = teams_of(engine).team_calls(next(_epochs), size, host="127.0.0.1", timeout_s=timeout_s)
    followers.send(calls[1:], path, **how)
    followers.wait_until_ready(size - 1)
    return teams_of(engine).lead(calls[0])


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("llama", 2),
        ("qwen3-tied-attention-bias", 2),
        ("llama-biases-tied", 2),
        ("qwen3-moe", 2),
        ("mixtral-window", 2),
        ("llama-multi-query", 3),
    ],
)
def test_a_team_from_the_first_step_gives_the_tokens_of_one_engine(
    variant, size, followers, engine_of, expected
):
    engine, path = engine_of(variant)
    want = expected(variant)
    made = run(engine, {0: lambda: form(engine, followers, path, size)})
    served = followers.answers(size - 1)
    assert want == made
    assert all(answer.is_committed and answer.num_steps >= MAX_TOKENS for answer in served)


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("begin", [1, 2, 6])
def test_forming_and_ending_a_team_in_the_middle_changes_no_token(
    variant, begin, followers, engine_of, expected
):
    engine, path = engine_of(variant)
    want = expected(variant)
    made = run(
        engine, {begin: lambda: form(engine, followers, path), begin + 4: teams_of(engine).reunite}
    )
    assert [Served(is_committed=True, num_steps=4)] == followers.answers(1)
    assert want == made


def test_kv_of_all_heads_comes_back_when_a_team_ends(followers, engine_of):
    engine, path = engine_of("llama")
    num_computed = engine.stats().num_recomputed_tokens
    run(engine, {4: lambda: form(engine, followers, path), 8: end_of(engine)})
    followers.answers(1)
    assert num_computed == engine.stats().num_recomputed_tokens


def test_kv_heads_that_several_ranks_hold_come_back_once(followers, engine_of, expected):
    engine, path = engine_of("llama-multi-query")
    want = expected("llama-multi-query")
    made = run(engine, {4: lambda: form(engine, followers, path, 3), 8: end_of(engine)})
    followers.answers(2)
    assert want == made


def test_weights_of_8_bits_are_cut_like_others(followers, engine_of, expected):
    engine, path = engine_of("llama", quantization="int8")
    want = expected("llama", quantization="int8")
    options = {"quantization": "int8"}
    made = run(engine, {3: lambda: form(engine, followers, path, **options)})
    followers.answers(1)
    assert want == made


def test_kv_of_8_bits_is_cut_by_heads(followers, engine_of, expected):
    engine, path = engine_of("llama", kv_cache_dtype="int8")
    want = expected("llama", kv_cache_dtype="int8")
    options = {"kv_cache_dtype": "int8"}
    made = run(
        engine, {3: lambda: form(engine, followers, path, **options), 9: teams_of(engine).reunite}
    )
    followers.answers(1)
    assert want == made


def test_samples_of_one_prompt_go_on_in_a_team(followers, engine_of):
    engine, path = engine_of("llama")
    sampled = rows(n=3, temperature=0.8)
    want = run(engine, requests=sampled)
    made = run(engine, {2: lambda: form(engine, followers, path)}, requests=sampled)
    followers.answers(1)
    assert want == made


def test_a_team_that_reaches_each_other_by_tcp_alone_gives_the_same(
    followers, engine_of, tiny_checkpoint, expected
):
    path, want = tiny_checkpoint("llama"), expected("llama")
    engine = make_engine(path, connect=faulty_connect(None, by_gloo=True))
    made = run(engine, {3: lambda: form(engine, followers, path, by_gloo=True), 8: end_of(engine)})
    assert [Served(is_committed=True, num_steps=5)] == followers.answers(1)
    assert want == made


def state_of(engine):
    """What a failure before the commit must leave as it is."""
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
def test_a_follower_that_leaves_before_the_commit_leaves_the_leader_as_it_was(
    at, followers, engine_of, expected
):
    engine, path = engine_of("llama")
    want = expected("llama")

    def form_in_vain():
        before = state_of(engine)
        fault = Fault(at=at, kind="leave")
        # the leader commits when all have the KV, and one may be gone before it hears of that
        if at == FORMING["commit"]:
            form(engine, followers, path, fault=fault, timeout_s=HASTY_S)
            return
        with pytest.raises(TeamError, match=r"could not form|connected|heard"):
            form(engine, followers, path, fault=fault, timeout_s=HASTY_S)
        for old, new in zip(before, state_of(engine), strict=True):
            np.testing.assert_array_equal(old, new)

    made = run(engine, {5: form_in_vain})
    assert ["a fault"] == [text[:7] for text in followers.answers(1)]
    assert want == made


def test_damaged_kv_is_found_before_the_commit(followers, engine_of, expected):
    engine, path = engine_of("llama")
    want = expected("llama")

    def form_in_vain():
        fault = Fault(at=FORMING["payload"], kind="damage")
        with pytest.raises(TeamError, match="other KV than it was sent"):
            form(engine, followers, path, fault=fault)

    made = run(engine, {5: form_in_vain})
    assert ["rank 0 has left the team"] == followers.answers(1)
    assert want == made


def test_followers_of_a_team_that_did_not_come_about_are_free(followers, engine_of, expected):
    engine, path = engine_of("llama")
    want = expected("llama")

    def form_at_last():
        fault = Fault(at=FORMING["check"], kind="leave")
        with pytest.raises(TeamError):
            form(engine, followers, path, fault=fault, timeout_s=HASTY_S)
        followers.answers(1)
        form(engine, followers, path)

    made = run(engine, {5: form_at_last})
    (served,) = followers.answers(1)
    assert served.is_committed
    assert want == made


# of the first step, its message, a sum in the middle and the gathering of logits; of later ones
@pytest.mark.parametrize("at", [6, 9, 12, 13, 20, 23])
def test_a_follower_that_leaves_in_a_step_changes_no_token(at, followers, engine_of, expected):
    engine, path = engine_of("llama")
    want, fault = expected("llama"), Fault(at=at, kind="leave")
    made = run(engine, {5: lambda: form(engine, followers, path, fault=fault)})
    followers.answers(1)
    assert want == made


def test_a_follower_that_hangs_is_survived_within_the_timeout(followers, engine_of, expected):
    engine, path = engine_of("llama")
    want, fault = expected("llama"), Fault(at=15, kind="hang")
    made = run(engine, {5: lambda: form(engine, followers, path, fault=fault, timeout_s=HASTY_S)})
    followers.answers(1)
    assert want == made


def test_a_follower_that_is_lost_while_prompts_run_changes_no_token(followers, engine_of, expected):
    engine, path = engine_of("llama")
    want, fault = expected("llama"), Fault(at=5, kind="leave")
    # nothing is in use before the first step, so that the third message is the first step
    made = run(engine, {0: lambda: form(engine, followers, path, fault=fault)})
    followers.answers(1)
    assert want == made


def test_rows_that_wait_for_a_slot_are_not_lost_with_a_follower(followers, engine_of):
    engine, path = engine_of("llama")
    many = requests_of([[i + 1, 7, 9 + i] for i in range(12)], max_tokens=5)
    want, fault = run(engine, requests=many), Fault(at=15, kind="leave")
    made = run(engine, {1: lambda: form(engine, followers, path, fault=fault)}, requests=many)
    followers.answers(1)
    assert want == made


def test_an_engine_that_followed_finds_nothing_of_its_own_in_its_pool(engine_of, expected):
    engine, path = engine_of("llama")
    want, follower = expected("llama"), make_engine(path)
    assert want == run(follower)
    calls = teams_of(engine).team_calls(next(_epochs), 2, host="127.0.0.1", timeout_s=PATIENT_S)
    thread = threading.Thread(target=teams_of(follower).follow, args=(calls[1],))

    def lead():
        thread.start()
        teams_of(engine).lead(calls[0])

    assert want == run(engine, {5: lead})
    thread.join()
    assert want == run(follower)


def test_a_follower_that_is_killed_is_survived(followers, engine_of, expected):
    engine, path = engine_of("qwen3-moe")
    want = expected("qwen3-moe")
    events = {
        5: lambda: form(engine, followers, path, timeout_s=HASTY_S),
        8: lambda: os.kill(followers.pid(1), signal.SIGKILL),
    }
    made = run(engine, events)
    assert [None] == followers.answers(1)
    assert want == made


def test_a_follower_that_dies_when_the_team_ends_changes_no_token(followers, engine_of, expected):
    engine, path = engine_of("llama")
    want = expected("llama")

    def kill_and_reunite():
        os.kill(followers.pid(1), signal.SIGKILL)
        teams_of(engine).reunite()

    events = {5: lambda: form(engine, followers, path, timeout_s=HASTY_S), 8: kill_and_reunite}
    made = run(engine, events)
    assert [None] == followers.answers(1)
    assert want == made


def test_rows_leave_a_team_with_their_kv(followers, engine_of, expected):
    engine, path = engine_of("llama")
    want, states = expected("llama"), []

    def leave():
        form(engine, followers, path)
        states.extend(engine.export([row.request_id for row in rows()], with_kv=True))

    assert {} == run(engine, {5: leave})
    followers.answers(1)
    engine.restore(states)
    assert want == run(engine, requests=[])
    assert all(state.kv is not None for state in states)


def test_another_model_is_refused(followers, engine_of, expected):
    engine, _ = engine_of("llama")
    _, path = engine_of("qwen3-tied-attention-bias")
    with pytest.raises(TeamError, match="another engine"):
        form(engine, followers, path)
    followers.answers(1)


def test_an_engine_with_rows_does_not_follow(engine_of):
    engine, _ = engine_of("llama")
    calls = teams_of(engine).team_calls(next(_epochs), 2, host="127.0.0.1", timeout_s=HASTY_S)
    engine.add(rows())
    with pytest.raises(TeamError, match="has rows"):
        teams_of(engine).follow(calls[1])
    engine.abort([row.request_id for row in rows()])
