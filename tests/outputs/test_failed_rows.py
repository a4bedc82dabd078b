"""The error rows of a finished output are a source, with their ids and the user's columns."""

from dataclasses import replace

import pyarrow as pa
import pytest

from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError
from raybatch.outputs.failed_rows import ERROR_STATUSES, failed_rows
from raybatch.rows.schema import OutputSchema
from tests.outputs.support import OUTPUT, make_complete, make_sink, write_unit


@pytest.fixture
def sink(tmp_path):
    return str(tmp_path / "out")


def rows_of(source):
    return [
        row for task in source.tasks() for table in source.read(task) for row in table.to_pylist()
    ]


def choose(sink, *statuses, output=OUTPUT, id_column="row_id"):
    return failed_rows(sink, output, id_column=id_column, statuses=statuses or ERROR_STATUSES)


def test_error_rows_come_with_their_ids_and_without_answers(sink):
    make_complete(sink)
    found = choose(sink)
    expected = [{"text": "t1", "row_id": "a.parquet:1"}, {"text": "t6", "row_id": "a.parquet:6"}]
    assert (expected, 2) == (rows_of(found), found.num_rows)


def test_error_rows_of_views_are_read(sink):
    make_complete(sink)
    found = choose(sink)
    views = pa.schema([("text", pa.string_view()), *list(found.parts.schema)[1:]])
    found = replace(found, parts=replace(found.parts, schema=views))
    assert ["t1", "t6"] == [row["text"] for row in rows_of(found)]


def test_a_source_says_how_many_rows_each_of_its_files_has(sink):
    make_complete(sink)
    slices = choose(sink).slices
    assert [("part-000000.parquet", 1), ("part-000001.parquet", 1)] == [
        (part.name, part.num_rows) for part in slices
    ]


def test_rows_of_chosen_statuses_come_alone(sink):
    make_complete(sink)
    assert ["a.parquet:1"] == [row["row_id"] for row in rows_of(choose(sink, "crashed"))]


def test_ids_of_a_column_of_the_user_are_read_from_there(sink):
    make_complete(sink)
    assert ["text"] == choose(sink, id_column="text").schema.names


def test_an_output_without_such_rows_is_an_empty_source(sink):
    make_complete(sink)
    found = choose(sink, "too_long")
    assert (0, (), ["text", "row_id"]) == (found.num_rows, found.slices, found.schema.names)


def test_an_output_that_is_not_finished_is_refused(sink):
    write_unit(sink, make_sink(sink), 0)
    with pytest.raises(ConfigError, match="is not finished; run the job again"):
        choose(sink)


def test_a_folder_without_an_output_is_refused(sink):
    with pytest.raises(ConfigError, match="is not the output of a raybatch job"):
        choose(sink)


@pytest.mark.parametrize("status", ["ok", "crash", ""])
def test_an_unknown_status_is_refused(sink, status):
    make_complete(sink)
    with pytest.raises(ConfigError, match="cannot be retried"):
        choose(sink, status)


def test_answers_of_other_columns_are_refused(sink):
    make_complete(sink)
    with pytest.raises(ConfigError, match="set output_prefix=''"):
        choose(sink, output=OutputSchema(prefix="new_"))


def test_a_part_whose_footer_cannot_be_read_is_told(sink):
    make_complete(sink)
    open_store(sink).replace("data/part-000001.parquet", b"torn")
    with pytest.raises(ConfigError, match="part-000001"):
        choose(sink)
