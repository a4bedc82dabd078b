"""Datasets to batch files, and answers back to datasets."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.errors import ConfigError
from raybatch_openai.batch import collect as collecting
from raybatch_openai.batch.collect import collect_answers
from raybatch_openai.batch.export import Export, export_rows
from raybatch_openai.batch.files import rows_with_ids
from tests.openai.batch.support import read_file


@pytest.fixture
def source(tmp_path):
    table = pa.table({"key": ["a", "b", "c", "d"], "text": ["w", None, "y", "z"]})
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "part.parquet")
    return tmp_path / "in"


def export(source, tmp_path, **options):
    options = {"prompt": "say {text}", **options}
    return export_rows(
        Export(source=str(source), output=str(tmp_path / "b.jsonl"), model="gpt", **options)
    )


def answer(custom_id, *texts, reason="stop"):
    choices = [
        {"index": i, "message": {"content": text}, "finish_reason": reason}
        for i, text in enumerate(texts)
    ]
    details = {"cached_tokens": 3}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": details}
    body = {"choices": choices[::-1], "usage": usage}
    return {"custom_id": custom_id, "response": {"status_code": 200, "body": body}, "error": None}


def collect(source, tmp_path, *lines, **options):
    (tmp_path / "out.jsonl").write_text("".join(f"{json.dumps(found)}\n" for found in lines))
    options = {"id_column": "key", **options}
    found = collect_answers(
        [str(tmp_path / "out.jsonl")], source=str(source), sink=str(tmp_path / "answers"), **options
    )
    return found, pq.read_table(tmp_path / "answers").to_pylist()


def test_rows_become_requests_and_rows_without_a_prompt_are_counted(source, tmp_path):
    found = export(source, tmp_path, system="s", sampling={"max_tokens": 3}, id_column="key")
    lines = read_file(tmp_path / "b.jsonl")
    assert (found.num_requests, found.num_left_out) == (3, 1)
    assert found.first_error == "b: InvalidPrompt: column 'text' is null"
    assert lines[0] == {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "gpt",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "say w"}],
            "max_tokens": 3,
        },
    }


def test_requests_are_named_by_file_and_position_without_an_id_column(source, tmp_path):
    export(source, tmp_path)
    ids = [line["custom_id"] for line in read_file(tmp_path / "b.jsonl")]
    assert ids == ["part.parquet:0", "part.parquet:2", "part.parquet:3"]


@pytest.mark.parametrize("limit", [{"max_requests": 2}, {"max_bytes": 400}], ids=str)
def test_files_are_split_at_their_limits(source, tmp_path, limit):
    found = export(source, tmp_path, **limit)
    assert found.files == (str(tmp_path / "b.jsonl"), str(tmp_path / "b.2.jsonl"))
    counts = [len(read_file(tmp_path / name)) for name in ("b.jsonl", "b.2.jsonl")]
    assert counts == [2, 1]


def test_messages_come_from_a_column(tmp_path):
    messages = [[{"role": "user", "content": "x", "name": None}], []]
    pq.write_table(pa.table({"m": messages}), tmp_path / "a.parquet")
    found = export(tmp_path / "a.parquet", tmp_path, prompt=None, messages="m")
    (line,) = read_file(tmp_path / "b.jsonl")
    assert line["body"]["messages"] == [{"role": "user", "content": "x"}]
    assert "messages is empty" in found.first_error


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": None},
        {"messages": "m"},
        {"endpoint": "images"},
        {"endpoint": "completions", "system": "s"},
        {"sampling": {"top_k": 3}},
    ],
    ids=str,
)
def test_options_that_no_batch_file_has_are_refused(source, tmp_path, options):
    with pytest.raises(ConfigError):
        export(source, tmp_path, **options)


@pytest.mark.parametrize(
    ("endpoint", "sampling"),
    [
        ("chat", {"max_tokens": "abc"}),
        ("chat", {"n": 0}),
        ("completions", {"temperature": -1}),
        ("embeddings", {"dimensions": "x"}),
        ("embeddings", {"encoding_format": "int"}),
    ],
    ids=str,
)
def test_values_that_no_request_may_have_are_refused(source, tmp_path, endpoint, sampling):
    with pytest.raises(ConfigError, match=f"^--set: {next(iter(sampling))} "):
        export(source, tmp_path, endpoint=endpoint, sampling=sampling)


def test_requests_name_a_model(source, tmp_path):
    with pytest.raises(ConfigError, match="--model is empty"):
        Export(source=str(source), output=str(tmp_path / "b"), model=" ", prompt="{text}")


@pytest.mark.parametrize("there", ["b.jsonl", "b.2.jsonl", "b.3.jsonl", "b.12.jsonl"])
def test_batch_files_that_are_there_stay(source, tmp_path, there):
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match=r"jsonl exists; choose another"):
        export(source, tmp_path)
    assert (tmp_path / there).read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"in", there}


def test_only_the_file_that_is_always_written_is_tried(source, tmp_path, monkeypatch):
    tried, write = [], LocalFileSystem.pipe_file

    def counted(fs, path, data):
        tried.append(path)
        write(fs, path, data)

    monkeypatch.setattr(LocalFileSystem, "pipe_file", counted)
    export(source, tmp_path)
    assert [Path(path).name[:8] for path in tried] == ["b.jsonl."]


def test_a_folder_for_a_batch_file_is_refused(source, tmp_path):
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"b\.jsonl is a folder; name a file$"):
        export(source, tmp_path)


def test_answers_go_back_to_their_rows_in_the_order_of_the_source(source, tmp_path):
    found, rows = collect(source, tmp_path, answer("c", "C", reason="length"), answer("a", "A"))
    assert tuple(found) == (4, 2, 2, 0, 0)
    assert [row["generated_text"] for row in rows] == ["A", None, "C", None]
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "length", "error"]
    assert [row["row_id"] for row in rows] == [row["key"] for row in rows] == ["a", "b", "c", "d"]
    counts = ("num_input_tokens", "num_cached_tokens", "num_generated_tokens")
    assert [rows[0][name] for name in counts] == [5, 3, 2]


def test_rows_are_read_once_where_the_first_of_them_have_answers(source, tmp_path, monkeypatch):
    begun = []

    def counted(*args):
        begun.append(args)
        return rows_with_ids(*args)

    monkeypatch.setattr(collecting, "rows_with_ids", counted)
    collect(source, tmp_path, answer("a", "A"))
    assert len(begun) == 1


def test_lines_that_repeat_an_id_are_counted_apart(source, tmp_path):
    lines = [answer("a", "A"), answer("x", "X"), answer("a", "B"), answer("x", "Y")]
    found, rows = collect(source, tmp_path, *lines)
    assert (found.num_answered, found.num_unknown, found.num_repeated) == (1, 1, 2)
    assert rows[0]["generated_text"] == "A"


def test_answers_to_no_row_write_nothing(source, tmp_path):
    with pytest.raises(ConfigError, match=r"no custom_id matches a row .*--id-column"):
        collect(source, tmp_path, answer("a", "A"), answer("b", "B"), id_column=None)
    assert not (tmp_path / "answers").exists()


def test_errors_go_back_to_their_rows(source, tmp_path):
    body = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    lines = [
        {"custom_id": "a", "response": {"status_code": 400, "body": body}, "error": None},
        {"custom_id": "b", "response": None, "error": {"code": "batch_expired", "message": "late"}},
        {"custom_id": None, "response": None, "error": {"code": "x", "message": "y"}},
    ]
    found, rows = collect(source, tmp_path, *lines)
    assert [row["__inference_error__"] for row in rows] == [
        "PromptTooLong: too long",
        "BatchError: batch_expired: late",
        "BatchError: the batch files have no line for this row",
        "BatchError: the batch files have no line for this row",
    ]
    assert found.num_unknown == 1


def test_samples_become_lists(source, tmp_path):
    _, rows = collect(source, tmp_path, answer("a", "x", "y"))
    assert [row["generated_text"] for row in rows[:2]] == [["x", "y"], [None, None]]
    assert rows[0]["finish_reason"] == ["stop", "stop"]


def test_calls_of_tools_are_texts(source, tmp_path):
    line = answer("a", None)
    line["response"]["body"]["choices"][0]["message"]["tool_calls"] = [{"id": "1"}]
    _, rows = collect(source, tmp_path, line)
    assert json.loads(rows[0]["generated_text"]) == [{"id": "1"}]


def test_lines_that_are_no_answers_are_refused_by_number(source, tmp_path):
    with pytest.raises(ConfigError, match=r"out\.jsonl, line 2 is not a line of a batch output"):
        collect(source, tmp_path, answer("a", "A"), {"custom_id": "b"})


def test_an_odd_answer_costs_its_row_alone(source, tmp_path):
    odd = {name: answer(name, "x") for name in "abd"}
    choices = {name: line["response"]["body"]["choices"] for name, line in odd.items()}
    choices["a"][0]["message"]["content"] = 5
    choices["b"][0]["message"]["content"] = "\ud800"
    choices["d"][0] = "no choice"
    found, rows = collect(source, tmp_path, *odd.values(), answer("c", "C", reason=["odd"]))
    assert (found.num_answered, [row["generated_text"] for row in rows]) == (
        1,
        [None, None, "C", None],
    )
    errors = [row["__inference_error__"] for row in rows if row["generated_text"] is None]
    assert [error.split(": ")[0] for error in errors] == ["BadAnswer"] * 3
    assert errors[0].endswith("neither a text nor a list: 5")


def test_an_error_without_a_body_has_its_status_and_an_id_that_is_no_text_fits_no_row(
    source, tmp_path
):
    failed = {"custom_id": "a", "response": {"status_code": 500, "body": None}, "error": None}
    found, rows = collect(source, tmp_path, failed, answer("\ud800", "x"), answer("b", "B"))
    assert rows[0]["__inference_error__"] == "BatchError: HTTP 500: None"
    assert (found.num_answered, rows[1]["generated_text"]) == (1, "B")


def test_compressed_answers_are_read(source, tmp_path):
    lines = "".join(json.dumps(answer(name, name.upper())) + "\n" for name in "dcba")
    packed = tmp_path / "out.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.encode()))
    answers = tmp_path / "answers"
    collect_answers([str(packed)], source=str(source), sink=str(answers), id_column="key")
    assert pq.read_table(answers)["generated_text"].to_pylist() == ["A", "B", "C", "D"]


def test_folder_with_files_is_refused(source, tmp_path):
    collect(source, tmp_path)
    with pytest.raises(ConfigError, match="answers is not empty"):
        collect(source, tmp_path)


def test_commands_make_batches_and_read_them(source, tmp_path):
    to = ["openai", "to-batch", str(source), "-o", str(tmp_path / "b.jsonl"), "--model", "m"]
    made = CliRunner().invoke(app, [*to, "--prompt", "{text}", "--set", "max_tokens=5"])
    assert (made.exit_code, read_file(tmp_path / "b.jsonl")[0]["body"]["max_tokens"]) == (2, 5)
    ids = [line["custom_id"] for line in read_file(tmp_path / "b.jsonl")]
    (tmp_path / "o.jsonl").write_text("".join(json.dumps(answer(i, i)) + "\n" for i in ids))
    back = ["openai", "from-batch", str(tmp_path / "o.jsonl"), "--source", str(source)]
    read = CliRunner().invoke(app, [*back, "-o", str(tmp_path / "answers")])
    assert (read.exit_code, "4 rows: 3 answered, 1 failed" in read.output) == (2, True)
