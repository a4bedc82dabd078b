"""CSV files: every value as it is written, numbers only where they print the same, broken ones."""

import csv
import gzip
import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.inputs import csv_files, text_blocks
from raybatch.inputs.source import SkippedFile, scan_source

PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda d: pa.Codec("zstd").compress(d, asbytes=True),
}


def written(rows, *, delimiter=",", **options):
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, **options).writerows(rows)
    return out.getvalue().encode()


def read(folder, **options):
    source = scan_source(str(folder), **options)
    tables = [table for task in source.tasks() for table in source.read(task)]
    whole = pa.concat_tables(tables) if tables else source.schema.empty_table()
    assert whole.num_rows == source.num_rows
    return whole


def refusal(path, **options):
    with pytest.raises(ConfigError) as caught:
        scan_source(str(path), **options)
    return str(caught.value)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("is_named", [True, False])
def test_values_are_those_that_python_writes(tmp_path, name, packed, is_named):
    rows = [["id", "text"], ["7", 'says "so",\nand\tmore'], ["8", ""], ["9", "äöü"]]
    data = written(rows, delimiter="\t" if ".tsv" in name else ",")
    path = tmp_path / (name + packed)
    path.write_bytes(PACKED[packed](data))
    table = read(path if is_named else tmp_path)
    assert table.to_pydict() == {"id": [7, 8, 9], "text": [row[1] for row in rows[1:]]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "-20", ""], [1, -20, None]),
        (["0.5", "1.25"], [0.5, 1.25]),
        # numbers that would print otherwise
        (["007", "8"], ["007", "8"]),
        (["1.50"], ["1.50"]),
        (["1", "0.5"], ["1", "0.5"]),
        (["+1"], ["+1"]),
        ([" 1"], [" 1"]),
        ([str(2**63)], [str(2**63)]),
        (["true", "False"], ["true", "False"]),
        (["2024-01-01"], ["2024-01-01"]),
        (["NULL", "nan"], ["NULL", "nan"]),
        (["", ""], ["", ""]),
    ],
)
def test_a_column_has_numbers_only_if_all_print_the_same(tmp_path, values, expected):
    (tmp_path / "a.csv").write_bytes(written([["x", "y"], *([value, "y"] for value in values)]))
    assert read(tmp_path).column("x").to_pylist() == expected


@given(
    rows=st.lists(
        st.tuples(*(st.text(st.characters(codec="utf-8", exclude_characters="\0\r")),) * 2),
        min_size=1,
        max_size=20,
    )
)
@pytest.mark.parametrize("block_bytes", [1 << 20, 4096])
def test_any_text_is_read_as_python_reads_it(tmp_path_factory, block_bytes, rows):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(written([("a", "b"), *rows], quoting=csv.QUOTE_ALL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_files, "BLOCK_BYTES", block_bytes)
        table = read(path)
    as_text = [[str("" if v is None else v) for v in row.values()] for row in table.to_pylist()]
    assert as_text == [list(row) for row in rows]


def test_a_large_file_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 2000)
    rows = [[str(i), f"text\n{i}" * (i % 40)] for i in range(500)]
    (tmp_path / "a.csv").write_bytes(written([["id", "text"], *rows]))
    whole = read(tmp_path)
    assert whole.column("text").to_pylist() == [row[1] for row in rows]
    schema = scan_source(str(tmp_path)).schema
    blocks = list(csv_files.read_csv(str(tmp_path / "a.csv"), schema))
    assert len(blocks) > 30
    assert max(block.num_rows for block in blocks) < 100


def test_a_late_value_decides_the_type_of_a_column(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 100)
    values = [*map(str, range(200)), "007"]
    (tmp_path / "a.csv").write_text("x\n" + "\n".join(values) + "\n")
    assert read(tmp_path).column("x").to_pylist() == values


def test_files_get_one_schema(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("y,x,z\n3,007,0.5\n")
    table = read(tmp_path)
    assert table.to_pydict() == {"x": ["1", "007"], "y": [2, 3], "z": [None, 0.5]}


def test_a_file_without_any_of_the_named_columns_has_nulls(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("y,z\n3,4\n5,6\n")
    assert read(tmp_path, columns=["x"]).to_pydict() == {"x": [1, None, None]}


def test_only_named_columns_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,z\n1,2,a\n3,4,b\n")
    assert read(tmp_path, columns=["z", "x"]).to_pydict() == {"z": ["a", "b"], "x": [1, 3]}


def test_the_name_of_a_folder_decides_no_separator(tmp_path):
    (tmp_path / "all.tsv").mkdir()
    (tmp_path / "all.tsv" / "a.csv").write_text("x,y\n1,2\n")
    assert read(tmp_path).to_pydict() == {"x": [1], "y": [2]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_blank_line_is_a_value_of_the_only_column(tmp_path, end):
    (tmp_path / "a.csv").write_bytes(end.join(["x", "a", "", "b", '""', ""]).encode())
    assert read(tmp_path).column("x").to_pylist() == ["a", "", "b", ""]


def test_a_blank_line_is_no_row_of_several_columns(tmp_path):
    (tmp_path / "a.csv").write_text("\nx,y\n1,2\n\n3,4\n\n")
    assert read(tmp_path).to_pydict() == {"x": [1, 3], "y": [2, 4]}


def test_a_column_without_values_has_the_type_of_other_files(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,z\n")
    (tmp_path / "b.csv").write_text("x,y,z\n1,,\n")
    (tmp_path / "c.csv").write_text("x,y,z\n2,0.5,\n")
    assert read(tmp_path).to_pydict() == {"x": [1, 2], "y": [None, 0.5], "z": ["", ""]}


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_file_of_names_alone_has_no_rows(tmp_path, end):
    (tmp_path / "a.csv").write_text(f"x,y{end}")
    table = read(tmp_path)
    assert (table.num_rows, table.column_names) == (0, ["x", "y"])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"x,y\n1,2\n1,2,3\n", "Row #3: Expected 2 columns, got 3"),
        (b"x\n\xff\n", "LATIN1"),
        (b"x,\xff\n1,2\n", "LATIN1"),
        ("x,y\n1,2\n".encode("utf-16"), "iconv"),
        (b'x,y\n"never closed,1\n2,3\n', "unexpected end of data"),
        (b'x,y\n1,2\n3,"cut', "unexpected end of data"),
        (b'x,y\n1,"a \\"b\\" c"\n', "quotes in values are doubled"),
        (b'x,y\n1,"a"b\n', "quotes in values are doubled"),
        (b"x,x\n1,2\n", "several columns have the name 'x'"),
        (gzip.compress(b"x,y\n" + b"1,2\n" * 5000, mtime=0)[:-30], "cannot be read"),
    ],
    ids=[
        "empty",
        "columns",
        "bytes",
        "name",
        "utf-16",
        "quote",
        "end",
        "escape",
        "after",
        "names",
        "cut",
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, data, reason):
    (tmp_path / "bad.csv").write_bytes(data)
    message = refusal(tmp_path)
    assert "bad.csv" in message
    assert reason in message


def test_a_row_longer_than_a_block_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 100)
    (tmp_path / "a.csv").write_text("x,y\n1," + "long" * 60 + "\n")
    assert "a row has more than" in refusal(tmp_path)


def test_a_bad_file_can_be_skipped(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x\n1,2\n")
    source = scan_source(str(tmp_path), skip_bad_files=True)
    assert source.num_rows == 1
    assert [SkippedFile] == [type(skipped) for skipped in source.skipped]


def test_a_bomb_is_refused(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x\n" + b"1\n" * 100_000))
    assert "max_decompressed_bytes=1,000" in refusal(tmp_path, max_decompressed_bytes=1000)


def test_a_file_that_the_job_allows_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "LEAST_ALLOWED_BYTES", 1000)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x\n" + b"1\n" * 100_000))
    assert read(tmp_path, max_decompressed_bytes=1_000_000).num_rows == 100_000


@pytest.mark.parametrize("value", ["and text", "007", "0x1f"])
def test_a_file_that_changes_after_its_scan_is_an_error(tmp_path, value):
    (tmp_path / "a.csv").write_text("x\n1\n2\n")
    source = scan_source(str(tmp_path))
    (tmp_path / "a.csv").write_text(f"x\n1\n{value}\n")
    with pytest.raises(ConfigError, match=r"a\.csv"):
        list(source.read(source.tasks()[0]))
