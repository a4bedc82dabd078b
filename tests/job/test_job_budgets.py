"""Jobs refuse memory in which their model cannot run before anything is planned."""

import pyarrow as pa
import pytest

from raybatch.errors import CapacityError, ConfigError
from raybatch.job.job import Job
from raybatch.models.source import resolve_model
from raybatch.stages.feeder import LLMStage
from tests.stages.support import fake_stage, write_parquet

WRONG = [
    ({"kv_cache_bytes": 1}, CapacityError, "the KV cache has 1 bytes, but one block of 64 tokens"),
    ({"host_kv_bytes": 1}, ConfigError, r"engine\.host_kv_bytes is 1, but one block of 64 tokens"),
    ({"device_weight_bytes": 10}, ConfigError, r"engine\.device_weight_bytes is 10"),
]


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """Makes a job of the demo model; it may not plan, nor start anything."""

    def may_not(*args, **options):
        raise AssertionError("the job was planned")

    monkeypatch.setattr("raybatch.job.job.run_spec", may_not)
    monkeypatch.setattr("raybatch.job.job.JobExecution", may_not)
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": ["a", "b"]}))

    def make(model="demo", **engine):
        stage = LLMStage(model, prompt="{text}", engine=engine)
        return Job(tmp_path / "in", tmp_path / "out", stage)

    return make


@pytest.mark.parametrize(("engine", "kind", "message"), WRONG)
@pytest.mark.parametrize("call", ["run", "explain"])
def test_memory_in_which_a_model_cannot_run_is_refused_before_a_plan(
    job_of, tmp_path, call, engine, kind, message
):
    with pytest.raises(kind, match=message) as caught:
        getattr(job_of(**engine), call)()
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_memory_for_a_model_behind_a_uri_is_checked_as_well(job_of):
    with pytest.raises(CapacityError, match="one block of 64 tokens"):
        job_of(f"file://{resolve_model('demo')}", kv_cache_bytes=1).explain()


@pytest.mark.parametrize("engine", [{"kv_cache_bytes": 1 << 24}, {"host_kv_bytes": 0}, {}])
def test_memory_that_will_do_is_planned(job_of, engine):
    with pytest.raises(AssertionError, match="the job was planned"):
        job_of(**engine).explain()


def test_engines_without_a_model_need_no_memory(job_of, model, tmp_path):
    job_of()
    stage = fake_stage(model, prompt="{text}", engine={"kv_cache_bytes": 1})
    with pytest.raises(AssertionError, match="the job was planned"):
        Job(tmp_path / "in", tmp_path / "out", stage).explain()
