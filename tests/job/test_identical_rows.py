"""Identical greedy rows of a whole job are generated once, on either executor."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.job.job import Job
from raybatch.stages.feeder import LLMStage
from tests.stages.support import write_parquet

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def generations(folder, model, texts, *, executor="local", **options):
    """Run a job and return how many sequences its engines finished, its answers and receipt."""
    write_parquet(folder / "in" / "0.parquet", pa.table({"text": texts}))
    log = folder / "finished"
    fake = {"step_s": 0.0, "finished_log": str(log)}
    stage = LLMStage(
        str(model),
        prompt="{text}",
        backend={"kind": "fake", "options": fake},
        pool={"replicas": 2},
        sampling={"max_tokens": 4},
        **options,
    )
    plan = {"unit_rows": 64, "max_unit_rows": 128}
    report = Job(folder / "in", folder / "out", stage, plan=plan, executor=executor).run()
    return log.stat().st_size, pq.read_table(folder / "out").to_pylist(), report


@pytest.mark.parametrize(
    "executor", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_identical_rows_of_many_units_are_generated_once(model, tmp_path, executor):
    texts = ["the same text"] * 2000
    num_generated, rows, _ = generations(tmp_path, model, texts, executor=executor)
    assert (1, 2000) == (num_generated, len(rows))
    assert len({tuple(row["generated_tokens"]) for row in rows}) == 1
    cached = [row["num_cached_tokens"] == row["num_input_tokens"] for row in rows]
    assert cached.count(False) == 1


def test_without_dedup_each_row_is_generated(model, tmp_path):
    num_generated, _, _ = generations(tmp_path, model, ["the same text"] * 200, dedup=False)
    assert num_generated == 200
