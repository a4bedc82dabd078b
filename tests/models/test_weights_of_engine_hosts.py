"""A folder with weights only on the hosts of engines: elsewhere it has config and tokenizer.

A folder below "~" is a different one for engines, which have another HOME.
"""

import json
import logging
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.cluster_utils import Cluster

from raybatch.actors.executors.ray_hosts import _places
from raybatch.actors.replicas.placement import Placement
from raybatch.config import PoolConfig, cache_dir
from raybatch.errors import ConfigError, ReplicaError
from raybatch.job.job import Job
from raybatch.models.checkpoint import is_without_weights, model_fingerprint
from raybatch.models.source import (
    lacks_weights,
    model_identity,
    pinned_to,
    resolve_config,
    resolve_model,
)
from raybatch.planning.store import read_plan
from tests.clusters import end_ray, make_data_context, own_ray
from tests.models.test_hub import DEMO

pytestmark = pytest.mark.fetch

WEIGHTS = "model.safetensors"
DIGEST = model_fingerprint(DEMO)
# of Ray
TOKEN = Path.home() / ".ray" / "auth_token"


def copy_to(home: Path, *, with_weights: bool) -> Path:
    folder = shutil.copytree(DEMO, home / "model")
    if not with_weights:
        (folder / WEIGHTS).unlink()
    # all processes of a cluster have one; this process keeps that of earlier clusters
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(TOKEN.read_text() if TOKEN.exists() else "0f" * 32)
    return folder


def zero_weights(folder: Path) -> None:
    """Turn a model into another one with the same shapes."""
    data = (folder / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    (folder / WEIGHTS).write_bytes(data[:start] + bytes(len(data) - start))


@pytest.fixture
def bare(tmp_path) -> Path:
    return copy_to(tmp_path, with_weights=False)


@pytest.fixture
def full(tmp_path) -> Path:
    return copy_to(tmp_path / "full", with_weights=True)


def job_of(
    place: Path,
    model: object,
    *,
    executor: str = "local",
    pool=(),
    engine=(),
    num_rows: int = 4,
    **options: object,
):
    (place / "in").mkdir(exist_ok=True)
    source = place / "in" / "a.parquet"
    if not source.exists():
        pq.write_table(pa.table({"text": [f"Question {i}:" for i in range(num_rows)]}), source)
    stage = {
        "model": str(model),
        "backend": "native",
        "prompt": "{text}",
        "sampling": {"max_tokens": 2},
        "pool": {"replicas": 1, **dict(pool)},
        "engine": dict(engine),
    }
    places = {"source": str(place / "in"), "sink": str(place / "out")}
    return Job.from_mapping({**places, "executor": executor, "stage": stage, **options})


def run(job: Job):
    return job.run(progress=lambda *_: None)


def test_a_folder_may_have_only_config_and_tokenizer(bare):
    assert lacks_weights(str(bare))
    assert bare == resolve_config(str(bare))
    with pytest.raises(ConfigError, match=r"has no \*.safetensors file"):
        resolve_model(str(bare))


def test_a_folder_without_a_config_is_not_searched_for_weights(bare):
    (bare / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_config(str(bare))


def test_a_folder_with_a_part_of_the_weights_is_refused(bare):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (bare / "model.safetensors.index.json").write_text(json.dumps(index))
    assert lacks_weights(str(bare))
    shutil.copy(DEMO / WEIGHTS, bare / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"refers to model-2.safetensors, which is missing"):
        resolve_config(str(bare))


def test_a_folder_without_a_config_or_with_pickles_is_refused(bare):
    (bare / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="only pickled weights"):
        resolve_config(str(bare))
    (bare / "pytorch_model.bin").unlink()
    (bare / "config.json").unlink()
    assert not is_without_weights(bare)


def test_engines_take_the_weights_of_the_job_and_no_others(full):
    assert full == resolve_model(pinned_to(str(full), DIGEST))
    zero_weights(full)
    found = model_fingerprint(full)
    message = rf"{full}. on host {socket.gethostname()} have .* {found}, .* started with {DIGEST}"
    with pytest.raises(ConfigError, match=message):
        resolve_model(pinned_to(str(full), DIGEST))


def test_a_folder_is_pinned_to_the_digest_that_a_driver_with_weights_finds(bare, full):
    assert model_identity(str(full), full) == model_identity(pinned_to(str(bare), DIGEST), bare)


@pytest.mark.usefixtures("locally")
def test_explain_needs_no_weights(bare, tmp_path):
    found = str(job_of(tmp_path, bare).explain())
    assert "4 in the source" in found
    assert f"has no weights on host {socket.gethostname()}" in found


def test_engines_of_this_host_need_weights_here(bare, tmp_path):
    job = job_of(tmp_path, bare, overwrite=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.parquet").touch()
    with pytest.raises(ConfigError, match=r"no \*.safetensors file, but engines run on this host"):
        run(job)
    with pytest.raises(ConfigError, match=r"no \*.safetensors file, but engines run on this host"):
        job.preview(1)
    assert (tmp_path / "out" / "old.parquet").exists()


def node(name: str, *, is_alive: bool = True, **resources: float) -> dict[str, object]:
    return {"NodeID": name * 28, "Alive": is_alive, "Resources": resources}


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ({}, ["bb", "dd"]),
        ({"accelerator_type": "L4"}, ["dd"]),
        ({"resources": {"disk": 1}}, ["bb"]),
    ],
)
def test_hosts_where_an_engine_fits_are_queried(pool, expected):
    nodes = [
        node("aa", CPU=8),
        node("bb", CPU=8, GPU=1, disk=1),
        node("cc", CPU=8, GPU=1, is_alive=False),
        node("dd", CPU=8, GPU=2, **{"accelerator_type:L4": 1}),
    ]
    plan = Placement(num_replicas=2, num_cpus=1, num_gpus=1, num_engines_on_host=1)
    found = _places(plan, PoolConfig(**pool), nodes)
    assert [name * 28 for name in expected] == [w["scheduling_strategy"].node_id for w in found]
    # resources of engines of other jobs do not matter
    assert {0} == {where["num_cpus"] for where in found}


def test_without_a_fitting_host_one_is_requested_as_by_an_engine(caplog):
    caplog.set_level(logging.INFO, "raybatch")
    bundles = ({"CPU": 1, "GPU": 1}, {"GPU": 1})
    plan = Placement(num_replicas=1, num_cpus=1, num_gpus=2, num_engines_on_host=1, bundles=bundles)
    (where,) = _places(plan, PoolConfig(accelerator_type="L4"), [node("aa", CPU=8)])
    assert (0, 1, "L4") == (where["num_cpus"], where["num_gpus"], where["accelerator_type"])
    assert "waiting for a host" in caplog.text


@contextmanager
def at_home(folder: Path):
    """Give child processes another HOME, except for caches of engines below it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(cache_dir()))
        patch.setenv("HOME", str(folder))
        yield patch


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder and report of a job with weights only on the hosts of engines."""
    place = tmp_path_factory.mktemp("hosts")
    here, there = place / "driver", place / "engines"
    copy_to(here, with_weights=False)
    copy_to(there, with_weights=True)
    with at_home(here):
        pool = {"runtime_env": {"env_vars": {"HOME": str(there)}}}
        with own_ray():
            yield place, run(job_of(place, "~/model", executor="ray", pool=pool))


@pytest.mark.ray
class TestOnRay:
    def test_an_engine_s_host_names_the_weights(self, begun):
        place, report = begun
        assert (4, 0, 0) == (report.rows_out, report.rows_lost, report.rows_failed)
        plan = read_plan(str(place / "out"))
        assert f'"{DIGEST}"' == plan.fingerprint["model.weights"]

    def test_a_driver_that_has_the_weights_continues(self, begun, monkeypatch):
        place, _ = begun
        monkeypatch.setenv("HOME", str(place / "engines"))
        assert 4 == run(job_of(place, "~/model")).rows_out

    def test_without_weights_on_any_host_each_one_reports_it(self, begun, tmp_path):
        message = rf"host {socket.gethostname()}: \S*/driver/model has no \*.safetensors file"
        with pytest.raises(ConfigError, match=message):
            run(job_of(tmp_path, "~/model", executor="ray"))

    @pytest.mark.slow
    def test_engines_with_other_weights_are_refused_on_resume(self, begun, tmp_path):
        place, _ = begun
        folder = copy_to(tmp_path, with_weights=True)
        zero_weights(folder)
        pq.write_table(pa.table({"text": ["one more"]}), place / "in" / "b.parquet")
        pool = {"runtime_env": {"env_vars": {"HOME": str(tmp_path)}}}
        job = job_of(place, "~/model", executor="ray", pool=pool, extend=True)
        message = f"have the digest {model_fingerprint(folder)}, but this job started with {DIGEST}"
        with pytest.raises(ReplicaError, match=message):
            run(job)


@pytest.fixture
def two_hosts(tmp_path):
    """A driver without weights, and two hosts of engines with different weights."""
    end_ray()
    copy_to(tmp_path / "driver", with_weights=False)
    with at_home(tmp_path / "driver") as patch:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        for name in ("one", "other"):
            copy_to(tmp_path / name, with_weights=True)
            patch.setenv("HOME", str(tmp_path / name))
            cluster.add_node(num_cpus=1, resources={"disk": 1}, object_store_memory=100 << 20)
        zero_weights(tmp_path / "other" / "model")
        patch.setenv("HOME", str(tmp_path / "driver"))
        make_data_context()
        ray.init(address=cluster.address, log_to_driver=False)
        yield tmp_path
        end_ray()
        cluster.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.autoscale
def test_if_hosts_differ_those_equal_to_the_first_one_count(two_hosts):
    options = {"num_rows": 128, "engine": {"max_num_seqs": 2}}
    plan = {"unit_rows": 8, "max_unit_rows": 8}
    pool = {"replicas": 2, "resources": {"disk": 1}}
    report = run(job_of(two_hosts, "~/model", executor="ray", pool=pool, plan=plan, **options))
    assert (128, 0, 0) == (report.rows_out, report.rows_lost, report.rows_failed)
    digest = json.loads(read_plan(str(two_hosts / "out")).fingerprint["model.weights"])
    folders = {model_fingerprint(two_hosts / n / "model"): n for n in ("one", "other")}
    alone = two_hosts / "alone"
    alone.mkdir()
    run(job_of(alone, two_hosts / folders[digest] / "model", **options))
    columns = ["text", "generated_text"]
    found, expected = (
        pq.read_table(place / "out", columns=columns).sort_by("text")
        for place in (two_hosts, alone)
    )
    assert expected == found
