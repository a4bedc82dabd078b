"""The facts that decide where a job runs, as this process finds them."""

import pyarrow as pa
import pytest

from raybatch.actors.executors import local_pools
from raybatch.backends.registry import type_of
from raybatch.config import BackendConfig, PlanConfig
from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.job.executor import choose, stage_of_executor
from raybatch.stages.feeder import LLMStage
from tests.stages.support import fake_stage, write_parquet


@pytest.fixture
def source(tmp_path):
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": ["a"] * 300}))
    return scan_source(str(tmp_path / "in"))


def spec_of(model, **options):
    return fake_stage(model, prompt="{text}", **options).pool.spec


def test_an_address_in_the_environment_names_a_cluster(model, source, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    executor = choose("auto", spec_of(model), source, PlanConfig())
    assert (executor.is_local, executor.reason) == (False, "a Ray cluster is connected")


def test_a_job_that_is_to_run_locally_has_the_engines_that_it_asks_for(model, source):
    executor = choose("local", spec_of(model, replicas=3), source, PlanConfig())
    assert (executor.is_local, executor.num_engines) == (True, 3)


def test_engines_follow_from_rows_and_cores_where_none_are_asked_for(model, source, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    executor = choose("local", spec_of(model, replicas=None), source, PlanConfig())
    assert executor.num_engines == 2


def test_engines_whose_number_may_change_are_not_fixed_by_the_rows(model, source):
    pool = {"min_replicas": 1, "max_replicas": 3}
    stage = LLMStage(str(model), backend={"kind": "fake"}, pool=pool, prompt="{text}")
    executor = choose("local", stage.pool.spec, source, PlanConfig())
    assert executor.num_engines == 3
    assert stage_of_executor(stage, executor, ()).pool.spec == stage.pool.spec


def test_engines_on_gpus_are_not_several_without_ray(model, source, monkeypatch, tmp_path):
    for number in range(2):
        (tmp_path / "gpus" / f"{number}").mkdir(parents=True)
    monkeypatch.setattr(local_pools, "_GPUS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = spec_of(model, replicas=2)
    on_gpus = type(spec)(
        model=spec.model, backend=BackendConfig(), engine=spec.engine, pool=spec.pool
    )
    with pytest.raises(ConfigError, match=r"pool\.replicas=2 on GPUs needs Ray"):
        choose("local", on_gpus, source, PlanConfig())


@pytest.mark.parametrize(
    ("backend", "is_so"),
    [
        (BackendConfig(), True),
        (BackendConfig(kind="transformers"), True),
        (BackendConfig(kind="fake"), False),
        (BackendConfig(kind="fake", options={"crash_on": 0}), True),
        (BackendConfig(kind="fake", options={"crashes": True}), True),
        (BackendConfig(kind="openai", options={"base_url": "http://127.0.0.1:9"}), False),
    ],
)
def test_what_computes_or_may_crash_has_a_process_of_its_own(backend, is_so):
    assert type_of(backend).may_end_process(backend) == is_so
