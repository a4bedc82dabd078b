"""Whole jobs of tasks that generate nothing: written once, resumed, proved, asked again."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raybatch
from raybatch import Job, ProcessorConfig, build_processor
from raybatch.errors import ConfigError
from raybatch.rows.schema import OutputSchema
from tests.jobs import LARGE, local_job
from tests.stages.support import fake_stage, make_tokenizer, write_parquet

NUM_ROWS = 40
LONG = [3, 17]

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pooling")
    make_tokenizer(folder / "model", has_chat_template=False)
    texts = ["x" * 60 if i in LONG else "shared " * 4 + f"t{i}" for i in range(NUM_ROWS)]
    columns = {"id": list(range(NUM_ROWS)), "query": ["q"] * NUM_ROWS, "document": texts}
    write_parquet(folder / "in" / "a.parquet", pa.table(columns))
    return folder


def make_job(folder: Path, sink: Path, task: str, **options) -> Job:
    plan = options.pop("plan", {"unit_rows": 8})
    prompt = {} if task == "score" else {"prompt": "{document}"}
    stage = fake_stage(
        folder / "model",
        task=task,
        sampling=None,
        id_column="id",
        engine={"max_model_len": 50, "block_size_tokens": 4},
        replicas=1,
        **prompt,
        **options,
    )
    columns = ["id", "document"] if task != "score" else None
    return local_job(folder / "in", sink, stage, plan=plan, columns=columns)


def rows_in(sink: Path) -> dict[int, dict]:
    return {row["id"]: row for row in pq.read_table(sink / "data").to_pylist()}


PLANS = [
    {"unit_rows": 8},
    pytest.param({"unit_rows": 8, **LARGE}, marks=[pytest.mark.ray, pytest.mark.slow]),
    "off",
]


@pytest.mark.parametrize("plan", PLANS, ids=["small", "large", "off"])
def test_every_row_has_its_vector_once_whatever_the_plan_is(folder, tmp_path, plan):
    report = make_job(folder, tmp_path / "out", "embed", plan=plan).run()
    rows = rows_in(tmp_path / "out")
    assert (report.rows_out, report.rows_failed, len(rows)) == (NUM_ROWS, len(LONG), NUM_ROWS)
    assert [i for i in sorted(rows) if rows[i]["embeddings"] is None] == LONG
    assert report.generated_tokens == 0
    assert raybatch.verify(tmp_path / "out", deep=True).is_complete


@pytest.mark.parametrize("task", ["embed", "classify", "score"])
def test_parts_have_the_columns_of_the_task(folder, tmp_path, task):
    make_job(folder, tmp_path / "out", task).run()
    names = pq.read_table(tmp_path / "out" / "data").schema.names
    assert [n for n in names if n not in ("id", "query", "document")] == OutputSchema(
        task=task
    ).arrow().names


def test_a_finished_job_asks_nothing_again(folder, tmp_path):
    make_job(folder, tmp_path / "out", "embed").run()
    before = rows_in(tmp_path / "out")
    report = make_job(folder, tmp_path / "out", "embed").run()
    assert (report.rows_out, rows_in(tmp_path / "out")) == (NUM_ROWS, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"task": "classify"}, "task is"), ({"pooling": {"dimensions": 4}}, "pooling is")],
)
def test_an_output_of_another_task_or_other_options_is_refused(folder, tmp_path, options, message):
    make_job(folder, tmp_path / "out", "embed").run()
    with pytest.raises(ConfigError, match=message):
        make_job(folder, tmp_path / "out", **({"task": "embed"} | options)).run()


def test_error_rows_are_asked_again_under_their_ids(folder, tmp_path):
    make_job(folder, tmp_path / "out", "score").run()
    job = make_job(folder, tmp_path / "out", "score", on_too_long="truncate_right")
    report = job.retry_errors(tmp_path / "new")
    rows = rows_in(tmp_path / "new")
    assert (report.rows_in, sorted(rows), report.exit_code()) == (len(LONG), LONG, 0)
    assert all(row["score"] is not None for row in rows.values())


def test_a_plan_is_explained_without_outputs(folder, tmp_path):
    text = str(make_job(folder, tmp_path / "out", "embed").explain(measure=False))
    assert ("outputs" in text, "prompts" in text) == (False, True)


@pytest.mark.parametrize(
    "options",
    [
        {"waves": [{"on": "error", "sampling": {"temperature": 1.0}}]},
        {"plan": {"lengths": "probe"}},
        {"plan": {"expected_tokens_column": "id"}},
    ],
)
def test_options_about_generated_tokens_are_refused(folder, tmp_path, options):
    stage = fake_stage(folder / "model", task="embed", sampling=None, prompt="{document}")
    with pytest.raises(ConfigError, match="generates no tokens"):
        Job(folder / "in", tmp_path / "out", stage, **options)


@pytest.mark.ray
def test_a_processor_makes_embeddings_and_takes_options_per_row(folder):
    import ray

    config = ProcessorConfig(
        model_source=str(folder / "model"), task_type="embed", backend="fake", concurrency=1
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "prompt": f"row {row['id']}",
            "pooling_params": {"dimensions": 2 + row["id"]},
        },
        postprocess=lambda row: {"id": row["id"], "size": len(row["embeddings"])},
    )
    rows = processor(ray.data.range(3)).take_all()
    assert sorted((row["id"], row["size"]) for row in rows) == [(0, 2), (1, 3), (2, 4)]
