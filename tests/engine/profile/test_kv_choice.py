"""Where an engine that has host memory for KV keeps it: what the options say, else measured."""

import logging
from dataclasses import replace

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.profile.module_profile import measured_profile
from raybatch.redaction import redacted
from tests.engine.test_runtime import BLOCK
from tests.engine.tiny_models import save

ENGINE = EngineConfig(
    device="cpu",
    dtype="float32",
    kv_cache_bytes=1 << 20,
    host_kv_bytes=1 << 22,
    block_size_tokens=BLOCK,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save("qwen3-moe", folder / "qwen3-moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(folder / "cache"))
        yield folder


def loaded(folder, **options):
    return ModelRunner.load(str(folder / "qwen3-moe"), replace(ENGINE, **options))


def test_an_engine_with_host_memory_measures_once_and_says_why(folder, monkeypatch, caplog):
    was_read = []

    def noted(*args, **options):
        profile, read = measured_profile(*args, **options)
        was_read.append(read)
        return profile, read

    monkeypatch.setattr("raybatch.engine.loading.prepared.measured_profile", noted)
    with caplog.at_level(logging.INFO):
        runners = [loaded(folder) for _ in range(2)]
    assert was_read == [False, True]
    assert runners[0].config.kv_offload is runners[1].config.kv_offload
    assert caplog.text.count("loaded qwen3-moe as") == 2
    # "pass: layers" would look like a password
    assert caplog.messages == [redacted(message) for message in caplog.messages]


@pytest.mark.parametrize(
    ("options", "is_offloaded"),
    [
        ({"host_kv_bytes": None}, False),
        ({"speculative_tokens": 4}, False),
        ({"kv_offload": False}, False),
        ({"kv_offload": True}, True),
    ],
)
def test_where_the_options_decide_nothing_is_measured(folder, monkeypatch, options, is_offloaded):
    def fails(*args, **options):
        raise AssertionError("measured")

    monkeypatch.setattr("raybatch.engine.loading.prepared.measured_profile", fails)
    assert loaded(folder, **options).config.kv_offload is is_offloaded


def test_a_model_that_cannot_be_measured_keeps_kv_on_the_device(folder, monkeypatch, caplog):
    def fails(*args, **options):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("raybatch.engine.loading.prepared.measured_profile", fails)
    assert loaded(folder).config.kv_offload is False
    assert "measuring the times of its layers failed: OutOfMemoryError: no room" in caplog.text


def test_kernels_are_compared_with_references_once(folder, monkeypatch):
    picked, measured = [], []

    def pick(*args, **options):
        picked.append(pick_ops(*args, **options))
        return picked[-1]

    def stop(*args):
        measured.append(args[-1])
        raise MemoryError("measured enough")

    for module in ("loading.prepared", "profile.module_profile"):
        monkeypatch.setattr(f"raybatch.engine.{module}.pick_ops", pick)
    monkeypatch.setattr("raybatch.engine.profile.module_profile.probe_decoder", stop)
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(folder / "empty"))
    runner = loaded(folder)
    assert picked == measured == [runner.decoder.ops]
