"""Lines of a batch file are read separately, and a bad one is reported by its number."""

import bz2
import gzip
import lzma
from contextlib import ExitStack

import pytest

from raybatch.errors import ConfigError
from raybatch_openai.batch.conversion import SeenIds, parse_line
from raybatch_openai.batch.files import Line, read_lines
from raybatch_openai.batch.requests import Refusal


def test_blank_lines_count_and_are_no_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n  \n{1}\r\n{2}")
    assert list(read_lines(str(path))) == [Line(1, b"{}"), Line(4, b"{1}"), Line(5, b"{2}")]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "uploaded"])
@pytest.mark.parametrize("codec", [gzip, bz2, lzma])
def test_compressed_file_is_read_whatever_its_name(tmp_path, name, codec):
    path = tmp_path / name
    path.write_bytes(codec.compress(b"{}\n"))
    assert list(read_lines(str(path))) == [Line(1, b"{}")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"custom_id": "a"}\n'.encode("utf-16"), "UTF-16 or UTF-32; convert it with `iconv"),
        ('{"custom_id": "a"}\n'.encode("utf-16-le"), "UTF-16 or UTF-32; convert it with `iconv"),
        (b'[{"custom_id": "a"},\n{"custom_id": "b"}]', "one JSON array; `jq"),
    ],
)
def test_a_file_of_something_else_is_refused_as_a_whole(tmp_path, data, message):
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"a\.jsonl is not a batch file: .*{message}"):
        list(read_lines(str(tmp_path / "a.jsonl")))


def test_line_that_is_too_long_is_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 50 + b"\n{}\n" + b"y" * 11)
    assert list(read_lines(str(path), max_bytes=10)) == [
        Line(1, None),
        Line(2, b"{}"),
        Line(3, None),
    ]


def test_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read"):
        list(read_lines(str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not valid JSON: an object over several lines; `jq"),
        (b"{1", "not valid JSON"),
        (b"[" * 101 + b"]" * 101, "nested deeper than 100"),
        (b"[1]", "is a list; .*`jq"),
        (b"7", "not a JSON object"),
        (b"{}", "custom_id is missing"),
        (b'{"custom_id": 3}', "custom_id must be a non-empty string"),
        (b'{"custom_id": ""}', "custom_id must be a non-empty string"),
        (b'{"custom_id": "\\ud800"}', "custom_id has an unpaired surrogate"),
        (b"\xff", "not valid JSON"),
        (None, "longer than"),
    ],
)
def test_malformed_line_is_refused_by_its_number(data, message):
    with pytest.raises(Refusal, match=f"line 7.*{message}") as caught:
        parse_line(Line(7, data))
    assert (None, "invalid_json_line") == (caught.value.status, caught.value.code)


def test_repeated_ids_are_found_by_the_first_line_that_has_them(rng):
    numbers = rng.integers(0, 3000, 5000).tolist()
    first: dict[int, int] = {}
    expected = [
        None if first.setdefault(n, i + 1) == i + 1 else first[n] for i, n in enumerate(numbers)
    ]
    with ExitStack() as stack:
        seen = SeenIds(stack)
        found = [seen.add(f"id {n}", i + 1) for i, n in enumerate(numbers)]
    assert found == expected
