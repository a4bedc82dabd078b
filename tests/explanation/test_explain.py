"""Jobs that explain themselves without running."""

from dataclasses import replace

import pyarrow as pa
import pytest

from raybatch.config import PlanConfig
from raybatch.explanation.explain import Question, explain_run
from raybatch.explanation.outcome import RunActual
from raybatch.explanation.record import Explanation
from raybatch.job import Job
from raybatch.stages.plan.planned import PlannedRun
from tests.explanation.inputs import plan_prompts
from tests.stages.support import fake_stage, local_ray, make_tokenizer, write_parquet


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model") / "plain", has_chat_template=False)


@pytest.fixture
def explain(model, tmp_path):
    """Explains a source of some texts, with options of the plan."""

    def explain(texts, **plan):
        table = pa.table({"text": pa.array(texts, pa.string()), "n": list(range(len(texts)))})
        write_parquet(tmp_path / "in" / "a.parquet", table)
        stage = fake_stage(model, prompt="{text}", engine={"block_size_tokens": 8})
        job = Job(tmp_path / "in", tmp_path / "out", stage, plan=PlanConfig(**plan))
        return job.explain(measure=False, kv_tokens=400)

    return explain


TEXTS = ["a text that all rows have in common"] * 20


def test_a_source_without_rows_is_explained(explain):
    found = explain([])
    assert (0, (), None) == (found.profile.num_rows, found.orders, found.time)
    assert "0 in the source, 0 for the engines" in str(found)
    assert found.to_html()
    assert found == Explanation.from_mapping(found.to_mapping(), where="file")


def test_a_probe_that_has_not_run_tells_no_lengths(explain):
    assert "max_tokens" == explain(TEXTS, lengths="probe").lengths_from


@pytest.mark.ray
def test_a_large_source_is_explained_with_lengths_and_where_they_come_from(explain):
    with local_ray():
        probed = explain(TEXTS, lengths="probe", max_driver_bytes=0)
        told = explain(TEXTS, expected_tokens_column="n", max_driver_bytes=0)
    assert ("max_tokens", "column 'n'") == (probed.lengths_from, told.lengths_from)
    assert told.lengths.tokens[0] < 2 < probed.lengths.tokens[0]


def test_a_run_whose_plan_cannot_be_explained_is_reported_without_it(model, tmp_path, caplog):
    stage = fake_stage(model, prompt="{text}")
    job = PlannedRun(
        source=None,
        # the checkpoint went away while rows were generated
        config=replace(stage.config, model=str(tmp_path / "gone")),
        plan=PlanConfig(),
        sink="",
        row_id_column=None,
        run=print,
    )
    question = Question(job=job, spec=stage.pool.spec, name="in", measure=False, lint=False)
    actual = RunActual(prompt_tokens=9, computed_tokens=9)
    assert explain_run(question, plan_prompts([[1] * 9]), actual) is None
    assert "the report leaves out the plan" in caplog.text
