import json

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.stages.file_slices import read_slice
from raybatch.stages.source import scan_source
from tests.stages.support import rows_of


def test_json_lines_of_several_files_get_one_schema(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "b.jsonl").write_text(json.dumps({"x": 3, "y": "only here"}) + "\n")
    source = scan_source(str(tmp_path))
    assert (source.num_rows, source.schema.names) == (3, ["x", "y"])


def test_json_texts_that_look_like_dates_stay_texts(tmp_path):
    row = {"x": "2024-01-01", "y": {"z": ["2024-01-01 10:00:00", None]}, "n": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    source = scan_source(str(tmp_path))
    assert source.schema.field("x").type == pa.string()
    (table,) = read_slice(source.slices[0])
    assert table.to_pylist() == [row]


def failing_json(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        scan_source(str(tmp_path))
    return str(caught.value)


@pytest.mark.parametrize(
    "line",
    ['{"x": ', '{"x": "text"}', '{"x": 1, "x": 2}', "[1]", "no json", '{"x": {"y": 1}}'],
    ids=["cut", "other type", "twice", "list", "text", "struct"],
)
def test_broken_json_line_is_named_with_file_and_number(tmp_path, line):
    good = '{"x": 1}\n'
    message = failing_json(tmp_path, good * 700 + line + "\n" + good * 700)
    assert "a.jsonl, line 701: " in message
    assert line in message
    assert message.endswith("mend or remove the line")


def test_json_line_longer_than_a_block_of_arrow_is_read(tmp_path):
    text = "y" * (3 << 20)
    (tmp_path / "a.jsonl").write_text('{"x": "a"}\n' + json.dumps({"x": text}) + "\n")
    assert rows_of(scan_source(str(tmp_path))) == ["a", text]


def test_json_file_without_a_line_has_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n')
    source = scan_source(str(tmp_path))
    assert (source.num_rows, source.schema.names, rows_of(source)) == (1, ["x"], [1])


def test_lines_that_are_not_blank_are_the_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n \t{"x": 1} \r\n\r\n\t\n{"x": 2}\n   \n')
    source = scan_source(str(tmp_path))
    assert (source.num_rows, rows_of(source)) == (2, [1, 2])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"x": 1}\n\n{"x": 2}{"x": 3}\n{"x": 4}\n', 3),
        ('{"x": 1}\n{"x": 2} {"x": 3}', 2),
        ('{"x": 1}\n{\n"x": 2\n}\n', 2),
        ('{"x": 1}{"x": 2}\n{"x":\n3}\n', 2),
        ('{"x": [{}\n{}]}\n', 1),
    ],
    ids=["several", "with a blank", "over lines", "several and over lines", "braces inside"],
)
def test_line_that_is_not_one_object_is_named(tmp_path, text, number):
    message = failing_json(tmp_path, text)
    assert f"a.jsonl, line {number}: " in message
    assert "every line must be one JSON object" in message


def test_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n', encoding="utf-8-sig")
    assert rows_of(scan_source(str(tmp_path))) == [1]


@pytest.mark.parametrize("depth", [62, 1000, 100_000])
def test_line_that_is_nested_too_deep_is_named(tmp_path, depth):
    """Far deeper ones would overflow the stack of the parser."""
    line = '{"x": ' + "[" * depth + "]" * depth + "}"
    message = failing_json(tmp_path, '{"y": 1}\n' + line + "\n")
    assert "a.jsonl, line 2: nested deeper than 60 levels" in message


def test_brackets_in_texts_are_no_nesting(tmp_path):
    text = '[{"' * 1000 + "\\"
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": text, text: [[1]]}) + "\n")
    assert rows_of(scan_source(str(tmp_path))) == [text]
