"""Adapters by name: what is found, what is refused, and copies of remote ones."""

import json

import pytest

from raybatch.errors import ConfigError
from raybatch.models.source import adapter_source, check_adapter, resolve_adapter
from tests.models import refusing_files  # noqa: F401 - registers them


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 16}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize(
    ("name", "root", "expected"),
    [
        ("a", "s3://b/adapters/", "s3://b/adapters/a"),
        ("team/a", "/adapters", "/adapters/team/a"),
        ("/else/a", None, "/else/a"),
        ("s3://b/a", None, "s3://b/a"),
    ],
)
def test_a_name_is_a_folder_below_the_root_or_the_place_itself(name, root, expected):
    assert adapter_source(name, root) == expected


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/a", "~/a", "s3://b/a"])
def test_names_do_not_lead_out_of_the_root(name):
    with pytest.raises(ConfigError, match="must be the name of a folder in '/adapters'"):
        adapter_source(name, "/adapters")


@pytest.mark.parametrize("max_rank", [None, 16, 32])
def test_an_adapter_that_is_there_is_fine(adapter, max_rank):
    check_adapter(str(adapter), max_rank=max_rank)


def test_a_higher_rank_than_engines_take_is_refused(adapter):
    with pytest.raises(ConfigError, match="has rank 16, but max_lora_rank is 8"):
        check_adapter(str(adapter), max_rank=8)


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "no adapter in"), ("{", "no adapter in"), ("[]", "no rank"), ('{"r": "8"}', "no rank")],
)
def test_a_folder_without_a_usable_config_is_no_adapter(tmp_path, config, message):
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        check_adapter(str(tmp_path))


def test_a_local_adapter_stays_where_it_is(adapter):
    assert resolve_adapter(str(adapter)) == str(adapter)


def test_a_remote_adapter_is_copied_once(adapter, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.put(str(adapter), "/adapters/a", recursive=True)
    check_adapter("memory://adapters/a", max_rank=16)
    folder = resolve_adapter("memory://adapters/a")
    assert folder == resolve_adapter("memory://adapters/a")
    with open(f"{folder}/adapter_model.safetensors", "rb") as file:
        assert file.read() == b"weights"


@pytest.mark.parametrize("uri", ["locked://b/a", "listed://b/a"])
def test_a_file_system_that_refuses_is_told(uri):
    with pytest.raises(ConfigError, match="NoCredentialsError: Unable to locate"):
        check_adapter(uri)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("locked://b/a", r"could not read adapter 'locked://b/a': NoCredentialsError: Unable"),
        ("listed://b/a", r"could not download adapter 'listed://b/a': NoCredentialsError"),
        ("memory://nothing", r"could not read adapter 'memory://nothing': "),
        ("memory://adapters", r"adapter 'memory://adapters' has no adapter_config.json; pass"),
    ],
)
def test_a_remote_adapter_that_cannot_be_had_is_told_as_one(uri, message, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe_file("/adapters/README.md", b"none here")
    with pytest.raises(ConfigError, match=message):
        resolve_adapter(uri)
