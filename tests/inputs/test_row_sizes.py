"""What rows of a file take in memory, whatever they take in the file."""

import fsspec
import pyarrow as pa
import pytest

from raybatch.config import PlanConfig
from raybatch.inputs.source import scan_source
from raybatch.planning.run import fit_units, is_small
from tests.stages.support import write_parquet

TEXT_BYTES = 10_000


def of_few_texts(num_rows):
    texts = [letter * TEXT_BYTES for letter in "abc"]
    return [texts[i % 3] for i in range(num_rows)]


def num_bytes(source):
    return sum(part.num_bytes for part in source.slices)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(of_few_texts(600)),
        pa.array(of_few_texts(600)).dictionary_encode(),
        pa.array([[{"role": "user", "content": text}] for text in of_few_texts(600)]),
    ],
    ids=["texts", "a dictionary", "messages"],
)
def test_a_text_of_many_rows_counts_for_each_of_them(tmp_path, column):
    write_parquet(tmp_path / "a.parquet", pa.table({"a.b": column}))
    found = num_bytes(scan_source(str(tmp_path)))
    assert found == pytest.approx(600 * TEXT_BYTES, rel=0.1)


def test_numbers_of_a_dictionary_count_for_each_row(tmp_path):
    table = pa.table({"x": [[7] * 1000] * 600})
    write_parquet(tmp_path / "a.parquet", table)
    assert num_bytes(scan_source(str(tmp_path))) == pytest.approx(table.nbytes, rel=0.1)


def test_a_text_of_one_row_each_counts_once(tmp_path):
    table = pa.table({"x": [f"{i}" * 2000 for i in range(1000)]})
    write_parquet(tmp_path / "a.parquet", table)
    assert num_bytes(scan_source(str(tmp_path))) == pytest.approx(table.nbytes, rel=0.3)


def test_slices_of_repeated_texts_stay_small(tmp_path):
    table = pa.table({"x": of_few_texts(9000)})
    write_parquet(tmp_path / "a.parquet", table, row_group_size=3000)
    assert [part.num_rows for part in scan_source(str(tmp_path)).slices] == [6000, 3000]


def test_units_and_driver_see_what_rows_take_in_memory(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": of_few_texts(9000)}))
    source, plan = scan_source(str(tmp_path)), PlanConfig(unit_rows=8000, max_unit_rows=8000)
    assert not is_small(source, plan)
    assert fit_units(plan, source).unit_rows < 8000


def test_a_file_that_is_not_sampled_counts_like_the_largest_that_is(tmp_path):
    for i in range(20):
        write_parquet(tmp_path / f"{i:02}.parquet", pa.table({"x": of_few_texts(30)}))
    sizes = [part.num_bytes for part in scan_source(str(tmp_path)).slices]
    assert len(sizes) == 20
    assert min(sizes) > 29 * TEXT_BYTES


def test_rows_of_few_files_are_read(tmp_path, monkeypatch):
    for i in range(20):
        write_parquet(tmp_path / f"{i:02}.parquet", pa.table({"x": of_few_texts(30)}))
    opened, open_file = [], fsspec.open
    monkeypatch.setattr(fsspec, "open", lambda path, mode: opened.append(path) or open_file(path))
    scan_source(str(tmp_path))
    assert len(opened) == 20 + 8


def test_an_empty_row_group_tells_nothing(tmp_path):
    table = pa.table({"x": pa.array([], pa.string())})
    write_parquet(tmp_path / "a.parquet", table)
    assert num_bytes(scan_source(str(tmp_path))) == 0
