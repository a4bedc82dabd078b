"""A job from a bucket to a bucket, stopped half way and run again."""

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.durable.storage import open_store
from raybatch.job.job import Job
from raybatch.outputs.verify import verify
from tests.clusters import own_ray
from tests.jobs import Hold, local_job, press_ctrl_c
from tests.s3 import bucket, s3_endpoint
from tests.stages.support import fake_stage, make_tokenizer

__all__ = ["bucket", "s3_endpoint"]

NUM_ROWS = 96

pytestmark = pytest.mark.usefixtures("locally")


@pytest.fixture
def cluster(s3_endpoint):
    """A cluster that begins after the endpoint: its processes inherit where that is."""
    with own_ray():
        yield


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_job_on_s3_goes_on_where_it_stopped(bucket, tmp_path):
    model = make_tokenizer(tmp_path / "plain", has_chat_template=False)
    table = pa.table(
        {"text": [f"question {i}" for i in range(NUM_ROWS)], "number": range(NUM_ROWS)}
    )
    with fsspec.open(f"s3://{bucket}/in/a.parquet", "wb") as file:
        pq.write_table(table, file)
    sink = f"s3://{bucket}/out"
    store = open_store(sink)

    hold = Hold(tmp_path, NUM_ROWS - 8)

    def make_job():
        fake = {"max_num_seqs": 8, **hold.options}
        stage = fake_stage(model, prompt="{text}", replicas=1, fake=fake)
        plan = {"unit_rows": 8, "max_unit_rows": 8}
        return Job(f"s3://{bucket}/in", sink, stage, plan=plan)

    interrupts = iter([press_ctrl_c])

    def interrupt(stats, num_rows):
        if len(store.names("data")) >= 2:
            next(interrupts, lambda: None)()

    with pytest.raises(KeyboardInterrupt):
        make_job().run(progress=interrupt)
    before = {name: store.read(name) for name in store.names("data")}
    assert 2 <= len(before) < NUM_ROWS // 8
    hold.release()
    report = make_job().run(progress=lambda *_: None)
    assert (NUM_ROWS, 0, 0, 0) == (
        report.rows_out,
        report.rows_lost,
        report.rows_duplicated,
        report.exit_code(),
    )
    assert report.rows_resumed >= 8 * len(before)
    assert before == {name: store.read(name) for name in before}
    tables = [pq.read_table(pa.BufferReader(store.read(name))) for name in store.names("data")]
    numbers = pa.concat_tables(tables).column("number").to_pylist()
    assert list(range(NUM_ROWS)) == sorted(numbers)
    assert store.size("_SUCCESS")


def test_a_finished_job_on_s3_is_told_from_its_report(bucket, tmp_path):
    model = make_tokenizer(tmp_path / "plain", has_chat_template=False)
    with fsspec.open(f"s3://{bucket}/in/a.parquet", "wb") as file:
        pq.write_table(pa.table({"text": ["one", "two"]}), file)
    job = local_job(f"s3://{bucket}/in", f"s3://{bucket}/out", fake_stage(model, prompt="{text}"))
    first = job.run(progress=lambda *_: None)
    assert first == job.run(progress=lambda *_: None)


def test_a_job_on_s3_comes_into_the_order_of_its_input(bucket, tmp_path):
    model = make_tokenizer(tmp_path / "plain", has_chat_template=False)
    texts = [f"document {i % 5} " * 12 + f"question {i}" for i in range(40)]
    with fsspec.open(f"s3://{bucket}/in/a.parquet", "wb") as file:
        pq.write_table(pa.table({"text": texts}), file)
    sink = f"s3://{bucket}/out"
    stage = fake_stage(model, prompt="{text}", engine={"block_size_tokens": 8}, replicas=1)
    options = {"plan": {"unit_rows": 8}, "output_order": "input"}
    job = local_job(f"s3://{bucket}/in", sink, stage, **options)
    assert 0 == job.run(progress=lambda *_: None).exit_code()
    store = open_store(sink)
    tables = [pq.read_table(pa.BufferReader(store.read(name))) for name in store.names("data")]
    assert texts == pa.concat_tables(tables).column("text").to_pylist()
    assert verify(sink, deep=True).is_complete
    assert 0 == job.run(progress=lambda *_: None).exit_code()
