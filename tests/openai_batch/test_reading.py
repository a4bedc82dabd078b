"""Lines of a batch file: each is read by itself, and a bad one is told by its number."""

import gzip

import pytest

from raybatch.errors import ConfigError
from raybatch.openai_batch.requests import Line, Refusal, SeenIds, parse_line, read_lines


def test_blank_lines_count_and_are_no_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n  \n{1}\r\n{2}")
    assert list(read_lines(str(path))) == [Line(1, b"{}"), Line(4, b"{1}"), Line(5, b"{2}")]


def test_compressed_file_is_read(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n"))
    assert list(read_lines(str(path))) == [Line(1, b"{}")]


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
    ("data", "told"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 101 + b"]" * 101, "nested deeper than 100"),
        (b"[1]", "no JSON object"),
        (b"{}", "custom_id must be a text"),
        (b'{"custom_id": 3}', "custom_id must be a text"),
        (b'{"custom_id": ""}', "custom_id must be a text"),
        (b'{"custom_id": "\\ud800"}', "half of a surrogate pair"),
        (b"\xff", "not valid JSON"),
        (None, "longer than"),
    ],
)
def test_malformed_line_is_refused_by_its_number(data, told):
    with pytest.raises(Refusal, match=f"line 7.*{told}") as caught:
        parse_line(Line(7, data))
    assert (None, "invalid_json_line") == (caught.value.status, caught.value.code)


def test_repeated_ids_are_found_over_many_calls(rng):
    numbers = rng.integers(0, 3000, 5000).tolist()
    seen, first = SeenIds(), {}
    expected = [
        None if first.setdefault(n, i + 1) == i + 1 else first[n] for i, n in enumerate(numbers)
    ]
    found = []
    for start in range(0, 5000, 64):
        chunk = numbers[start : start + 64]
        lines = list(range(start + 1, start + 1 + len(chunk)))
        found += seen.add([f"id {n}" for n in chunk], lines)
    assert found == expected
