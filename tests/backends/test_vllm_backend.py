"""The vLLM backend without vLLM: queues, samples and restarts over a scripted engine."""

import json
from dataclasses import replace

import numpy as np
import pytest

from raybatch.backends.vllm.backend import VllmBackend, can_resume, sampling_params
from raybatch.backends.vllm.requests import Answer, Progress, RequestRefused
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.records.payload import IMAGES, with_images
from raybatch.records.types import Capacity, Request, Sampling, SequenceState

EOS = 9
MAX_NUM_SEQS = 4


class ScriptedEngine:
    """Runs the first requests it got; every token is the number of the request's tokens so far."""

    def __init__(self):
        self.requested = []
        self.requests = {}
        self.num_generated = 0
        self.refuses = None
        self.reason = "length"
        self.stop = None
        self.is_broken = False

    def capacity(self):
        return Capacity(kv_tokens=1000, max_model_len=100, max_num_seqs=MAX_NUM_SEQS, block_size=16)

    def vocab_size(self):
        return 50

    def eos_token_ids(self):
        return frozenset([EOS])

    def add(self, key, prompt_token_ids, sampling):
        if self.refuses in prompt_token_ids:
            raise RequestRefused("not this one")
        self.requested.append((prompt_token_ids, sampling))
        self.requests[key] = (sampling["max_tokens"], [])

    def step(self):
        if self.is_broken:
            raise RuntimeError("out of memory")
        ended = []
        for key, (max_tokens, tokens) in list(self.requests.items())[:MAX_NUM_SEQS]:
            tokens.append(len(tokens))
            self.num_generated += 1
            if len(tokens) == max_tokens:
                ended.append(Answer(key, self.progress(key), self.reason, self.stop, True))
                del self.requests[key]
        return ended

    def take(self, keys):
        return {key: (self.progress(key), self.requests.pop(key))[0] for key in keys}

    def progress(self, key):
        return Progress(np.array(self.requests[key][1], np.int32), 16, ())

    def num_tokens(self, key):
        return len(self.requests[key][1])

    def has_started(self, key):
        return bool(self.requests[key][1])

    def generated_tokens(self):
        return self.num_generated

    def num_running(self):
        return sum(map(self.has_started, self.requests))

    def num_steps(self):
        return 0

    def weight_counters(self):
        return WeightCounters()

    def num_preemptions(self):
        return 0

    def kv_used_fraction(self):
        return 0.0

    def close(self):
        pass


class AheadEngine(ScriptedEngine):
    """Runs a step while requests are taken out, as ranks in other processes may."""

    def take(self, keys):
        self.step()
        return super().take(keys)


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def backend(engine):
    return VllmBackend(engine)


def request(request_id, prompt=None, **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array([request_id + 1] if prompt is None else prompt, np.int32),
        sampling=Sampling(**({"max_tokens": 6} | sampling)),
        seed=request_id,
    )


def state_of(of, tokens, **options):
    return SequenceState(request=of, sample_idx=0, token_ids=np.array(tokens, np.int32), **options)


def test_vllm_gets_what_it_can_run_and_a_small_lead(engine, backend):
    backend.submit([request(i) for i in range(20)])
    backend.poll()
    assert [prompt for prompt, _ in engine.requested] == [[1], [2], [3], [4], [5]]


def test_rows_are_handed_over_in_the_order_of_submission(engine, backend):
    backend.submit([request(i, max_tokens=1 + i % 3) for i in range(20)])
    while backend.num_unfinished():
        backend.poll()
    assert [prompt for prompt, _ in engine.requested] == [[i + 1] for i in range(20)]


def test_rows_that_vllm_has_not_started_are_given_back_and_keep_their_order(engine, backend):
    backend.submit([request(i) for i in range(8)])
    backend.poll()
    given = backend.drain()
    assert [r.request_id for r in given] == [4, 5, 6, 7]
    assert len(engine.requests) == MAX_NUM_SEQS
    backend.submit(given[:2])
    while backend.num_unfinished():
        backend.poll()
    assert [prompt for prompt, _ in engine.requested[-2:]] == [[5], [6]]


def test_samples_of_a_row_are_requests_with_different_seeds(engine, backend):
    backend.submit([request(1, n=3, temperature=0.5)])
    backend.poll()
    seeds = [sampling["seed"] for _, sampling in engine.requested]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_greedy_row_has_no_seed(engine, backend):
    backend.submit([request(1)])
    backend.poll()
    assert "seed" not in engine.requested[0][1]


def test_a_row_that_vllm_refuses_is_an_error_row_and_the_others_continue(engine, backend):
    engine.refuses = 2
    backend.submit([request(i, max_tokens=1) for i in range(3)])
    done = {c.request_id: c for c in backend.poll()}
    assert {i: c.error for i, c in done.items()} == {
        0: "",
        1: "RequestRefused: not this one",
        2: "",
    }
    assert backend.num_unfinished() == 0


@pytest.mark.parametrize(
    ("stop", "stop_token_ids", "reported"), [(EOS, (), None), (EOS, (EOS,), None), (7, (7,), 7)]
)
def test_the_end_token_of_the_model_is_no_stop_reason(
    engine, backend, stop, stop_token_ids, reported
):
    engine.reason, engine.stop = "stop", stop
    backend.submit([request(1, max_tokens=1, stop_token_ids=stop_token_ids)])
    (completion,) = backend.poll()
    assert (completion.finish_reason, completion.stop_reason) == ("stop", reported)


def test_an_end_that_is_none_is_an_error(engine, backend):
    engine.reason = "abort"
    backend.submit([request(1, max_tokens=1)])
    (completion,) = backend.poll()
    assert completion.error == "VllmError: vLLM ended the request with 'abort'"


def test_a_failure_of_the_engine_is_raised(engine, backend):
    engine.is_broken = True
    backend.submit([request(1)])
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.poll()


def test_a_row_continues_from_its_tokens(engine, backend):
    row = request(1, [3], max_tokens=6, min_tokens=4)
    backend.restore([state_of(row, [7, 8], num_cached_tokens=5)])
    completions = []
    while backend.num_unfinished():
        completions += backend.poll()
    prompt, sampling = engine.requested[0]
    assert (prompt, sampling["max_tokens"], sampling["min_tokens"]) == ([3, 7, 8], 4, 2)
    (completion,) = completions
    assert completion.token_ids.tolist() == [7, 8, 0, 1, 2, 3]
    assert completion.num_cached_tokens == 5


def test_a_row_that_cannot_resume_exactly_restarts(engine, backend):
    backend.restore([state_of(request(1, [3], temperature=0.5), [7, 8])])
    completions = []
    while backend.num_unfinished():
        completions += backend.poll()
    assert [prompt for prompt, _ in engine.requested] == [[3]]
    assert completions[0].token_ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_restored_rows_go_before_those_that_have_not_started(engine, backend):
    backend.submit([request(i) for i in range(2)])
    backend.restore([state_of(request(i), [1]) for i in (7, 8)])
    backend.poll()
    assert [prompt[0] for prompt, _ in engine.requested] == [8, 9, 1, 2]


@pytest.mark.parametrize(
    ("options", "is_exact"),
    [
        ({}, True),
        ({"min_tokens": 3, "logprobs": 2}, True),
        ({"repetition_penalty": 1.3}, True),
        ({"temperature": 0.1}, False),
        ({"stop": ("x",)}, False),
        ({"structured_outputs": {"choice": ["x"]}}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -0.5}, False),
    ],
)
def test_rows_resume_where_tokens_alone_decide(options, is_exact):
    assert can_resume(Sampling(**options)) is is_exact


def test_computed_and_cached_tokens_are_counted_once_per_row(backend):
    backend.submit([request(1, [5] * 20, n=2, max_tokens=3)])
    backend.restore([state_of(request(2, [5] * 20), [1, 2])])
    while backend.num_unfinished():
        backend.poll()
    stats = backend.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (20, 16)
    assert stats.num_recomputed_tokens == 22 - 16
    assert stats.generated_tokens == 2 * 3 + 4


def test_tokens_count_as_they_are_generated(backend):
    backend.submit([request(1, max_tokens=4), request(2, max_tokens=2)])
    generated = []
    while backend.num_unfinished():
        backend.poll()
        generated.append(backend.stats().generated_tokens)
    assert generated == [2, 4, 5, 6]


def test_tokens_that_arrive_while_the_last_row_is_taken_out_are_counted():
    backend = VllmBackend(AheadEngine())
    backend.submit([request(1)])
    backend.poll()
    (state,) = backend.export([1])
    assert state.token_ids.tolist() == [0, 1]
    assert backend.stats().generated_tokens == 2


def test_stats_read_no_row(engine, backend, monkeypatch):
    backend.submit([request(1), request(2)])
    backend.poll()
    monkeypatch.setattr(engine, "num_tokens", None)
    assert (backend.stats().num_running, backend.stats().generated_tokens) == (2, 2)


def test_every_option_has_its_name_in_vllm():
    sampling = Sampling(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, stop=("a",), stop_token_ids=(4,), logprobs=2
    )
    params = sampling_params(
        Request(
            request_id=1, row_id="1", prompt_token_ids=np.array([1], np.int32), sampling=sampling
        ),
        0,
    )
    assert {name: params[name] for name in ("top_k", "top_p", "min_p", "stop", "logprobs")} == {
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "stop": ["a"],
        "logprobs": 2,
    }


def test_few_rows_with_images_are_unpacked_before_a_step(engine):
    payload = json.loads(with_images(None, np.array([7, 8], np.int32), [b"file"]))
    backend = VllmBackend(engine)
    backend.submit([replace(request(i), payload=payload) for i in range(MAX_NUM_SEQS + 1)])
    backend.poll()
    assert len(engine.requested) == MAX_NUM_SEQS
    tokens, options = engine.requested[0]
    assert (tokens, options[IMAGES]) == ([7, 8], [b"file"])
