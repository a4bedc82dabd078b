"""The backend without a model follows the protocol, and fails on request."""

import os
import sys
import threading

import numpy as np
import pytest

from raybatch.backends.fake import FakeBackend, FakeOptions, fake_tokens
from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError, MissingDependency
from raybatch.records.types import Request, Sampling


def request(request_id, *tokens, **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array(tokens or (request_id,), np.int32),
        sampling=Sampling(**({"max_tokens": 5} | sampling)),
        seed=request_id,
    )


def run(backend):
    completions = []
    while backend.num_unfinished():
        completions += backend.poll()
    return sorted(completions, key=lambda c: (c.request_id, c.sample_idx))


def expected(req, sample_idx=0):
    return fake_tokens(req.prompt_token_ids, req.seed, req.sampling, sample_idx).tolist()


def test_answers_do_not_depend_on_other_rows():
    requests = [request(i, i, i + 1) for i in range(20)]
    backend = FakeBackend(FakeOptions(max_num_seqs=3))
    backend.submit(requests)
    assert [expected(r) for r in requests] == [c.token_ids.tolist() for c in run(backend)]


def test_every_sample_has_different_tokens():
    req = request(1, 2, 3, n=3)
    backend = FakeBackend(FakeOptions())
    backend.submit([req])
    tokens = [c.token_ids.tolist() for c in run(backend)]
    assert [expected(req, i) for i in range(3)] == tokens
    assert len({tuple(t) for t in tokens}) == 3


def test_hashed_lengths_stay_within_max_tokens():
    lengths = {
        len(fake_tokens(np.array([i]), 0, Sampling(max_tokens=7), lengths="hash"))
        for i in range(100)
    }
    assert set(range(1, 8)) == lengths


def test_an_error_row_does_not_disturb_the_others():
    backend = FakeBackend(FakeOptions(error_on=9))
    backend.submit([request(1), request(2, 9), request(3)])
    assert [bool(c.error) for c in run(backend)] == [False, True, False]


def test_a_prompt_beyond_the_context_is_an_error_row():
    backend = FakeBackend(FakeOptions(max_model_len=2))
    backend.submit([request(1, 1, 2)])
    assert run(backend)[0].error.startswith("PromptTooLong")


def test_drain_gives_back_what_has_not_started():
    backend = FakeBackend(FakeOptions(max_num_seqs=2))
    backend.submit([request(i) for i in range(5)])
    backend.poll()
    assert [r.request_id for r in backend.drain()] == [2, 3, 4]
    assert [c.request_id for c in run(backend)] == [0, 1]


def test_an_exported_sequence_continues_elsewhere_with_the_same_tokens():
    req = request(1, 5, 6)
    first, second = FakeBackend(FakeOptions()), FakeBackend(FakeOptions())
    first.submit([req])
    first.poll()
    first.poll()
    states = first.export([1])
    assert [expected(req)[:2]] == [s.token_ids.tolist() for s in states]
    second.restore(states)
    assert (0, [expected(req)]) == (
        first.num_unfinished(),
        [c.token_ids.tolist() for c in run(second)],
    )


@pytest.mark.parametrize("lengths", ["max", "hash"])
def test_a_row_may_ask_for_more_tokens_than_memory_holds(lengths):
    backend = FakeBackend(FakeOptions(max_model_len=32, lengths=lengths))
    backend.submit([request(0, max_tokens=1 << 80)])
    (found,) = run(backend)
    assert found.finish_reason == "length"
    assert found.token_ids.tolist() == expected(request(0, max_tokens=31))


def test_the_prefix_of_a_group_is_cached_after_its_first_row():
    grouped = [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.arange(4, dtype=np.int32),
            sampling=Sampling(max_tokens=1),
            group_id=1,
            prefix_len=3,
        )
        for i in range(3)
    ]
    backend = FakeBackend(FakeOptions())
    backend.submit(grouped)
    assert [c.num_cached_tokens for c in run(backend)] == [0, 3, 3]


def test_only_the_first_starts_fail(tmp_path):
    options = FakeOptions(marks_dir=str(tmp_path), num_failing_starts=1)
    with pytest.raises(RuntimeError, match="the fake backend fails to start"):
        FakeBackend(options)
    assert FakeBackend(options).num_unfinished() == 0


def test_an_unknown_option_is_refused_with_a_suggestion():
    config = BackendConfig(kind="fake", options={"step": 1})
    with pytest.raises(ConfigError, match="step_s"):
        create_backend("none", config, EngineConfig())


def test_native_backend_without_torch_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r"pip install .*\[cpu\]'"):
        create_backend("demo", BackendConfig(kind="native"), EngineConfig())


def test_an_engine_is_held_after_some_sequences_until_the_file_is_gone(tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    backend = FakeBackend(FakeOptions(max_num_seqs=2, hold_file=str(hold), hold_after=3))
    backend.submit([request(i) for i in range(8)])
    held = [c.request_id for _ in range(100) for c in backend.poll()]
    assert held == [0, 1, 2, 3]
    hold.unlink()
    assert [c.request_id for c in run(backend)] == [4, 5, 6, 7]


def test_finished_rows_of_all_engines_are_counted_in_one_file(tmp_path):
    log = tmp_path / "finished"
    for first in (0, 10):
        backend = FakeBackend(FakeOptions(finished_log=str(log)))
        backend.submit([request(i) for i in range(first, first + 10)])
        run(backend)
    assert 20 == log.stat().st_size


def test_an_engine_hangs_once_a_file_names_its_process(tmp_path):
    backend = FakeBackend(FakeOptions(hang_dir=str(tmp_path)))
    backend.submit([request(1, 2, max_tokens=1)])
    (tmp_path / "1").touch()
    assert [expected(request(1, 2, max_tokens=1))] == [c.token_ids.tolist() for c in run(backend)]
    (tmp_path / str(os.getpid())).touch()
    backend.submit([request(2, 3, max_tokens=1)])
    stepping = threading.Thread(target=backend.poll, daemon=True)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    assert backend.num_unfinished() == 1
