"""Jobs and pools that name no backend, where the engines are to have GPUs and where not."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from raybatch import Job, LLMStage
from raybatch.actors.executors.ray_hosts import host_of_engines
from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError
from raybatch.planning.store import read_plans
from raybatch.report import report_of
from tests.jobs import store_plan

pytestmark = [pytest.mark.ray]


# means GPUs, which this cluster has not
ON_GPUS = {"replicas": 1, "accelerator_type": "H100"}
# the stages of this have one pool
ON_CPUS = {"replicas": 1}


@pytest.fixture(scope="module")
def with_vllm(tmp_path_factory):
    """Options of a pool whose engines find a vLLM that cannot be imported."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('this is no vLLM')")
    return {"runtime_env": {"env_vars": {"PYTHONPATH": str(folder)}}}


def settle(spec):
    handle, choice = PoolHandle(spec).settled()
    return handle.spec, choice


def spec_of(pool=None, **engine):
    return PoolSpec(
        model="demo",
        backend=BackendConfig(),
        engine=EngineConfig(**engine),
        pool=PoolConfig(**ON_GPUS | (pool or {})),
    )


def test_engines_with_gpus_run_vllm_where_it_is_installed(cluster, with_vllm, caplog):
    caplog.set_level(logging.INFO, "raybatch")
    spec, choice = settle(spec_of(with_vllm))
    assert spec.backend == BackendConfig(kind="vllm")
    assert "GPUs and vLLM is installed there" in choice.why
    assert "using backend vllm (the engines have GPUs" in caplog.text


def test_where_no_vllm_is_the_native_engine_runs_with_a_warning(cluster, caplog):
    handle = PoolHandle(spec_of())
    assert handle.stats().num_replicas == 1
    assert handle.spec.backend.kind == "native"
    assert "the native engine is untested on GPUs" in caplog.text
    handle.shutdown()


@pytest.mark.parametrize(
    ("pool", "engine", "why"),
    [
        ({"num_gpus_per_replica": 0}, {}, "the engines have no GPU"),
        ({}, {"device": "cpu"}, "the engines have no GPU"),
        ({}, {"host_kv_bytes": 1 << 20}, "engine.host_kv_bytes is an option of this engine only"),
    ],
    ids=["no GPU asked for", "on the CPU", "an option of the backend"],
)
def test_engines_that_vllm_is_not_for_run_the_native_one(cluster, with_vllm, pool, engine, why):
    spec, choice = settle(spec_of({**with_vllm, **pool}, **engine))
    assert (spec.backend.kind, choice.why) == ("native", why)


def test_a_backend_that_is_named_is_left_alone(cluster, with_vllm):
    named = PoolSpec(
        model="demo",
        backend=BackendConfig(kind="native"),
        engine=EngineConfig(),
        pool=PoolConfig(**ON_GPUS, **with_vllm),
    )
    assert settle(named) == (named, None)


@pytest.mark.parametrize(
    ("kind", "hosts", "expected"),
    [
        ("H100", [], None),
        ("H100", [("a", {"CPU": 8}), ("b", {"GPU": 0})], None),
        ("H100", [("a", {"CPU": 8}), ("b", {"GPU": 8})], "b"),
        ("H100", [("a", {"GPU": 1}), ("b", {"GPU": 8, "accelerator_type:H100": 1})], "b"),
        (None, [("a", {"GPU": 1}), ("b", {"GPU": 8, "accelerator_type:H100": 1})], "a"),
    ],
)
def test_a_host_with_the_gpus_of_the_engines_is_asked(kind, hosts, expected):
    nodes = [{"NodeID": name, "Alive": True, "Resources": has} for name, has in hosts]
    gone = {
        "NodeID": "gone",
        "Alive": False,
        "Resources": {"GPU": 8, f"accelerator_type:{kind}": 1},
    }
    assert host_of_engines(PoolConfig(accelerator_type=kind), [gone, *nodes]) == expected


def test_a_host_that_cannot_say_what_it_has_is_told_with_the_way_out(cluster):
    spec = spec_of({"runtime_env": {"working_dir": "file:///no/such/folder.zip"}})
    with pytest.raises(ConfigError, match=r"set backend to 'vllm' or 'native'"):
        settle(spec)


@pytest.fixture
def gpus_here(with_vllm, monkeypatch):
    """Let this host have two GPUs, and a vLLM that cannot be imported."""
    (folder,) = with_vllm["runtime_env"]["env_vars"].values()

    def have(*, vllm):
        monkeypatch.setattr("raybatch.actors.executors.local_pools.gpus_of_host", lambda: 2)
        if vllm:
            monkeypatch.syspath_prepend(folder)

    return have


@pytest.mark.parametrize(
    ("device", "vllm", "expected"),
    [("auto", True, "vllm"), ("auto", False, "native"), ("cpu", True, "native")],
)
def test_engines_without_ray_have_the_gpus_of_this_host(gpus_here, device, vllm, expected):
    gpus_here(vllm=vllm)
    handle, _ = PoolHandle(
        spec_of({"accelerator_type": None}, device=device), is_local=True
    ).settled()
    assert (handle.spec.backend.kind, handle.is_local) == (expected, True)


def test_a_job_goes_on_with_the_backend_that_it_was_begun_with(gpus_here, tmp_path):
    source, sink = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(pa.table({"text": ["a", "b"]}), source)

    def job(sink):
        stage = LLMStage("demo", prompt="{text}", sampling={"max_tokens": 2}, pool=ON_CPUS)
        return Job(source, sink, stage, executor="local")

    report = job(sink).run()
    assert report.rows_failed == 0
    assert (report.backend, report.backend_reason) == ("native", "the engines have no GPU")
    assert "backend: native (the engines have no GPU)" in str(report).splitlines()
    (stored,) = read_plans(str(sink))
    assert json.loads(stored.fingerprint["backend"]) == {"kind": "native", "options": {}}
    found = report_of(str(sink))
    assert (found.backend, found.backend_reason) == (report.backend, report.backend_reason)

    gpus_here(vllm=True)
    again = job(sink).explain(measure=False)
    assert again.backend == "native"
    assert again.backend_reason == "earlier rows of this output used it"
    # another backend would be another job
    assert job(sink).run().rows_out == 2
    other = job(tmp_path / "other").explain(measure=False)
    assert other.backend == "vllm"
    assert "vllm (the engines have GPUs and vLLM is installed there)" in str(other)


def test_an_output_without_an_answer_holds_no_job_to_a_backend(gpus_here, tmp_path):
    source, sink = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(pa.table({"text": ["a", "b"]}), source)
    job = Job(source, sink, LLMStage("demo", prompt="{text}", backend="native"), executor="local")
    store_plan(job)
    gpus_here(vllm=True)
    undecided = Job(source, sink, LLMStage("demo", prompt="{text}"), executor="local")
    assert undecided.explain(measure=False).backend == "vllm"


def test_a_job_on_a_cluster_settles_its_backend(cluster, with_vllm, tmp_path):
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), source)
    stage = LLMStage("demo", prompt="{text}", pool=ON_GPUS | with_vllm)
    assert Job(source, tmp_path / "out", stage).explain(measure=False).backend == "vllm"


def test_a_pipeline_settles_the_backend_of_its_feeders(cluster):
    stage = LLMStage("demo", prompt="{text}", sampling={"max_tokens": 2}, pool=ON_CPUS)
    rows = stage.apply(ray.data.from_items([{"text": "a"}])).take_all()
    assert rows[0]["__inference_error__"] == ""
    assert stage.pool.spec.backend.kind == "native"
