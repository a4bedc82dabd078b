"""Steps that begin before the host has the tokens of the step before: the same answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.sampling.sampler import Sampler
from tests.engine.fakes import FakeRunner, FakeSpec, FakeStopChecker, make_request, run_all
from tests.engine.lazy_queue import LazyQueue
from tests.tiers import examples

VOCAB, EOS = 300, (7, 8)


class Events(FakeRunner):
    """A runner that notes when it is called, beside a queue that notes when it is waited for."""

    def __post_init__(self):
        super().__post_init__()
        self.events, self.num_drawn = [], 0

    def forward(self, batch):
        self.num_drawn += len(batch.logits_idx) > 0
        self.events.append("launch")
        return super().forward(batch)


class Queue(LazyQueue):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def run_to(self, stop):
        if stop > self.num_done:
            self.events.append("read")
        super().run_to(stop)


def make_engine(*, ahead, num_blocks=64, eos=EOS, nan_after=None, **config):
    options = {"block_size_tokens": 4, "max_batched_tokens": 64, "max_num_seqs": 16} | config
    runner = Events(num_blocks=num_blocks, spec=FakeSpec(VOCAB, eos, 128), nan_after=nan_after)
    queue = Queue(runner.events) if ahead else None
    sampler = Sampler(VOCAB, options["max_num_seqs"], eos)
    engine = Engine(runner, sampler, FakeStopChecker(), EngineConfig(**options), queue=queue)
    return engine, runner


def facts_of(done):
    return {
        key: (c.token_ids.tolist(), c.finish_reason, c.stop_reason, c.error, logprobs_of(c))
        for key, c in done.items()
    }


def logprobs_of(completion):
    return [ids.tolist() for ids, _ in completion.logprobs or ()]


def random_requests(rng, count, *, needs_host):
    requests = []
    for i in range(count):
        sampling = {"max_tokens": int(rng.integers(1, 30)), "n": int(rng.integers(1, 3))}
        if rng.random() < 0.3:
            sampling |= {"temperature": 1.5, "min_p": float(rng.choice([0, 0.01]))}
            sampling |= {"top_k": int(rng.choice([1, 5, 299]))} if rng.random() < 0.5 else {}
            sampling |= {"top_p": 0.9} if rng.random() < 0.5 else {}
        if rng.random() < 0.2:
            sampling |= {"min_tokens": min(4, sampling["max_tokens"])}
        if rng.random() < 0.2:
            sampling |= {"stop_token_ids": tuple(rng.integers(0, VOCAB, 20).tolist())}
        if rng.random() < 0.2:
            sampling |= {"stop": (f"{rng.integers(10)},",)}
        if rng.random() < 0.1:
            sampling |= {"ignore_eos": True}
        if needs_host and rng.random() < 0.2:
            options = [{"logprobs": 1}, {"repetition_penalty": 1.3}]
            sampling |= {"temperature": 0.9} | options[rng.integers(2)]
        prompt = np.r_[np.arange(rng.integers(1, 20)), rng.integers(0, VOCAB, rng.integers(1, 25))]
        requests.append(make_request(i, prompt, **sampling))
    return requests


@settings(max_examples=examples(12, full=200))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(20, 70),
    budget=st.integers(6, 60),
    needs_host=st.booleans(),
    has_nan=st.booleans(),
)
def test_answers_are_those_of_steps_that_wait(seed, num_blocks, budget, needs_host, has_nan):
    found = []
    for ahead in (False, True):
        engine, runner = make_engine(
            ahead=ahead,
            num_blocks=num_blocks,
            max_batched_tokens=budget,
            nan_after=5 if has_nan else None,
        )
        rng = np.random.default_rng(seed)
        requests = random_requests(rng, 25, needs_host=needs_host)
        engine.add(requests[:15])
        done = {}
        for request in requests[15:]:
            for completion in engine.step():
                done[completion.request_id, completion.sample_idx] = completion
            engine.check()
            engine.add([request])
        found.append(facts_of(done | run_all(engine)))
        # rows that need the host may be in every step
        assert ("read" in runner.events) == ahead or (ahead and needs_host)
    assert found[0] == found[1]


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read():
    engine, runner = make_engine(ahead=True, eos=())
    engine.add([make_request(i, [1, 2, 3 + i], max_tokens=6) for i in range(3)])
    run_all(engine)
    assert ["launch", *["launch", "read"] * 5, "read"] == runner.events


def test_a_row_that_ends_by_length_is_computed_no_further():
    engine, runner = make_engine(ahead=True, eos=())
    engine.add([make_request(i, [1, 2, 3], max_tokens=2 + 5 * i) for i in range(2)])
    run_all(engine)
    # prompts, and of each answer all tokens but the last one
    assert 6 + 1 + 6 == sum(step.num_tokens for step in runner.steps)


def test_a_row_behind_an_end_token_is_computed_and_not_taken():
    long, _ = make_engine(ahead=False, eos=())
    long.add([make_request(0, [1, 2, 3], max_tokens=9)])
    tokens = run_all(long)[0, 0].token_ids.tolist()
    engine, runner = make_engine(ahead=True, eos=(tokens[4],))
    engine.add([make_request(0, [1, 2, 3], max_tokens=9)])
    assert tokens[:5] == run_all(engine)[0, 0].token_ids.tolist()
    assert tokens[4] not in tokens[:4]
    assert 3 + 5 == sum(step.num_tokens for step in runner.steps)


def test_all_steps_of_rows_with_any_limits_run_ahead():
    engine, runner = make_engine(ahead=True, eos=(), num_blocks=600)
    requests = random_requests(np.random.default_rng(3), 40, needs_host=False)
    assert sum(r.sampling.top_k is not None or r.sampling.top_p < 1 for r in requests) > 5
    engine.add(requests)
    run_all(engine)
    assert runner.num_drawn > 50
    # what is read at once is not waited for by a mark
    assert runner.num_drawn == runner.events.count("read")
    reads = [i for i, event in enumerate(runner.events) if event == "read"]
    num_behind = sum(runner.events[i - 1] == "launch" for i in reads)
    assert num_behind >= 0.95 * runner.num_drawn


@pytest.mark.parametrize("needs", [{"logprobs": 2}, {"presence_penalty": 0.5}])
def test_tokens_that_the_host_needs_are_read_at_once(needs):
    engine, runner = make_engine(ahead=True, eos=())
    engine.add([make_request(0, [1, 2], max_tokens=5, temperature=0.7, **needs)])
    run_all(engine)
    assert ["launch"] * 5 == runner.events


@pytest.mark.parametrize(
    "options", [{"host_kv_bytes": 1 << 20, "host": 8}, {"speculative_tokens": 2}]
)
def test_engines_that_time_steps_or_draft_wait_for_tokens(options):
    host = options.pop("host", 0)
    config = EngineConfig(block_size_tokens=4, max_num_seqs=4, **options)
    runner = Events(num_blocks=40, spec=FakeSpec(VOCAB, (), 128), num_host_blocks=host)
    queue = Queue(runner.events)
    engine = Engine(runner, Sampler(VOCAB, 4, ()), FakeStopChecker(), config, queue=queue)
    engine.add([make_request(0, [1, 2], max_tokens=5)])
    run_all(engine)
    assert "read" not in runner.events


def test_what_leaves_with_an_unread_token_gets_it_again_elsewhere():
    prompts = [[1, 2, 3 + i] for i in range(4)]
    requests = [make_request(i, prompt, max_tokens=12) for i, prompt in enumerate(prompts)]
    # they come into slots that are free before the tokens of the old sequences are read
    late = [make_request(10 + i, [9, i], max_tokens=3) for i in range(3)]
    expected, _ = make_engine(ahead=False)
    expected.add([*requests, *late])
    expected = facts_of(run_all(expected))
    first, _ = make_engine(ahead=True)
    second, _ = make_engine(ahead=True)
    first.add(requests)
    done = {}
    for _ in range(4):
        done |= {(c.request_id, c.sample_idx): c for c in first.step()}
    states = first.export([1, 3])
    assert [3] * len(states) == [len(state.token_ids) for state in states]
    second.restore(states)
    first.add(late)
    assert expected == facts_of(done | run_all(first) | run_all(second))
