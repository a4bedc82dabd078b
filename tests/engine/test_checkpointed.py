"""Sequences that continue elsewhere from partial results end as in one run."""

import numpy as np
import pytest

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.models.source import resolve_model
from raybatch.records.types import Request, Sampling
from raybatch.text.tokenizer import Tokenizer
from tests.tiers import some

MAX_TOKENS = 24
CUT = 9
KINDS = {
    "greedy": {},
    "seeded": {"temperature": 0.9},
    "seeded-cut": {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "logprobs": {"temperature": 0.9, "logprobs": 2},
    "samples": {"temperature": 0.9, "n": 3},
    "min-tokens": {"min_tokens": CUT + 3, "ignore_eos": False},
}


def make():
    engine = EngineConfig(
        block_size_tokens=4,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=8 << 20,
        max_batched_tokens=64,
        max_num_seqs=8,
    )
    return create_backend("demo", BackendConfig(kind="native"), engine)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(resolve_model("demo"))


def requests_of(tokenizer, **sampling):
    texts = ["The first of two questions", "Another one: where is"]
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.asarray(tokenizer.encode(text), np.int32),
            sampling=Sampling(**options),
            seed=i + 5,
        )
        for i, text in enumerate(texts)
    ]


def finish(backend):
    done = {}
    while backend.num_unfinished():
        done |= {(c.request_id, c.sample_idx): c for c in backend.poll()}
    return done


def undisturbed(requests):
    backend = make()
    backend.submit(requests)
    return finish(backend)


def interrupted(requests, num_tokens=CUT):
    """End a backend when its sequences have `num_tokens` tokens, and continue in another one."""
    first, second = make(), make()
    first.submit(requests)
    states = []
    num_sequences = sum(request.sampling.n for request in requests)
    while len(states) < num_sequences:
        assert not first.poll()
        states += first.checkpoint(num_tokens)
    second.restore(states)
    return states, finish(second), second.stats()


def as_reported(done):
    return {
        key: (c.token_ids.tolist(), c.finish_reason, c.stop_reason, c.error)
        for key, c in done.items()
    }


@pytest.mark.parametrize("sampling", some(KINDS.values(), 3, ids=KINDS))
def test_the_tokens_are_those_of_an_undisturbed_run(tokenizer, sampling):
    requests = requests_of(tokenizer, **sampling)
    states, done, _ = interrupted(requests)
    assert {CUT} == {len(state.token_ids) for state in states}
    assert as_reported(undisturbed(requests)) == as_reported(done)


def test_only_missing_tokens_are_generated(tokenizer):
    requests = requests_of(tokenizer)
    _, done, stats = interrupted(requests)
    assert [MAX_TOKENS] * 2 == [len(c.token_ids) for c in done.values()]
    assert 2 * (MAX_TOKENS - CUT) == stats.generated_tokens


def test_log_probabilities_cover_all_tokens(tokenizer):
    requests = requests_of(tokenizer, logprobs=2)
    _, done, _ = interrupted(requests)
    for key, expected in undisturbed(requests).items():
        actual = done[key].logprobs
        assert MAX_TOKENS == len(actual)
        for (ids, values), (own_ids, own_values) in zip(expected.logprobs, actual, strict=True):
            assert ids.tolist() == own_ids.tolist()
            np.testing.assert_allclose(values, own_values, atol=1e-4)


def test_a_stop_string_may_begin_before_the_cut(tokenizer):
    (request, _) = requests_of(tokenizer, temperature=1.0)
    tokens = undisturbed([request])[0, 0].token_ids
    before, upto = (tokenizer.decode(tokens[:n]) for n in (CUT - 4, CUT + 1))
    stop = upto[len(before) :]
    sampling = {"temperature": 1.0, "stop": stop}
    (request, _) = requests_of(tokenizer, **sampling)
    expected = as_reported(undisturbed([request]))
    assert CUT + 1 == len(expected[0, 0][0])
    assert expected == as_reported(interrupted([request])[1])


def test_a_stop_token_ends_a_continued_sequence(tokenizer):
    (request, _) = requests_of(tokenizer, temperature=1.0)
    tokens = undisturbed([request])[0, 0].token_ids.tolist()
    last = next(t for t in tokens[CUT:] if t not in tokens[:CUT])
    (request, _) = requests_of(tokenizer, temperature=1.0, stop_token_ids=[last])
    done = interrupted([request])[1]
    assert as_reported(undisturbed([request])) == as_reported(done)
    assert (last, "stop") == (done[0, 0].stop_reason, done[0, 0].finish_reason)


def test_progress_is_reported_only_after_enough_new_tokens(tokenizer):
    backend = make()
    backend.submit(requests_of(tokenizer)[:1])
    counts = []
    for _ in range(12):
        backend.poll()
        counts.append(len(backend.checkpoint(4)))
    assert [i % 4 == 3 for i in range(12)] == [bool(count) for count in counts]


def test_progress_of_a_moved_sequence_is_reported_as_without_a_move(tokenizer):
    first, second = make(), make()
    (request, _) = requests_of(tokenizer)
    first.submit([request])
    for _ in range(7):
        first.poll()
    assert [7] == [len(state.token_ids) for state in first.checkpoint(4)]
    for _ in range(3):
        first.poll()
    second.restore(first.export([0], with_kv=True))
    assert not second.checkpoint(4)
    counts = []
    while not counts:
        second.poll()
        counts = [len(state.token_ids) for state in second.checkpoint(4)]
    assert [11] == counts
