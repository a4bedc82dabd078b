"""How an engine chooses to run its steps: what the options say, else what was measured."""

import json
import logging
from dataclasses import asdict, replace

import pytest
import torch

from raybatch.backends.native import create
from raybatch.config import EngineConfig
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import load_profile, measured_profile, profile_path
from raybatch.errors import ConfigError
from raybatch.policy.batches.step_plan import MeasuredLayer
from raybatch.redaction import redacted
from tests.engine.test_runtime import BLOCK, count_calls, finish, make_engine, requests, tokens_of
from tests.engine.tiny_models import save

ENGINE = EngineConfig(
    device="cpu", dtype="float32", kv_cache_bytes=1 << 20, block_size_tokens=BLOCK
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for variant in ("qwen3-moe", "qwen3"):
        save(variant, folder / variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def measured(folder):
    """The profile of the sparse model, and the file that engines read it from."""
    model = load_model(str(folder / "qwen3-moe"), ENGINE)
    options = profile_options(ENGINE)
    profile, _ = measured_profile(model.spec, model.weights, options)
    return profile, profile_path(model.spec, torch.float32, model.device, options)


@pytest.fixture
def says(measured):
    """Puts times of layers into the cache: microseconds of a step plain, and in parts of 64."""
    profile, path = measured
    before = path.read_text()

    def put(plain, parts):
        layers = tuple(
            MeasuredLayer(
                phase=phase, gate_tokens=128, attention_tokens=size, seconds=1e-6 * micros
            )
            for phase in ("prefill", "decode")
            for size, micros in ((128, plain), (64, parts))
        )
        path.write_text(json.dumps(asdict(replace(profile, layers=layers))))
        assert load_profile(path).layers == layers

    yield put
    path.write_text(before)


def loaded(folder, variant="qwen3-moe", **options):
    return ModelRunner.load(str(folder / variant), replace(ENGINE, **options))


def test_a_sparse_model_runs_as_coroutines_where_parts_are_faster(folder, says, caplog):
    says(plain=100, parts=80)
    with caplog.at_level(logging.INFO):
        assert 64 == loaded(folder).attn_batch_tokens
    assert "qwen3-moe runs as coroutines that attend over 64 tokens at a time" in caplog.text
    assert "20 % less time than plain ones" in caplog.text


def test_a_sparse_model_runs_plain_where_parts_are_slower(folder, says, caplog):
    says(plain=100, parts=120)
    with caplog.at_level(logging.INFO):
        assert loaded(folder).attn_batch_tokens is None
    assert "qwen3-moe runs by the plain forward pass" in caplog.text
    assert "20 % more time than plain ones" in caplog.text
    # "pass: layers" would look like a password
    assert caplog.messages == [redacted(message) for message in caplog.messages]


def test_no_drafts_leave_the_plan_as_it_is(folder, says):
    says(plain=100, parts=80)
    assert 64 == loaded(folder, speculative_tokens=0).attn_batch_tokens
    assert loaded(folder, speculative_tokens=4).attn_batch_tokens is None


@pytest.mark.parametrize("given", [None, 5])
def test_what_the_options_say_holds_against_the_plan(folder, says, given):
    says(plain=100, parts=50)
    assert given == loaded(folder, attn_batch_tokens=given).attn_batch_tokens


def test_a_dense_model_runs_plain_and_nothing_is_measured(folder, measured):
    profiles = measured[1].parent
    before = set(profiles.iterdir())
    assert loaded(folder, "qwen3").attn_batch_tokens is None
    assert before == set(profiles.iterdir())


def test_a_model_that_cannot_be_measured_runs_plain_with_a_warning(folder, monkeypatch, caplog):
    def fails(*args, **options):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("raybatch.engine.loading.loaded_model.measured_profile", fails)
    assert loaded(folder).attn_batch_tokens is None
    assert "could not be measured: OutOfMemoryError: no room" in caplog.text


def test_kernels_are_compared_with_references_once(folder, monkeypatch):
    picked, measured = [], []

    def pick(*args, **options):
        picked.append(pick_ops(*args, **options))
        return picked[-1]

    def stop(*args):
        measured.append(args[-1])
        raise MemoryError("measured enough")

    for module in ("loading.runner", "profile.module_profile"):
        monkeypatch.setattr(f"raybatch.engine.{module}.pick_ops", pick)
    monkeypatch.setattr("raybatch.engine.profile.module_profile.probe_decoder", stop)
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(folder / "empty"))
    runner = loaded(folder)
    assert picked == measured == [runner.decoder.ops]


def test_planned_coroutines_give_the_tokens_of_the_plain_forward_pass(folder, says):
    says(plain=100, parts=50)
    path = folder / "qwen3-moe"
    planned, runner = make_engine(path, attn_batch_tokens="auto")
    calls = count_calls(runner)
    plain, _ = make_engine(path)
    for engine in (planned, plain):
        engine.add(requests())
    assert tokens_of(finish(planned)) == tokens_of(finish(plain))
    assert calls["attention"] > 0


def test_the_backend_runs_steps_as_planned(folder, says):
    says(plain=100, parts=50)
    backend = create(str(folder / "qwen3-moe"), ENGINE)
    calls = count_calls(backend._engine.runner)
    backend.submit(requests(count=2))
    while backend.num_unfinished():
        backend.poll()
    assert calls["ffn"] > 0


@pytest.mark.parametrize("wrong", ["aut", 0, 1.5, True])
def test_other_sizes_of_parts_are_refused(wrong):
    with pytest.raises(ConfigError, match='at least 1, "auto" or none, got'):
        EngineConfig(attn_batch_tokens=wrong)
