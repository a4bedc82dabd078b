"""Orders of admission in the engine: what starts when, with the same tokens under each of them."""

import dataclasses
from typing import get_args

import numpy as np
import pytest

from raybatch.config import AdmissionPolicy, EngineConfig
from raybatch.errors import ConfigError
from tests.engine.fakes import make_request, run_all
from tests.engine.test_engine import VOCAB, make_engine, tokens_of
from tests.engine.test_groups import computed_prefill, expected, groups

POLICIES = get_args(AdmissionPolicy)
CLOSED = ("static", "multi_bin")


def rows(lengths, *, prompt=3, first_id=0):
    """Requests that share nothing and generate exactly `lengths` tokens."""
    return [
        make_request(
            first_id + i, np.arange(prompt) + 7 * (first_id + i), max_tokens=n, ignore_eos=True
        )
        for i, n in enumerate(lengths)
    ]


def waiting_ids(engine):
    return [record.request.request_id for record in engine._scheduler.waiting()]


def ended_by_step(engine):
    """Run to the end; the ids of the requests that ended, for each step in which some did."""
    steps = []
    while engine.num_unfinished():
        done = engine.step()
        engine.check()
        steps += [sorted(c.request_id for c in done)] if done else []
    return steps


def started_together(engine):
    """Run to the end; the ids of the requests that run when each batch has been admitted."""
    batches, seen = [], set()
    while engine.num_unfinished():
        engine.step()
        running = {r.request.request_id for r in engine.table.records if r is not None}
        if running - seen:
            batches.append(sorted(running - seen))
            seen |= running
    return batches


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [18, 64], ids=["short of memory", "ample"])
def test_every_policy_gives_the_same_tokens(policy, num_blocks, rng):
    engine, _ = make_engine(num_blocks=num_blocks, max_num_seqs=6, admission=policy)
    requests = groups(rng, count=4, size=5, prefix=9, suffix=3, max_tokens=9, n=2)
    requests += [
        make_request(100 + i, rng.integers(0, VOCAB, 1 + 3 * i), max_tokens=1 + 2 * i, n=1 + i % 3)
        for i in range(10)
    ]
    engine.add(requests[i] for i in rng.permutation(len(requests)))
    assert expected(requests) == tokens_of(run_all(engine))
    assert engine.stats().kv_used_fraction == 0


def test_the_shortest_row_starts_first():
    engine, _ = make_engine(max_num_seqs=1, admission="shortest")
    engine.add(rows([5, 2, 9, 1]))
    assert ended_by_step(engine) == [[3], [1], [0], [2]]


def test_rows_are_as_short_as_they_are_expected_to_be():
    engine, _ = make_engine(max_num_seqs=1, admission="shortest")
    requests = [make_request(i, [i, 1], max_tokens=4) for i in range(3)]
    engine.add(
        dataclasses.replace(request, expected_output_len=length)
        for request, length in zip(requests, (None, 3, 2), strict=True)
    )
    assert ended_by_step(engine) == [[2], [1], [0]]


def test_of_rows_of_one_length_that_with_the_shorter_prompt_starts_first():
    engine, _ = make_engine(max_num_seqs=1, admission="shortest")
    engine.add([*rows([3], prompt=40), *rows([3], first_id=1)])
    assert ended_by_step(engine) == [[1], [0]]


def test_a_group_keeps_together_and_goes_by_its_mean_length(rng):
    engine, runner = make_engine(
        max_num_seqs=1, admission="shortest", enable_prefix_caching=False, num_blocks=200
    )
    long = groups(rng, count=2, size=3, prefix=8, suffix=2, max_tokens=6)[:3]
    short = groups(rng, count=2, size=3, prefix=8, suffix=2, max_tokens=4)[3:]
    # one member of the first group is shorter than all others
    first = dataclasses.replace(
        long[2], sampling=dataclasses.replace(long[2].sampling, max_tokens=2)
    )
    requests = [long[0], short[0], first, short[1], *rows([5], first_id=50), long[1], short[2]]
    engine.add(requests)
    order = [i for ids in ended_by_step(engine) for i in ids]
    assert order == [3, 4, 5, 0, 2, 1, 50]
    assert computed_prefill(runner) == 2 * (8 + 3 * 2) + 3


def test_long_rows_start_although_short_ones_never_end_to_come():
    engine, _ = make_engine(max_num_seqs=1, admission="shortest")
    engine.add(rows([10]))
    done, num_steps = [], 0
    while 0 not in done:
        engine.add(rows([1], first_id=1 + num_steps))
        done += [completion.request_id for completion in engine.step()]
        num_steps += 1
        assert num_steps < 200
    # it was passed by those that came within eight times its length
    assert 80 <= num_steps <= 100


def test_rows_that_are_given_back_and_taken_again_keep_their_order():
    engine, _ = make_engine(max_num_seqs=1, admission="shortest")
    engine.add(rows([5, 2, 9, 1]))
    engine.abort([1])
    assert waiting_ids(engine) == [3, 0, 2]
    engine.add(engine.drain())
    assert ended_by_step(engine) == [[3], [0], [2]]


@pytest.mark.parametrize("policy", CLOSED)
def test_nobody_starts_before_all_of_a_batch_have_ended(policy):
    engine, runner = make_engine(max_num_seqs=3, admission=policy)
    lengths = [4, 2, 7, 3, 3, 5, 2]
    engine.add(rows(lengths))
    batches = started_together(engine)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    # steps in which members wait for the longest one of their batch: sum of (max - length)
    num_rows = [step.num_decode + len(step.chunk_lens) for step in runner.steps]
    places = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    waits = sum(max(lengths[i] for i in b) - lengths[j] for b in batches for j in b)
    assert places - sum(num_rows) == waits
    assert len(num_rows) == sum(max(lengths[i] for i in batch) for batch in batches)


def test_a_static_batch_is_the_rows_that_came_first():
    engine, _ = make_engine(max_num_seqs=3, admission="static")
    engine.add(rows([4, 2, 7, 3, 3, 5, 2]))
    assert started_together(engine) == [[0, 1, 2], [3, 4, 5], [6]]


def test_bins_put_rows_of_like_length_into_a_batch_with_the_oldest():
    engine, _ = make_engine(max_num_seqs=2, admission="multi_bin")
    engine.add(rows([9, 2, 3, 8, 4, 7, 6]))
    assert started_together(engine) == [[0, 3], [1, 2], [4, 5], [6]]


def test_a_group_larger_than_a_batch_goes_on_in_the_next_one(rng):
    engine, _ = make_engine(max_num_seqs=3, admission="multi_bin")
    engine.add([*groups(rng, count=1, size=5, prefix=8, suffix=2), *rows([3, 2], first_id=50)])
    assert started_together(engine) == [[0, 1, 2], [3, 4, 50], [51]]


def test_a_batch_may_take_several_steps_to_start():
    engine, runner = make_engine(max_num_seqs=4, max_batched_tokens=8, admission="static")
    engine.add(rows([3, 1, 4, 6, 2], prompt=5))
    run_all(engine)
    # the second row has ended when the fourth starts, and the fifth waits all the same
    assert [step.chunk_lens for step in runner.steps if step.chunk_lens] == [
        (5, 3),
        (2, 5),
        (5,),
        (5,),
    ]


@pytest.mark.parametrize("policy", CLOSED)
def test_a_batch_has_memory_for_the_full_length_of_its_rows(policy, rng):
    engine, _ = make_engine(num_blocks=20, max_num_seqs=8, admission=policy)
    engine.add(rows(rng.integers(1, 60, 12).tolist(), prompt=6))
    run_all(engine)
    assert engine.stats().num_preemptions == 0


def test_rows_that_come_while_a_batch_runs_wait_for_the_next():
    engine, _ = make_engine(max_num_seqs=4, admission="static")
    engine.add(rows([3, 5]))
    engine.step()
    engine.add(rows([1, 2], first_id=2))
    assert ended_by_step(engine) == [[0], [1], [2], [3]]


def test_an_aborted_batch_makes_room_for_the_next():
    engine, _ = make_engine(max_num_seqs=2, admission="static")
    engine.add(rows([30, 30, 2, 2]))
    engine.step()
    engine.abort([0, 1])
    assert ended_by_step(engine) == [[2, 3]]


def test_rows_from_another_engine_do_not_wait_for_the_end_of_a_batch():
    other, _ = make_engine()
    other.add(rows([9], first_id=70))
    other.step()
    engine, _ = make_engine(max_num_seqs=3, admission="static")
    engine.add(rows([3, 12, 2]))
    for _ in range(4):
        engine.step()
    engine.restore(other.export([70]))
    engine.step()
    assert engine.stats().num_running == 2


@pytest.mark.parametrize("policy", CLOSED)
def test_a_forecast_is_refused_beside_batches_that_start_at_once(policy):
    with pytest.raises(ConfigError, match=f"admission='{policy}' a batch starts at once"):
        EngineConfig(admission=policy, kv_admission_fraction=0.9)


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"engine.admission must be one of fcfs, .*'sjf'"):
        EngineConfig(admission="sjf")
