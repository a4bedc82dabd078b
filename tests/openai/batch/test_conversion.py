"""A batch file as rows: written once, for one file, and what is refused beside them."""

import json

import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch_openai.batch.conversion import convert, read_conversion
from raybatch_openai.batch.requests import Form
from tests.openai.batch.support import RULES, chat, completion, write_batch


@pytest.fixture
def source(tmp_path):
    return write_batch(
        tmp_path / "in.jsonl",
        chat("a"),
        "{broken",
        "",
        completion("b", ["x", "y"], n=2, logprobs=1),
        chat("a", "again"),
        completion("c", ["x"], n=2, logprobs=3),
        chat("d", bogus=1),
    )


def make(source, folder, digest="1"):
    return convert(str(source), str(folder), rules=RULES, digest=digest)


def refusals(folder, found):
    table = pq.read_table(folder / found.refused_file)
    return [(row["line"], json.loads(row["refusal"])) for row in table.to_pylist()]


def test_requests_are_rows_by_form(source, tmp_path):
    found = make(source, tmp_path / "f")
    forms = [(Form("messages", 1, False), 1, 0), (Form("prompt", 2, True), 3, 3)]
    assert (found.num_lines, found.num_refused, list(found.forms)) == (6, 3, forms)


def test_rows_have_ids_that_no_custom_id_can_imitate(source, tmp_path):
    found = make(source, tmp_path / "f")
    table = pq.read_table(tmp_path / "f" / found.rows_file(Form("prompt", 2, True)))
    rows = table.select(["id", "line", "place", "num_prompts", "prompt"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("0:b", 4, 0, 2, "x"),
        ("1:b", 4, 1, 2, "y"),
        ("0:c", 6, 0, 1, "x"),
    ]


def test_refused_lines_keep_their_numbers(source, tmp_path):
    found = make(source, tmp_path / "f")
    codes = [(line, refusal["code"]) for line, refusal in refusals(tmp_path / "f", found)]
    assert codes == [(2, "invalid_json_line"), (5, "duplicate_custom_id"), (7, "unknown_parameter")]


def test_repeated_custom_id_is_told_with_both_lines(source, tmp_path):
    found = make(source, tmp_path / "f")
    (message,) = [r["message"] for line, r in refusals(tmp_path / "f", found) if line == 5]
    assert message.startswith("line 5: custom_id 'a' was already used in line 1")


def test_second_conversion_is_the_first(source, tmp_path):
    assert make(source, tmp_path / "f") == make(source, tmp_path / "f")
    assert read_conversion(str(tmp_path / "f")) == make(source, tmp_path / "f")


def test_changed_file_is_refused(source, tmp_path):
    make(source, tmp_path / "f")
    write_batch(source, chat("other"))
    with pytest.raises(ConfigError, match="another batch file"):
        make(source, tmp_path / "f")


def test_other_rules_are_refused(source, tmp_path):
    make(source, tmp_path / "f")
    with pytest.raises(ConfigError, match="other model names"):
        make(source, tmp_path / "f", digest="2")


def test_cut_conversion_leaves_nothing_that_counts(source, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(ConfigError, match="no space left"):
        make(source, tmp_path / "f")
    assert read_conversion(str(tmp_path / "f")) is None
    assert not [path for path in (tmp_path / "f").rglob("*") if path.is_file()]


def test_record_of_something_else_is_refused(tmp_path):
    (tmp_path / "batch.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the record of a batch"):
        read_conversion(str(tmp_path))
