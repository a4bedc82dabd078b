"""`raybatch fetch`: fetches a model to a host, a folder or a cluster before a job needs it."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.errors import ConfigError
from raybatch.models import prefetch as prefetch_module
from raybatch.models.prefetch import prefetch
from raybatch.models.source import has_weights_here, resolve_config
from tests.clusters import own_ray
from tests.models.fake_hub import MODEL
from tests.models.test_hub import DEMO, demo_files, hub, weights_asked_for

__all__ = ["hub"]

pytestmark = [pytest.mark.fetch, pytest.mark.usefixtures("own_cache")]

NUM_BYTES = sum(len(data) for data in demo_files().values())


@pytest.fixture
def uri() -> str:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name, data in demo_files().items():
        memory.pipe_file(f"/bucket/model/{name}", data)
    return "memory://bucket/model"


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["fetch", *map(str, args)], catch_exceptions=False)
    assert 0 == result.exit_code, result.output
    return result.stdout


def test_a_model_of_the_hub_is_fetched_once(hub):
    output = run(MODEL)
    assert f"{MODEL} is in" in output
    assert f"snapshots/{hub.main} on" in output
    assert "; fetched " in output
    assert "; already present" in run(MODEL)
    assert has_weights_here(MODEL)


def test_a_model_of_a_store_is_fetched_once(uri):
    assert "; fetched " in run(uri)
    assert "; already present" in run(uri)
    assert has_weights_here(uri)


def test_the_tokenizer_is_fetched_alone(hub, uri):
    run(MODEL, "--only", "tokenizer")
    assert [] == weights_asked_for(hub)
    assert not prefetch(uri, with_weights=False).folder.joinpath("model.safetensors").exists()


@pytest.mark.parametrize("source", ["hub", "uri"])
def test_a_model_is_fetched_to_a_folder(source, request, tmp_path):
    value = request.getfixturevalue(source)
    model, folder = MODEL if source == "hub" else value, tmp_path / "volume"
    first, second = (prefetch(model, to=folder) for _ in range(2))
    assert NUM_BYTES == first.fetched_bytes == first.num_bytes
    assert 0 == second.fetched_bytes
    for name, data in demo_files().items():
        assert data == (folder / name).read_bytes()


def test_a_folder_with_another_version_is_refused(uri, tmp_path):
    prefetch(uri, to=tmp_path / "volume")
    fsspec.filesystem("memory").pipe_file("/bucket/model/config.json", b"{}")
    with pytest.raises(ConfigError, match="has files that differ from 'memory://bucket/model'"):
        prefetch(uri, to=tmp_path / "volume")


def test_unknown_files_are_not_taken_for_the_model(uri, tmp_path):
    (tmp_path / "config.json").write_bytes(demo_files()["config.json"])
    with pytest.raises(ConfigError, match="has files that differ from"):
        prefetch(uri, to=tmp_path)


def test_a_folder_of_this_host_is_not_fetched():
    with pytest.raises(ConfigError, match="is a folder of this host, so there is nothing to fetch"):
        prefetch(str(DEMO))
    with pytest.raises(ConfigError, match="'demo' comes with raybatch"):
        prefetch("demo")
    with pytest.raises(ConfigError, match=r"model folder './nope' does not exist; pass a hub id"):
        prefetch("./nope")


@pytest.mark.parametrize("source", ["hub", "uri"])
@pytest.mark.parametrize("folder", ["file", "file/below", "s3:/bucket/model", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_reported(
    source, folder, request, tmp_path, monkeypatch
):
    value = request.getfixturevalue(source)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"--to {folder} is "):
        prefetch(MODEL if source == "hub" else value, to=Path(folder))
    assert ["file"] == [path.name for path in tmp_path.iterdir() if path.name != "cache"]


@pytest.mark.ray
def test_a_model_is_fetched_to_every_host_of_a_cluster(hub):
    with own_ray(num_cpus=1):
        output = run(MODEL, "--on-every-host")
        assert 1 == output.count(f"{MODEL} is in")
        assert "; already present" in run(MODEL, "--on-every-host")
    assert has_weights_here(MODEL)


def test_a_kill_leaves_no_part_of_a_mark(uri, tmp_path):
    """The kernel ends a process whose file grows beyond a limit, after the bytes below that."""
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from raybatch.models import prefetch\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "_, most = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8, most))\n"
        "stored = prefetch.StoreFolder(uri='s3://b/m', what='model', root='m', filesystem=None, "
        "files={})\n"
        "prefetch._claim(Path(sys.argv[1]), stored, ())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert -signal.SIGXFSZ == ended.returncode
    assert NUM_BYTES == prefetch(uri, to=tmp_path).fetched_bytes


def test_of_two_models_at_once_one_has_the_folder(uri, tmp_path, monkeypatch):
    """The mark of the other process appears after this one has checked the folder."""
    created = prefetch_module._created

    def after_another(path, text):
        path.write_text("of another model")
        return created(path, text)

    monkeypatch.setattr(prefetch_module, "_created", after_another)
    with pytest.raises(ConfigError, match="has files that differ from 'memory://bucket/model'"):
        prefetch(uri, to=tmp_path)


def test_a_process_that_fetches_the_same_model_is_no_conflict(uri, tmp_path, monkeypatch):
    """Its mark and first files appear while this process checks the folder."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    prefetch(uri, to=theirs)

    class Names(list):
        def __iter__(self):
            shutil.copytree(theirs, ours, dirs_exist_ok=True)
            return super().__iter__()

    names = prefetch_module.text_names
    monkeypatch.setattr(prefetch_module, "text_names", lambda stored: Names(names(stored)))
    assert prefetch(uri, to=ours).num_bytes == NUM_BYTES


def test_the_demo_model_has_no_revisions(tmp_path):
    with pytest.raises(ConfigError, match="'demo@main': the demo model"):
        prefetch("demo@main")
    with pytest.raises(ConfigError, match="'demo@main': the demo model"):
        resolve_config("demo@main")
