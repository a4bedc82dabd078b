"""Outputs and tables in buckets."""

import pytest

import raybatch
from raybatch_tables.address import Address
from tests.s3 import bucket, s3_endpoint
from tests.tables.support import NUM_ROWS, make_job
from tests.tiers import some

__all__ = ["bucket", "s3_endpoint"]

pytestmark = pytest.mark.usefixtures("locally")


@pytest.mark.parametrize("kind", some(["delta", "lance"]))
def test_rows_go_from_a_bucket_to_a_table_in_it_and_back(bucket, model, source, tmp_path, kind):
    table, sink = f"{kind}:s3://{bucket}/answers", f"s3://{bucket}/out"
    for _ in range(2):
        job = make_job(model, source, sink, publish=table)
        assert job.run(progress=lambda *_: None).exit_code() == 0
    assert Address.parse(table).table().open(None)[1].read_all().num_rows == NUM_ROWS
    assert raybatch.verify(sink, deep=True).notes == (f"the rows were added to {table} once",)
    report = make_job(model, table, tmp_path / "again").run(progress=lambda *_: None)
    assert report.rows_out == NUM_ROWS
