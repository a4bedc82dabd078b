"""A job whose driver dies during long generations resumes from their checkpointed tokens."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.actors.pool import release_pools
from raybatch.durable.journal import PLACE
from raybatch.job.job import Job
from raybatch.stages.feeder import LLMStage
from tests.job.test_resume import run_until
from tests.stages.support import write_parquet

NUM_ROWS, NUM_TOKENS = 8, 1500

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def make_job(folder, sink, model, *, step_s, executor="local"):
    write_parquet(
        folder / "in" / "0.parquet", pa.table({"text": [f"row {i}" for i in range(NUM_ROWS)]})
    )
    stage = LLMStage(
        str(model),
        prompt="{text}",
        backend={"kind": "fake", "options": {"step_s": step_s}},
        pool={"replicas": 1, "keep_tokens_every_s": 0.1, "feeder_timeout_s": 1.5},
        sampling={"max_tokens": NUM_TOKENS, "temperature": 1.0},
    )
    return Job(
        folder / "in",
        folder / sink,
        stage,
        plan={"mode": "off"},
        flush_every_s=0.2,
        executor=executor,
    )


def rows_begun(folder):
    """Return positions of the rows some of whose tokens are kept."""
    files = folder.glob("_raybatch/frag/*/begun-*.arrow")
    tables = [pa.ipc.open_file(file).read_all() for file in files]
    return {pos for table in tables for pos in table.column(PLACE).to_pylist()}


def answers(folder):
    rows = pq.read_table(folder).to_pylist()
    return {row["text"]: (row["generated_tokens"], row["finish_reason"]) for row in rows}


@pytest.mark.parametrize(
    "executor", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_tokens_begun_are_not_generated_again(model, tmp_path, executor):
    sink = tmp_path / "out"
    job = make_job(tmp_path, "out", model, step_s=0.003, executor=executor)
    run_until(job, lambda: len(rows_begun(sink)) == NUM_ROWS)
    release_pools()
    stats = []
    job = make_job(tmp_path, "out", model, step_s=0.003, executor=executor)
    report = job.run(progress=lambda pool, _: stats.append(pool))
    (replica,) = stats[-1].replicas
    assert 0 < replica.generated_tokens <= NUM_ROWS * (NUM_TOKENS - 256)
    assert (0, NUM_ROWS * NUM_TOKENS) == (report.exit_code(), report.generated_tokens)
    make_job(tmp_path, "other", model, step_s=0.0).run(progress=lambda *_: None)
    assert answers(tmp_path / "other") == answers(sink)
    assert not list(sink.glob("_raybatch/frag/*/*"))
