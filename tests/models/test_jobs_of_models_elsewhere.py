"""Jobs whose model lies elsewhere: only engines fetch its weights, and its plan names them."""

import json

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.models.identity import model_fingerprint
from tests.models.fake_hub import MODEL
from tests.models.test_hub import DEMO, demo_files, hub, weights_asked_for

__all__ = ["hub"]

pytestmark = [pytest.mark.fetch, pytest.mark.usefixtures("locally", "own_cache")]

NUM_ROWS = 24


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def job_of(tmp_path):
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": [f"Question {i}:" for i in range(NUM_ROWS)]}), source)

    def make(model: str, *, max_tokens: int = 2, **options: object) -> Job:
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        stage = {"model": model, "prompt": "{text}", "sampling": sampling}
        return Job.from_mapping(
            {
                "source": str(source),
                "sink": str(tmp_path / "out"),
                "executor": "local",
                "plan": {"unit_rows": 4, "max_unit_rows": 4},
                "stage": {**stage, "pool": {"replicas": 1}, "engine": {"max_num_seqs": 2}},
                **options,
            }
        )

    return make


@pytest.fixture
def patterns(monkeypatch) -> set[str]:
    """What this process asks the hub's client for."""
    asked, download = set[str](), huggingface_hub.snapshot_download

    def noted(*args, allow_patterns, **options):
        asked.update(allow_patterns)
        return download(*args, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", noted)
    return asked


def test_only_the_engine_fetches_weights(hub, job_of, patterns):
    explanation = job_of(MODEL).explain()
    assert "raybatch fetch org/model" in str(explanation)
    assert [] == weights_asked_for(hub)
    report = job_of(MODEL).run(progress=lambda *_: None)
    assert (NUM_ROWS, 0) == (report.rows_out, report.rows_lost)
    assert f"{MODEL}@{hub.main}" == report.model
    assert "*.json" in patterns
    assert "*.safetensors" not in patterns
    assert [] != weights_asked_for(hub)


def test_an_output_goes_on_with_the_commit_that_it_was_begun_with(hub, job_of, tmp_path):
    begun = hub.main
    first = job_of(MODEL, max_tokens=40).run(progress=lambda *_: None, ending=lambda: "enough")
    assert 0 < first.rows_todo < NUM_ROWS
    hub.commit({**demo_files(), "README.md": b"new"})
    with pytest.raises(ConfigError, match=rf"model.weights is .commit {hub.main}. and was"):
        job_of(f"{MODEL}@main", max_tokens=40).run(progress=lambda *_: None)
    report = job_of(MODEL, max_tokens=40).run(progress=lambda *_: None)
    assert (NUM_ROWS, 0) == (report.rows_out, report.rows_todo)
    assert f"{MODEL}@{begun}" == report.model


def test_an_output_that_names_the_bytes_of_its_model_is_compared_with_those(hub, job_of, tmp_path):
    """As earlier versions did for every model."""
    job_of(str(DEMO), max_tokens=40).run(progress=lambda *_: None, ending=lambda: "enough")
    report = job_of(MODEL, max_tokens=40).run(progress=lambda *_: None)
    assert (NUM_ROWS, 0) == (report.rows_out, report.rows_todo)
    config = json.loads(demo_files()["config.json"])
    hub.commit({**demo_files(), "config.json": json.dumps({**config, "rms_norm_eps": 1}).encode()})
    was = model_fingerprint(DEMO)
    with pytest.raises(ConfigError, match=rf"model.weights is \S+ and was \S{was}"):
        job_of(MODEL, max_tokens=40).run(progress=lambda *_: None)
