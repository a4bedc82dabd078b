"""Models of the hub: their commit, fetched files and folder."""

import importlib.resources
from pathlib import Path

import huggingface_hub.constants
import pytest

from raybatch.errors import ConfigError
from raybatch.models.source import (
    cached_bytes,
    check_weights_exist,
    has_weights_here,
    model_identity,
    pin,
    resolve_config,
    resolve_model,
)
from tests.models.fake_hub import MODEL, fake_hub

pytestmark = pytest.mark.fetch

DEMO = Path(str(importlib.resources.files("raybatch"))) / "demo" / "checkpoint"


def demo_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in DEMO.iterdir() if path.suffix != ".md"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with fake_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        running.commit(demo_files())
        yield running


def weights_asked_for(hub) -> list[str]:
    return [line for line in hub.requests if line.endswith(".safetensors")]


def test_the_config_of_a_hub_model_comes_without_its_weights(hub):
    folder = resolve_config(MODEL)
    assert (DEMO / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    check_weights_exist(MODEL, folder)
    assert f"commit {hub.main}" == model_identity(MODEL, folder)
    assert [] == weights_asked_for(hub)
    assert not has_weights_here(MODEL)
    assert resolve_model(MODEL) == folder
    assert has_weights_here(MODEL)


def test_a_pinned_model_is_of_its_commit_when_the_branch_has_moved(hub):
    first = hub.main
    pinned = pin(MODEL)
    assert f"{MODEL}@{first}" == pinned
    hub.commit({**demo_files(), "README.md": b"new"})
    assert f"commit {first}" == model_identity(pinned, resolve_model(pinned))
    assert pinned == pin(MODEL, first)
    assert f"{MODEL}@{hub.main}" == pin(MODEL)


def test_a_commit_that_the_model_does_not_have_pins_nothing(hub):
    assert f"{MODEL}@{hub.main}" == pin(MODEL, "0" * 40)
    assert f"{MODEL}@{hub.main}" == pin(f"{MODEL}@main", "0" * 40)


def test_a_pinned_model_that_is_here_needs_no_request(hub):
    pinned = pin(MODEL)
    resolve_model(pinned)
    del hub.requests[:]
    resolve_model(pinned)
    resolve_config(pinned)
    assert [] == hub.requests


def test_missing_files_of_a_pinned_model_are_fetched(hub):
    # as transformers leaves it after it has read only the config
    huggingface_hub.hf_hub_download(MODEL, "config.json", revision=hub.main)
    folder = resolve_config(f"{MODEL}@{hub.main}")
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"{MODEL}@nope", "has no such branch, tag or commit"),
        ("org/other", "is neither a local folder nor a model on the hub"),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub, source, expected):
    with pytest.raises(ConfigError, match=f"model '{source}' {expected}"):
        resolve_config(source)


def test_a_hub_model_with_pickled_weights_alone_is_refused_before_they_are_fetched(hub):
    files = {name: data for name, data in demo_files().items() if "safetensors" not in name}
    hub.commit({**files, "pytorch_model.bin": b"x"})
    with pytest.raises(ConfigError, match=r"org/model has only pickled weights"):
        check_weights_exist(MODEL, resolve_config(MODEL))


def test_incomplete_files_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0f").write_bytes(b"abc")
    # as if another process had renamed it meanwhile
    (blobs / "1f.incomplete").symlink_to(blobs / "gone")
    assert 3 == cached_bytes("org/model")


def test_a_uri_of_the_hub_names_its_content(hub):
    uri = f"hf://{MODEL}"
    before = pin(uri)
    weights = demo_files()["model.safetensors"]
    hub.commit({**demo_files(), "model.safetensors": bytes(len(weights))})
    assert before != pin(uri)
