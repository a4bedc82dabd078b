"""Jobs with a remote model: only engines fetch its weights, and its plan names them."""

import json

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.models.checkpoint import model_fingerprint
from raybatch.planning import fingerprint
from raybatch.planning.fingerprint import comparable
from raybatch.report import RunReport
from tests.models.fake_hub import MODEL
from tests.models.test_hub import DEMO, demo_files, hub, weights_asked_for

__all__ = ["hub"]

pytestmark = [pytest.mark.fetch, pytest.mark.usefixtures("locally", "own_cache", "warm_processes")]

NUM_ROWS = 24


@pytest.fixture
def job_of(tmp_path):
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": [f"Question {i}:" for i in range(NUM_ROWS)]}), source)

    def make(model: str) -> Job:
        return Job.from_mapping(
            {
                "source": str(source),
                "sink": str(tmp_path / "out"),
                "executor": "local",
                "stage": {
                    "model": model,
                    "prompt": "{text}",
                    "sampling": {"max_tokens": 2},
                    "pool": {"replicas": 1},
                },
            }
        )

    return make


@pytest.fixture
def patterns(monkeypatch) -> set[str]:
    """File patterns that this process requests from the hub's client."""
    requested, download = set[str](), huggingface_hub.snapshot_download

    def noted(*args, allow_patterns, **options):
        requested.update(allow_patterns)
        return download(*args, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", noted)
    return requested


def run(job: Job) -> RunReport:
    return job.run(progress=lambda *_: None)


def test_only_the_engine_fetches_weights(hub, job_of, patterns):
    explanation = job_of(MODEL).explain()
    assert "raybatch fetch org/model" in str(explanation)
    assert [] == weights_asked_for(hub)
    report = run(job_of(MODEL))
    assert (NUM_ROWS, 0) == (report.rows_out, report.rows_lost)
    assert f"{MODEL}@{hub.main}" == report.model
    assert "*.json" in patterns
    assert "*.safetensors" not in patterns
    assert [] != weights_asked_for(hub)


def test_an_output_continues_with_the_commit_that_it_began_with(hub, job_of):
    begun = hub.main
    run(job_of(MODEL))
    hub.commit({**demo_files(), "README.md": b"new"})
    with pytest.raises(ConfigError, match=rf"model.weights is .commit {hub.main}. and was"):
        run(job_of(f"{MODEL}@main"))
    # it compares although nothing is left to do
    assert f"{MODEL}@{begun}" == run(job_of(MODEL)).model


def test_an_output_with_the_digest_of_its_model_is_compared_with_it(hub, job_of):
    """Earlier versions wrote it for every model."""
    run(job_of(str(DEMO)))
    assert NUM_ROWS == run(job_of(MODEL)).rows_out
    config = json.loads(demo_files()["config.json"])
    hub.commit({**demo_files(), "config.json": json.dumps({**config, "rms_norm_eps": 1}).encode()})
    was = model_fingerprint(DEMO)
    with pytest.raises(ConfigError, match=rf"model.weights is \S+ and was \S{was}"):
        run(job_of(MODEL))


def test_the_model_is_read_once_for_all_plans_that_know_its_bytes(hub, job_of, monkeypatch):
    read = []
    monkeypatch.setattr(fingerprint, "model_fingerprint", lambda path: read.append(path) or "0f")
    now, by_bytes = {"model.weights": f'"commit {hub.main}"'}, {"model.weights": '"0f"'}
    found = comparable(now, [by_bytes, now, by_bytes], job_of(MODEL).config.stage)
    assert [by_bytes, now, by_bytes] == found
    assert 1 == len(read)
