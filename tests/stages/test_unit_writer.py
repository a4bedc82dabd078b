"""Rows of every type are kept and written in order, whatever order they were finished in."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.durable.journal import POS, ROW
from raybatch.durable.storage import store_of
from raybatch.planning.shards import stretches
from raybatch.planning.store import write_plan
from raybatch.rows.batches import as_movable
from raybatch.stages.unit_writer import UnitWriter
from tests.report.test_recorder import stored_plan

SCHEMA = pa.schema(
    [("lang", pa.string()), ("view", pa.string_view()), ("blobs", pa.list_(pa.binary_view()))],
    metadata={"owner": "user"},
)
ROWS = [{"lang": f"l{i % 2}", "view": f"text {i}", "blobs": [b"%d" % i, None]} for i in range(6)]
BACKWARDS = [4, 5, 2, 3, 0, 1]


def make_writer(sink, *, partition_by=()):
    units = stretches("plan-a", np.array([len(ROWS)]))
    stored = stored_plan(
        hash=units.hash, num_rows=units.num_rows, num_units=1, partition_by=partition_by
    )
    write_plan(str(sink), stored, units)
    return UnitWriter(
        sink=str(sink),
        store=store_of(str(sink)),
        stored=stored,
        schema=SCHEMA,
        output=None,
        attempt="test",
    )


def finished(rows):
    """Return rows as feeders finish them."""
    table = pa.Table.from_pylist([ROWS[row] for row in rows], schema=SCHEMA)
    places = pa.array(rows, pa.int64())
    return as_movable(table).append_column(POS, places).append_column(ROW, places)


def test_views_that_were_finished_in_another_order_are_written_in_order(tmp_path):
    writer = make_writer(tmp_path)
    writer.deliver(0, writer.joined([finished(BACKWARDS[:4]), finished(BACKWARDS[4:])]))
    part = pq.read_table(tmp_path / "data" / "part-000000.parquet")
    assert part.select(SCHEMA.names).to_pylist() == ROWS


def test_a_part_has_the_types_of_the_output(tmp_path):
    writer = make_writer(tmp_path)
    writer.deliver(0, writer.joined([finished(BACKWARDS)]))
    part = pq.ParquetFile(tmp_path / "data" / "part-000000.parquet")
    expected = pa.BufferOutputStream()
    pq.write_table(SCHEMA.empty_table(), expected)
    assert part.schema_arrow.equals(
        pq.ParquetFile(expected.getvalue()).schema_arrow, check_metadata=True
    )


def test_views_in_the_journal_are_read_back(tmp_path):
    writer = make_writer(tmp_path)
    assert writer.deliver(0, writer.joined([finished([4, 1])])) is None
    known = writer.journal_of(0)
    assert [ROWS[1], ROWS[4]] == known.select(SCHEMA.names).to_pylist()
    assert writer.deliver(0, writer.joined([known, finished([5, 3, 2, 0])])).won
    assert ROWS == pq.read_table(tmp_path / "data" / "part-000000.parquet").to_pylist()


@pytest.mark.parametrize("lang", ["l0", "l1"])
def test_views_are_written_into_folders(tmp_path, lang):
    writer = make_writer(tmp_path, partition_by=("lang",))
    writer.deliver(0, writer.joined([finished(BACKWARDS)]))
    part = pq.ParquetFile(tmp_path / "data" / f"lang={lang}" / "part-000000.parquet").read()
    texts = [row["view"] for row in ROWS if row["lang"] == lang]
    assert (["view", "blobs"], texts) == (part.column_names, part.column("view").to_pylist())
