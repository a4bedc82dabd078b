import gzip
import json
import tracemalloc
from functools import partial

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs import file_slices, json_lines
from raybatch.inputs.file_slices import read_slice
from raybatch.inputs.json_lines import read_json_lines, scan_json_lines
from raybatch.inputs.source import scan_source
from raybatch.inputs.text_blocks import read_blocks
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
    ['{"x": ', '{"x": "text"}', '{"x": 1, "x": 2}', "[1]", "no json", '{"x": true}'],
    ids=["cut", "other type", "twice", "list", "text", "boolean"],
)
def test_broken_json_line_is_named_with_file_and_number(tmp_path, line):
    good = '{"x": 1}\n'
    message = failing_json(tmp_path, good * 700 + line + "\n" + good * 700)
    assert "a.jsonl, line 701: " in message
    assert line in message
    assert "(or skip the file with skip_bad_files)" in message


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
    assert ("fix or remove the line" in message) != ("`jq -c .` writes each" in message)


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


BLOCKS = [
    {"x": 1, "y": None, "z": {"a": 1}, "day": "2024-01-01", "l": []},
    {"x": 2.5, "y": "b", "z": {"b": "c"}, "day": "no day", "l": [1]},
    {"x": None, "new": True, "z": {"a": 2**60}, "day": "2024-01-02", "l": [0.5]},
]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_file_has_the_same_rows_in_one_block_and_in_many(tmp_path, order):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(BLOCKS[i]) for i in order * 50))
    whole, cut = scan_json_lines(str(path)), scan_json_lines(str(path), block_bytes=70)
    assert (whole.num_rows, cut.num_rows) == (150, 150)
    assert len(list(read_json_lines(str(path), whole.schema, block_bytes=70))) > 50
    assert whole.schema.equals(cut.schema)
    (rows,) = read_json_lines(str(path))
    blocks = list(read_json_lines(str(path), cut.schema, block_bytes=70))
    assert pa.concat_tables(blocks).equals(rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"x": "text"}', "x"),
        ('{"x": ', ""),
        ('{"x": true}', "x"),
        ("7", "not a complete JSON object"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_that_does_not_fit_the_blocks_before_is_named(tmp_path, line, reason, end):
    path = tmp_path / "a.jsonl"
    path.write_bytes((('{"x": 1}' + end) * 90 + line + end + ('{"x": 1}' + end) * 90).encode())
    with pytest.raises(ConfigError) as caught:
        scan_json_lines(str(path), block_bytes=100)
    assert "a.jsonl, line 91: " in str(caught.value)
    assert reason in str(caught.value)


def test_lines_that_end_in_carriage_returns_alone_are_cut_there(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\r' * 30)
    assert b"".join(read_blocks(str(path), block_bytes=20)) == b'{"x": 1}\r' * 30
    assert scan_json_lines(str(path), block_bytes=20).num_rows == 30


def test_memory_of_a_scan_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "a.jsonl"

    def peak(num_lines):
        """Bytes of Python and of Arrow that a scan and a reading take at most."""
        path.write_bytes(b'{"x": "%s"}\n' % (b"a" * 90) * num_lines)
        before, most = pa.total_allocated_bytes(), 0
        tracemalloc.start()
        try:
            schema = scan_json_lines(str(path), block_bytes=50_000).schema
            for table in read_json_lines(str(path), schema, block_bytes=50_000):
                assert table.nbytes < 60_000
                most = max(most, pa.total_allocated_bytes() - before)
            return tracemalloc.get_traced_memory()[1] + most
        finally:
            tracemalloc.stop()

    peak(1000)  # what is made once
    assert peak(40_000) < 1.5 * peak(4000)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['{"x": 9007199254740993}', '{"x": 1.5}'], "would change 9007199254740993; write"),
        (['{"x": 1}', '{"x": 18446744073709551616}'], "18446744073709551616 has over 64 bits"),
    ],
)
def test_a_whole_number_that_a_column_would_change_is_named(tmp_path, lines, reason):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        scan_json_lines(str(path))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        ['{"x": 9007199254740993}', '{"x": null}'],
        ['{"x": 1}', '{"x": 18446744073709551615}'],
        ['{"x": 9007199254740992}', '{"x": 1.5}'],
        ['{"x": 1e300}', '{"x": 2}', '{"x": null}'],
        ['{"x": [1e17, 2]}', '{"x": []}', '{"y": 9007199254740993}'],
        ['{"x": 1e17, "y": "a\u2028b"}', '{"x": 2, "y": "c"}'],
    ],
)
def test_numbers_that_a_column_holds_are_read(tmp_path, lines):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    (table,) = read_json_lines(str(path), scan_json_lines(str(path)).schema)
    expected = [json.loads(line) for line in lines]
    names = table.column_names
    assert table.to_pylist() == [{name: row.get(name) for name in names} for row in expected]


def test_a_whole_number_that_a_later_block_would_change_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 9007199254740993}\n' * 20 + '{"x": 1.5}\n' * 20)

    def read():
        schema = scan_json_lines(str(path), block_bytes=100).schema
        return list(read_json_lines(str(path), schema, block_bytes=100))

    with pytest.raises(ConfigError, match="would change 9007199254740993"):
        read()


MIXED = {
    "text and list": ["hi", [{"type": "text", "text": "é"}]],
    "arguments": [{"city": "Bern"}, {"city": 7}, "{}", None],
    "numbers": [[1.5, 9007199254740993]],
    "large": [{"id": 10**30}],
    "booleans": [[1.5], [True]],
    "no fields": [{}, {}],
    "no fields inside": [[{"properties": {}}]],
}


# of columns, these would put quotes around texts that are none in the file
WITH_TEXTS = ("text and list", "arguments")
PLACES = [(kind, True) for kind in MIXED] + [
    (kind, False) for kind in MIXED if kind not in WITH_TEXTS
]


@pytest.mark.parametrize(("kind", "inside"), PLACES)
@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_values_that_arrow_has_no_type_for_are_json_texts(
    tmp_path, monkeypatch, caplog, kind, inside, block_bytes
):
    values = [[{"content": value}] if inside else value for value in MIXED[kind]]
    for name in ("scan_json_lines", "read_json_lines"):
        with_blocks = partial(getattr(json_lines, name), block_bytes=block_bytes)
        monkeypatch.setattr(file_slices, name, with_blocks)
    lines = "\n".join(json.dumps({"x": value}) for value in values)
    (tmp_path / "a.jsonl").write_text(lines)
    source = scan_source(str(tmp_path))
    assert source.schema.field("x").type == pa.string()
    texts = rows_of(source)
    assert [None if text is None else json.loads(text) for text in texts] == values
    assert "values of 'x' have no common Arrow type, so they are read as JSON texts" in caplog.text


@pytest.mark.parametrize("kind", WITH_TEXTS)
@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_texts_beside_lists_are_refused_and_never_quoted(tmp_path, kind, block_bytes):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"x": value}) for value in MIXED[kind]))
    with pytest.raises(ConfigError, match=r"line \d: column 'x' holds"):
        scan_json_lines(str(path), block_bytes=block_bytes)


@pytest.mark.parametrize("values", [("[1]", '"é"'), ('"é"', "[1]"), ('[1], "y": 1', '"é"')])
def test_files_whose_lists_and_texts_do_not_fit_are_refused(tmp_path, values):
    for name, value in zip("ab", values, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"x": {value}}}')
    with pytest.raises(ConfigError, match=r"b\.jsonl does not match .*column 'x' holds"):
        scan_source(str(tmp_path))


def test_files_whose_lists_do_not_fit_are_json_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": [1]}')
    (tmp_path / "b.jsonl").write_text('{"x": {"y": [2]}}')
    assert rows_of(scan_source(str(tmp_path))) == ["[1]", '{"y": [2]}']


def test_files_whose_plain_values_do_not_fit_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}')
    (tmp_path / "b.jsonl").write_text('{"x": "1"}')
    with pytest.raises(
        ConfigError, match=r"b\.jsonl does not match .*column 'x' holds both int64 and"
    ):
        scan_source(str(tmp_path))


def test_columns_that_are_not_read_may_hold_what_they_like(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"y": 1, "x": "a", "z": [1]}\n{"y": "1", "x": "b", "z": 2}')
    assert rows_of(scan_source(str(tmp_path), columns=["x"])) == ["a", "b"]
    with pytest.raises(ConfigError, match="it has y, x, z"):
        scan_source(str(tmp_path), columns=["w"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'[\n  {"x": 1}\n]\n', r"line 1: the file is one JSON array; `jq -c '\.\[\]'`"),
        (b'[{"x": 1}, {"x": 2}]', "line 1: the file is one JSON array"),
        (b'{\n  "x": 1\n}\n{\n  "x": 2\n}\n', "line 1: an object over several lines; `jq -c"),
        (b'{"x": 1}\n{"x": [\n1\n]}\n', "line 2: an object over several lines"),
        ('{"x": 1}\n'.encode("utf-16"), "line 1: it is UTF-16 or UTF-32; .*`iconv -f"),
        ('{"x": 1}\n'.encode("utf-16-be"), "line 1: it is UTF-16 or UTF-32"),
        ('{"x": 1}\n'.encode("utf-32"), "line 1: it is UTF-16 or UTF-32"),
        (b'{"x": "\\ud800"}', "line 1: half of a surrogate pair"),
        (b'{"x": [1]}\n{"x": [NaN, "a"]}', "line 2: .*cannot hold NaN or Infinity"),
        (b'{"x": "a"}\n{"x": "caf\xe9"}', "line 2: byte 0xe9 at column 11 is not UTF-8"),
        (b'{"x": "a"}\n{"caf\xe9": "b"}', "line 2: byte 0xe9 at column 6 is not UTF-8"),
        (b'{"x": -1}\n{"x": 18446744073709551615}', "'x': -1 is below 0 and others"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_no_json_lines_is_named_as_what_it_is(tmp_path, content, reason, is_packed):
    path = tmp_path / f"a.jsonl{'.gz' if is_packed else ''}"
    path.write_bytes(gzip.compress(content) if is_packed else content)
    with pytest.raises(ConfigError, match=rf"source file \S+a\.jsonl.*{reason}"):
        scan_source(str(tmp_path))


@pytest.mark.parametrize(
    "lines", [["[18446744073709551615]", "[1]"], ['{"a": 9223372036854775808}', '{"a": 1}']]
)
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_large_numbers_inside_are_json_texts_in_any_order(tmp_path, lines, is_turned, block_bytes):
    path = tmp_path / "a.jsonl"
    lines = [f'{{"x": {line}}}' for line in (lines[::-1] if is_turned else lines)]
    path.write_text("\n".join(lines))
    schema = scan_json_lines(str(path), block_bytes=block_bytes).schema
    tables = list(read_json_lines(str(path), schema, block_bytes=block_bytes))
    found = [row["x"] for table in tables for row in table.to_pylist()]
    assert [json.loads(x) for x in found] == [json.loads(line)["x"] for line in lines]
