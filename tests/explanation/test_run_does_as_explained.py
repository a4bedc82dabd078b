"""A job on the demo data saves what its explanation has said."""

import pytest
import torch

from raybatch.config import EngineConfig, PoolConfig
from raybatch.demo.run import write_dataset
from raybatch.demo.task import PROMPT
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.models.config import read_model_spec
from raybatch.models.source import resolve_model
from raybatch.records.types import Sampling
from raybatch.report import read_report
from raybatch.stages.feeder import LLMStage
from tests.jobs import local_job

pytestmark = pytest.mark.usefixtures("locally", "warm_processes")
KV_TOKENS = 4096


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_dataset(
        folder / "prompts",
        num_documents=24,
        questions_per_document=12,
        seed=0,
        num_files=2,
        include_bad_rows=True,
    )
    spec = read_model_spec(resolve_model("demo"))
    engine = EngineConfig(kv_cache_bytes=KV_TOKENS * kv_bytes_per_token(spec, torch.float32))
    stage = LLMStage(
        "demo",
        prompt=PROMPT,
        sampling=Sampling(max_tokens=16),
        engine=engine,
        pool=PoolConfig(replicas=1),
    )
    return local_job(folder / "prompts", folder / "answers", stage)


@pytest.fixture(scope="module")
def explained(job):
    return job.explain(kv_tokens=KV_TOKENS, measure=False)


@pytest.fixture(scope="module")
def report(job, explained):
    return job.run(progress=lambda stats, rows: None)


def test_the_run_saves_what_was_explained(explained, report):
    assert explained.saved_tokens > 0.5 * report.prompt_tokens
    assert explained.saved_tokens == pytest.approx(report.cached_tokens, rel=0.01)


def test_the_input_order_is_said_to_save_much_less(explained):
    assert explained.forecast("input").saved_tokens < 0.7 * explained.saved_tokens


def test_the_report_tells_plan_and_actual(explained, report):
    assert report.plan.plan.saved_tokens == explained.saved_tokens
    assert report.plan.actual.saved_tokens == report.cached_tokens
    assert not [line for line in report.plan.deviations() if "saved than planned" in line]


def test_the_page_and_the_json_lie_below_the_sink(report):
    assert report == read_report(report.sink)
    with open(f"{report.sink}/_raybatch/report.html") as file:
        assert file.read() == report.to_html()
