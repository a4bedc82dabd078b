import json
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import model_fingerprint, weight_files
from raybatch.models.source import resolve_config, resolve_model
from tests.models import refusing_files  # noqa: F401 - registers them

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"a": torch.zeros(8)}, path / "model.safetensors")
    return path


@pytest.fixture
def uri(folder: Path) -> str:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in folder.iterdir():
        memory.pipe_file(f"/bucket/model/{file.name}", file.read_bytes())
    memory.pipe_file("/bucket/model/training_args.bin", b"x")
    return "memory://bucket/model"


def test_a_folder_is_used_in_place(folder):
    assert resolve_model(str(folder)) == folder


def test_a_file_uri_is_used_in_place(folder):
    assert resolve_model(f"file://{folder}") == folder


def test_a_uri_is_copied_once(uri, own_cache):
    first = resolve_model(uri)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert resolve_model(uri) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert [first.name] == [path.name for path in (own_cache / "models").iterdir()]


def test_only_files_of_the_model_are_copied(uri):
    names = sorted(path.name for path in resolve_model(uri).iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_changed_content_behind_a_uri_is_copied_again(uri):
    first = resolve_model(uri)
    fsspec.filesystem("memory").pipe_file("/bucket/model/config.json", b'{"architectures": []}')
    second = resolve_model(uri)
    assert first != second
    assert (second / "config.json").read_bytes() == b'{"architectures": []}'


def test_an_empty_uri_is_refused():
    fsspec.filesystem("memory").store.clear()
    with pytest.raises(ConfigError, match="memory://nothing/here"):
        resolve_model("memory://nothing/here")


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ConfigError, match="could not read"):
        resolve_model("nosuch://bucket/model")


@pytest.mark.parametrize(
    ("uri", "failed"), [("locked://b/m", "read"), ("listed://b/m", "download")]
)
def test_a_file_system_that_refuses_is_reported(uri, failed):
    with pytest.raises(ConfigError, match=f"could not {failed} model '{uri}': NoCredentialsError"):
        resolve_model(uri)


def test_pickled_weights_are_refused_with_the_way_out(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"pickled weights.*save_pretrained"):
        resolve_model(str(folder))


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        resolve_model(str(folder))


def test_a_second_copy_of_the_weights_is_left_alone(folder):
    save_file({"tok_embeddings.weight": torch.zeros(8)}, folder / "consolidated.safetensors")
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="model-00001-of-00002"):
        resolve_model(str(folder))


def test_a_file_is_no_model(folder):
    with pytest.raises(ConfigError, match="must be a folder"):
        resolve_model(str(folder / "config.json"))


def test_a_hub_id_without_network_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="hf download nowhere/no-such-model"):
        resolve_model("nowhere/no-such-model")


@pytest.mark.parametrize("path", ["./nope", "../nope", "/nope", "~/nope", "a/b/c", "./a/b", "."])
def test_a_path_of_no_folder_is_named_and_not_taken_for_a_hub_id(path, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("HOME", str(tmp_path))
    message = r"has no config\.json" if path == "." else f"model folder '{path}' does not exist"
    with pytest.raises(ConfigError, match=message):
        resolve_model(path)


def test_an_invalid_hub_id_is_reported_in_one_line():
    with pytest.raises(ConfigError, match="'-nope' is neither a local folder nor a valid hub id"):
        resolve_model("-nope")


def test_the_config_of_a_hub_id_without_network_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="hf download nowhere/no-such-model --revision v1"):
        resolve_config("nowhere/no-such-model@v1")


def test_the_fingerprint_does_not_depend_on_the_place(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert model_fingerprint(folder) == model_fingerprint(tmp_path / "copy")


def test_the_fingerprint_changes_with_one_weight(folder):
    before = model_fingerprint(folder)
    weights = torch.zeros(8)
    weights[5] = 1e-3
    save_file({"a": weights}, folder / "model.safetensors")
    assert before != model_fingerprint(folder)


def test_the_fingerprint_changes_with_the_config(folder):
    before = model_fingerprint(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert before != model_fingerprint(folder)
