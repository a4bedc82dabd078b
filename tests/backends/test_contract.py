"""The contract of every backend with the pool.

An endpoint reports nothing about a row before its end, so tests of the tokens of unfinished rows
exclude it.
"""

import itertools
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from raybatch.backends.registry import create_backend
from raybatch.backends.vllm.start import start_inner
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.models.config import read_model_spec
from raybatch.records.sequence_kv import KVKey, SequenceKV
from raybatch.records.types import Request, Sampling, SequenceState
from tests.backends.vllm_engines import VllmShelf
from tests.engine.tiny_models import build
from tests.openai.endpoint.endpoint_server import EndpointServer

MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 40
VOCAB_SIZE = 211
# its embedding is NaN in models; the fake backend and the server fail on it
BAD_TOKEN = 210
NUM_PROMPTS = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    model = build("qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = float("nan")
        # so that the model rarely generates it
        model.get_output_embeddings().weight[BAD_TOKEN] = 0.0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shelf(checkpoint):
    """Reusable engines of vLLM, whose blocks hold at least 32 tokens."""
    token_bytes = kv_bytes_per_token(read_model_spec(checkpoint), torch.float32)
    engine = EngineConfig(
        block_size_tokens=32,
        dtype="float32",
        kv_cache_bytes=4 * MAX_NUM_SEQS * 32 * token_bytes,
        max_batched_tokens=256,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    options = {"engine_kwargs": {"skip_tokenizer_init": True}}
    backend = BackendConfig(kind="vllm", options=options)
    return VllmShelf(lambda: start_inner(str(checkpoint), backend, engine))


_VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here"),
    ],
)


class Stepping:
    """A backend whose endpoint gives each sequence one token per poll."""

    def __init__(self, backend, server):
        self._backend = backend
        self._server = server

    def poll(self):
        self._server.step()
        return self._backend.poll()

    def __getattr__(self, name):
        return getattr(self._backend, name)


@pytest.fixture
def make_endpoint():
    with EndpointServer(max_model_len=MAX_MODEL_LEN, error_on=BAD_TOKEN, is_stepped=True) as server:
        options = {
            "base_url": server.url,
            "max_concurrency": MAX_NUM_SEQS,
            "max_model_len": MAX_MODEL_LEN,
            "extra_body": {"return_token_ids": True},
        }
        config = BackendConfig(kind="openai", options=options)
        made = []

        def make():
            made.append(create_backend("served", config, EngineConfig()))
            return Stepping(made[-1], server)

        yield make
        for backend in made:
            backend.close()


# backends that report rows before their end
REPORTING = pytest.mark.parametrize(
    "make", ["fake", "native", "transformers", _VLLM], indirect=True
)


@pytest.fixture(params=["fake", "native", "transformers", "openai", _VLLM])
def make(request, tmp_path, monkeypatch):
    """Makes equal backends of one kind, each with room for four sequences."""
    if request.param == "vllm":
        return request.getfixturevalue("shelf").make
    if request.param == "openai":
        return request.getfixturevalue("make_endpoint")
    if request.param == "fake":
        options = {
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": MAX_MODEL_LEN,
            "error_on": BAD_TOKEN,
        }
        config = BackendConfig(kind="fake", options=options)
        return lambda: create_backend("none", config, EngineConfig())
    path = request.getfixturevalue("checkpoint")
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    token_bytes = kv_bytes_per_token(read_model_spec(path), torch.float32)
    engine = EngineConfig(
        block_size_tokens=4,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=MAX_NUM_SEQS * MAX_MODEL_LEN * token_bytes,
        max_batched_tokens=256,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    return lambda: create_backend(str(path), BackendConfig(kind=request.param), engine)


@pytest.fixture
def backend(make):
    with closing(make()) as made:
        yield made


@pytest.fixture
def other(make):
    """A second backend, to which rows move."""
    with closing(make()) as made:
        yield made


def request(request_id, prompt=None, **sampling):
    tokens = prompt if prompt is not None else [1 + request_id % NUM_PROMPTS, 7, 9]
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array(tokens, np.int32),
        sampling=Sampling(**({"max_tokens": 6} | sampling)),
        seed=request_id,
    )


def run(backend):
    """Return the remaining completions by (request, sample); fail on a duplicate."""
    done = {}
    for _ in range(500):
        if not backend.num_unfinished():
            return done
        for completion in backend.poll():
            key = (completion.request_id, completion.sample_idx)
            assert key not in done
            done[key] = completion
    raise AssertionError("the backend makes no progress")


def tokens_of(done):
    return {key: completion.token_ids.tolist() for key, completion in done.items()}


def alone(make, *requests):
    """Return the tokens of requests that run without others."""
    with closing(make()) as backend:
        backend.submit(requests)
        return tokens_of(run(backend))


def test_every_row_comes_out_once_and_in_any_company_the_same(make, backend):
    requests = [request(i, temperature=0.9, n=1 + i % 2) for i in range(10)]
    backend.submit(requests[:7])
    done = {(c.request_id, c.sample_idx): c for c in backend.poll()}
    backend.submit(requests[7:])
    done |= run(backend)
    expected = {}
    for item in requests:
        expected |= alone(make, item)
    assert expected == tokens_of(done)
    assert set(done) == {(r.request_id, i) for r in requests for i in range(r.sampling.n)}


def test_an_idle_backend_returns_nothing(backend):
    assert (backend.poll(), backend.num_unfinished(), backend.drain()) == ([], 0, [])


def test_a_request_counts_as_unfinished_until_its_last_sample(backend):
    backend.submit([request(1, n=3, max_tokens=1), request(2, max_tokens=3)])
    counts = [backend.num_unfinished()]
    while backend.num_unfinished():
        backend.poll()
        counts.append(backend.num_unfinished())
    assert list(dict.fromkeys(counts)) == [2, 1, 0]


def test_a_request_id_that_is_still_in_the_backend_is_refused(backend):
    backend.submit([request(1)])
    with pytest.raises(ValueError, match="request 1 is already"):
        backend.submit([request(1)])


def test_an_id_may_come_again_when_it_is_done(make, backend):
    backend.submit([request(1)])
    first = tokens_of(run(backend))
    backend.submit([request(1)])
    assert first == tokens_of(run(backend))


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_sequence_ends_by_length_at_max_tokens(backend, max_tokens):
    backend.submit([request(1, max_tokens=max_tokens)])
    completion = run(backend)[1, 0]
    ends = (len(completion.token_ids), completion.finish_reason, completion.stop_reason)
    assert ends == (max_tokens, "length", None)


def test_a_sequence_ends_by_length_at_the_context(backend):
    prompt = list(range(1, MAX_MODEL_LEN - 4))
    backend.submit([request(1, prompt, max_tokens=100)])
    completion = run(backend)[1, 0]
    assert (len(prompt) + len(completion.token_ids), completion.finish_reason) == (
        MAX_MODEL_LEN,
        "length",
    )


def test_a_stop_token_ends_a_sequence_and_is_kept(make, backend):
    tokens = alone(make, request(1, max_tokens=12))[1, 0]
    position = next(i for i in range(1, 12) if tokens[i] not in tokens[:i])
    backend.submit([request(1, max_tokens=12, stop_token_ids=(tokens[position],))])
    completion = run(backend)[1, 0]
    assert completion.token_ids.tolist() == tokens[: position + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[position])


def test_a_stop_token_does_not_count_before_min_tokens(make, backend):
    tokens = alone(make, request(1, max_tokens=12))[1, 0]
    backend.submit([request(1, max_tokens=12, min_tokens=12, stop_token_ids=(tokens[0],))])
    completion = run(backend)[1, 0]
    # with min_tokens a sampler may avoid the stop token, so only the length is common
    assert len(completion.token_ids) == 12


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], "EmptyPrompt: "),
        ([-1, 2], "BadTokenId: "),
        (list(range(1, MAX_MODEL_LEN + 1)), "PromptTooLong: "),
        ([5, BAD_TOKEN], ""),
    ],
    ids=["empty", "negative", "too-long", "bad-in-the-model"],
)
def test_a_bad_row_is_an_error_for_each_sample_and_harms_no_other(make, backend, prompt, error):
    good = [request(i) for i in (1, 3)]
    backend.submit([good[0], request(2, prompt, n=2), good[1]])
    done = run(backend)
    assert alone(make, good[0]) | alone(make, good[1]) == {
        key: tokens for key, tokens in tokens_of(done).items() if key[0] != 2
    }
    bad = [done[2, 0], done[2, 1]]
    assert ["error", "error"] == [c.finish_reason for c in bad]
    assert all(c.error.startswith(error) and ": " in c.error for c in bad)


def test_rows_that_have_not_started_are_given_back_in_order(backend):
    backend.submit([request(i) for i in range(7)])
    backend.poll()
    assert [r.request_id for r in backend.drain()] == [4, 5, 6]
    assert backend.num_unfinished() == 4
    assert {i for i, _ in run(backend)} == {0, 1, 2, 3}


def test_a_row_of_which_a_sample_has_started_is_not_given_back(backend):
    backend.submit([request(i, n=3) for i in range(3)])
    backend.poll()
    assert [r.request_id for r in backend.drain()] == [2]


def test_rows_given_back_run_elsewhere_with_the_same_tokens(make, backend, other):
    requests = [request(i, temperature=0.9) for i in range(7)]
    backend.submit(requests)
    backend.poll()
    other.submit(backend.drain())
    assert alone(make, *requests) == tokens_of(run(backend)) | tokens_of(run(other))


@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["before", "in-prefill", "in-decode"])
def test_aborted_rows_never_come_out_and_harm_no_other(make, backend, num_steps):
    requests = [request(i, n=1 + i % 2) for i in range(8)]
    backend.submit(requests)
    for _ in range(num_steps):
        assert backend.poll() == []
    backend.abort([0, 3, 7])
    kept = [r for r in requests if r.request_id not in (0, 3, 7)]
    assert backend.num_unfinished() == len(kept)
    assert alone(make, *kept) == tokens_of(run(backend))


def test_an_abort_frees_everything(backend):
    backend.submit([request(i, n=2) for i in range(5)])
    backend.poll()
    assert backend.stats().kv_used_fraction > 0
    backend.abort(range(5))
    stats = backend.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_fraction) == (0, 0, 0.0)
    assert (backend.num_unfinished(), backend.poll()) == (0, [])


def test_an_aborted_id_may_come_again(make, backend):
    backend.submit([request(1)])
    backend.poll()
    backend.abort([1])
    backend.submit([request(1)])
    assert alone(make, request(1)) == tokens_of(run(backend))


def test_an_abort_of_a_row_with_samples_that_finished_drops_the_rest(backend):
    stops = tuple(range(1, VOCAB_SIZE, 2))
    backend.submit([request(1, n=4, temperature=1.5, max_tokens=20, stop_token_ids=stops)])
    while not backend.poll():
        pass
    backend.abort([1])
    assert (backend.num_unfinished(), backend.poll()) == (0, [])


def test_an_abort_drops_an_unreported_error(backend):
    backend.submit([request(1, []), request(2)])
    backend.abort([1])
    assert set(run(backend)) == {(2, 0)}


def test_unknown_ids_are_ignored_by_an_abort(backend):
    backend.submit([request(1)])
    backend.abort([5])
    assert set(run(backend)) == {(1, 0)}


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_exported_row_continues_elsewhere_with_the_same_tokens(make, backend, other, num_steps):
    requests = [request(i, temperature=0.9, n=1 + i % 2) for i in range(6)]
    backend.submit(requests)
    for _ in range(num_steps):
        backend.poll()
    states = backend.export([1, 4])
    keys = [(state.request.request_id, state.sample_idx) for state in states]
    assert keys == [(1, 0), (1, 1), (4, 0)]
    other.restore(states)
    assert alone(make, *requests) == tokens_of(run(backend)) | tokens_of(run(other))


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_kv_is_exported_if_requested_and_supported(make, backend, other, num_steps):
    requests = [request(i, temperature=0.9, n=1 + i % 2) for i in range(6)]
    backend.submit(requests)
    for _ in range(num_steps):
        backend.poll()
    states = backend.export([1, 2], with_kv=True)
    # at most rows 0 to 2 run, and only the native engine imports KV
    has_kv = num_steps > 0 and type(backend).__name__ == "NativeBackend"
    assert [has_kv] * 2 == [state.kv is not None for state in states[:2]]
    other.restore(states)
    assert alone(make, *requests) == tokens_of(run(backend)) | tokens_of(run(other))
    recomputed = other.stats().num_recomputed_tokens
    assert recomputed == 0 or not has_kv


def test_kv_of_another_engine_is_not_exported(make, backend):
    key = KVKey(model="another", dtype="float32", kv_dtype="float32", block_size=4)
    blocks, checksums = np.zeros((1, 2, 1, 1, 4, 8), np.int32), np.zeros(1, np.uint32)
    kv = SequenceKV(key=key, first_block=0, num_tokens=2, blocks=blocks, checksums=checksums)
    backend.restore([SequenceState(request=request(1), sample_idx=0, kv=kv)])
    (state,) = backend.export([1], with_kv=True)
    assert state.kv is None
    backend.restore([replace(state, kv=kv)])
    assert alone(make, request(1)) == tokens_of(run(backend))


@REPORTING
def test_tokens_so_far_let_a_row_continue_elsewhere_and_here(make, backend, other):
    requests = [request(i, temperature=0.9, max_tokens=9) for i in range(3)]
    backend.submit(requests)
    for _ in range(5):
        backend.poll()
    states = backend.checkpoint(3)
    assert [0, 1, 2] == sorted(state.request.request_id for state in states)
    assert all(3 <= len(state.token_ids) < 9 for state in states)
    other.restore(states)
    expected = alone(make, *requests)
    assert expected == tokens_of(run(backend)) == tokens_of(run(other))


@REPORTING
def test_tokens_are_reported_once(backend):
    backend.submit([request(1, max_tokens=9)])
    for _ in range(5):
        backend.poll()
    assert [1, 0] == [len(backend.checkpoint(3)), len(backend.checkpoint(3))]


def progress_of(backend):
    progress = backend.progress()
    return dict(zip(progress.request_ids, progress.num_generated, strict=True))


@REPORTING
def test_running_rows_report_their_number_of_tokens(backend):
    backend.submit([request(i, max_tokens=9) for i in range(2)])
    for _ in range(4):
        backend.poll()
    before = progress_of(backend)
    backend.poll()
    now = progress_of(backend)
    assert {0, 1} == before.keys()
    assert all(0 < before[row] < now[row] < 9 for row in now)
    run(backend)
    assert progress_of(backend) == {}


def test_restored_rows_are_not_given_back(backend, other):
    backend.submit([request(1)])
    backend.poll()
    other.restore(backend.export([1]))
    assert (other.drain(), other.num_unfinished()) == ([], 1)


def test_counters_add_up(backend):
    requests = [request(i, max_tokens=1 + i) for i in range(6)]
    backend.submit(requests)
    done = run(backend)
    stats = backend.stats()
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert stats.generated_tokens == sum(len(c.token_ids) for c in done.values()) == 21
    assert (stats.num_running, stats.num_waiting, stats.kv_used_fraction) == (0, 0, 0.0)
    assert stats.num_steps > 0
    assert stats.engine_s > 0


def test_running_and_waiting_sequences_are_counted(backend):
    backend.submit([request(i, n=2) for i in range(4)])
    before = backend.stats()
    backend.poll()
    after = backend.stats()
    assert (before.num_running, before.num_waiting) == (0, 8)
    assert (after.num_running, after.num_waiting) == (MAX_NUM_SEQS, 8 - MAX_NUM_SEQS)


def test_a_poll_with_nothing_to_run_is_no_step(backend):
    backend.submit([request(1, [])])
    assert [c.finish_reason for c in backend.poll()] == ["error"]
    assert backend.stats().num_steps == 0


def test_capacity_names_the_limits(backend):
    capacity = backend.capacity()
    assert (capacity.max_num_seqs, capacity.max_model_len) == (MAX_NUM_SEQS, MAX_MODEL_LEN)
    assert capacity.kv_tokens >= MAX_MODEL_LEN


def test_samples_of_one_row_differ(backend):
    backend.submit([request(1, n=3, temperature=1.5, max_tokens=10)])
    pairs = itertools.combinations(tokens_of(run(backend)).values(), 2)
    assert all(a != b for a, b in pairs)


def test_the_cached_prompt_of_a_request_counts_once_over_its_samples(backend):
    prompt = [5] * 32 + [6]
    members = [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.array(prompt, np.int32),
            sampling=Sampling(max_tokens=2, n=2),
            group_id=7,
            prefix_len=32,
        )
        for i in range(2)
    ]
    backend.submit(members[:1])
    first = run(backend)
    backend.submit(members[1:])
    second = run(backend)
    assert [first[0, i].num_cached_tokens for i in range(2)] == [0, 0]
    assert [second[1, i].num_cached_tokens for i in range(2)] == [32, 0]


@REPORTING
def test_running_rows_report_their_progress(backend):
    backend.submit([request(i, max_tokens=12) for i in range(2)])
    for _ in range(4):
        backend.poll()
    progress = backend.progress()
    assert sorted(progress.request_ids.tolist()) == [0, 1]
    assert (progress.num_generated >= 2).all()
    assert (progress.num_tokens - progress.num_generated).tolist() == [3, 3]


def test_an_idle_backend_reports_no_rows(backend):
    assert len(backend.progress().request_ids) == 0


@pytest.mark.parametrize("from_block", [0, None], ids=["with-kv", "without"])
def test_a_row_that_departs_continues_elsewhere_with_the_same_tokens(
    make, backend, other, from_block
):
    requests = [request(i, temperature=0.9, n=1 + i % 2, max_tokens=10) for i in range(3)]
    backend.submit(requests)
    for _ in range(4):
        backend.poll()
    for moved in (0, 1):
        other.restore(backend.depart(moved, from_block))
        backend.forget(moved)
    assert backend.num_unfinished() == 1
    assert alone(make, *requests) == tokens_of(run(backend)) | tokens_of(run(other))


def test_a_row_that_departs_and_stays_continues_with_the_same_tokens(make, backend):
    requests = [request(i, temperature=0.9, max_tokens=10) for i in range(3)]
    backend.submit(requests)
    for _ in range(4):
        backend.poll()
    states = backend.depart(1, 0)
    backend.poll()
    backend.restore(states)
    assert alone(make, *requests) == tokens_of(run(backend))


def test_a_row_that_is_not_there_does_not_depart(backend):
    backend.submit([request(1, max_tokens=2)])
    run(backend)
    assert backend.peek(1, 0, 4) is None
    assert backend.depart(1, 0) == []
    backend.forget(1)


def test_copies_that_come_ahead_are_taken_or_refused(make, backend, other):
    """An engine with KV exports whole blocks while a row runs; other engines return none."""
    moved = request(1, list(range(1, 14)), max_tokens=20)
    backend.submit([moved])
    for _ in range(6):
        backend.poll()
    state, num_blocks = backend.peek(1, 0, 8), 0
    has_kv = backend.capacity().kv_token_bytes > 0
    assert has_kv == (state is not None) == other.reserve(1, 8)
    if state is not None:
        assert other.receive(state)
        num_blocks = len(state.kv.blocks)
    assert backend.num_unfinished() == 1
    other.restore(backend.depart(1, num_blocks if has_kv else None))
    backend.forget(1)
    assert alone(make, moved) == tokens_of(run(other))
    if has_kv:
        assert other.stats().num_recomputed_tokens == 0
