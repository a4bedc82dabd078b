"""Rows that stand for a source: which ones, and what is read for them."""

import numpy as np
import pyarrow as pa
import pytest

from raybatch.inputs import file_slices
from raybatch.inputs.source import scan_source
from raybatch.planning.dataset import SampledSource, spread_rows
from tests.stages.support import write_parquet

NUM_FILES, FILE_ROWS = 8, 4096


@pytest.fixture
def folder(tmp_path):
    """Files of four row groups, each of several tables."""
    for file in range(NUM_FILES):
        ids = pa.array(range(file * FILE_ROWS, (file + 1) * FILE_ROWS))
        write_parquet(tmp_path / f"{file}.parquet", pa.table({"id": ids}), row_group_size=1024)
    return tmp_path


def read(sample, **options):
    return pa.concat_tables(t for task in sample.tasks() for t in sample.read(task, **options))


@pytest.mark.parametrize(("num_rows", "limit"), [(100, 7), (10**12, 20), (21, 20)])
def test_each_stretch_of_the_input_gives_one_row(num_rows, limit):
    rows = spread_rows(num_rows, limit)
    bounds = [i * num_rows // limit for i in range(limit + 1)]
    assert all(low <= row < high for low, row, high in zip(bounds, rows, bounds[1:], strict=False))
    assert rows.tolist() == spread_rows(num_rows, limit).tolist()


def test_rows_do_not_keep_step_with_an_input_that_repeats_itself():
    assert len(np.unique(np.diff(spread_rows(10_000, 100)))) > 10


def test_few_rows_are_all_there():
    assert spread_rows(3, 20).tolist() == [0, 1, 2]


def test_rows_have_the_ids_and_values_that_they_have_in_the_source(folder):
    sample = SampledSource.of(scan_source(str(folder)), 20)
    rows = read(sample, row_id_column="row_id").to_pylist()
    expected = spread_rows(NUM_FILES * FILE_ROWS, 20).tolist()
    assert [row["id"] for row in rows] == expected
    assert [row["row_id"] for row in rows] == [
        f"{n // FILE_ROWS}.parquet:{n % FILE_ROWS}" for n in expected
    ]
    assert sample.num_rows == len(rows)


def test_what_holds_no_chosen_row_is_not_read(folder, monkeypatch):
    source, seen = scan_source(str(folder)), []
    read_slice = file_slices.read_slice

    def counting(part, **options):
        for table in read_slice(part, **options):
            seen.append((part.name, table.num_rows))
            yield table

    monkeypatch.setattr(file_slices, "read_slice", counting)
    sample = SampledSource.of(source, 2)
    read(sample)
    assert {name for name, _ in seen} == {part.name for part in sample.slices}
    assert len(sample.slices) == 2
    behind = spread_rows(source.num_rows, 2) % FILE_ROWS
    assert sum(rows for _, rows in seen) <= behind.sum() + 2 * 1024


def test_a_limit_above_the_rows_takes_every_row(folder):
    sample = SampledSource.of(scan_source(str(folder)), 10**9)
    assert read(sample).column("id").to_pylist() == list(range(NUM_FILES * FILE_ROWS))
