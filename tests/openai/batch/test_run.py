"""Batch files through jobs on the fake backend: answers, errors, and runs that end early."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.errors import ConfigError
from raybatch_openai.batch.run import BatchOptions
from tests.jobs import Hold
from tests.openai.batch.support import batch_run, chat, completion, read_file, write_batch

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")

LINES = [
    chat("a"),
    "{broken",
    completion("b", ["x", "yy"]),
    chat("c", n=2, temperature=0.5),
    chat("a"),
    chat("d", messages=[{"role": "user", "content": "x" * 100}]),
    chat("e", messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]),
    chat("f", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    completion("g", [104, 105], max_tokens=None),
]


@pytest.fixture(
    scope="module", params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def finished(request, chat_model, tmp_path_factory) -> Path:
    """A batch that is done; its folder is read only."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    folder = tmp_path_factory.mktemp("finished")
    write_batch(folder / "in.jsonl", *LINES)
    counts = batch_run(folder, chat_model, executor=request.param).run()
    assert (counts.num_requests, counts.num_completed, counts.num_failed) == (9, 5, 4)
    return folder


def test_answers_have_the_order_of_the_requests(finished):
    found = read_file(finished / "out.jsonl")
    assert [line["custom_id"] for line in found] == ["a", "b", "c", "e", "g"]


def test_errors_have_the_order_of_the_requests(finished):
    found = [
        (line["custom_id"], (line["error"] or line["response"]["body"]["error"])["code"])
        for line in read_file(finished / "err.jsonl")
    ]
    assert found == [
        (None, "invalid_json_line"),
        ("a", "duplicate_custom_id"),
        ("d", "context_length_exceeded"),
        ("f", "invalid_request"),
    ]


def test_prompts_and_samples_are_choices(finished):
    choices = {
        line["custom_id"]: len(line["response"]["body"]["choices"])
        for line in read_file(finished / "out.jsonl")
    }
    assert choices == {"a": 1, "b": 2, "c": 2, "e": 1, "g": 1}


def test_completion_without_a_length_has_that_of_openai(finished):
    (found,) = [line for line in read_file(finished / "out.jsonl") if line["custom_id"] == "g"]
    assert found["response"]["body"]["usage"]["completion_tokens"] == 16


def test_parts_of_text_ask_what_their_text_asks(finished):
    found = {
        line["custom_id"]: line["response"]["body"] for line in read_file(finished / "out.jsonl")
    }
    assert found["a"]["usage"]["prompt_tokens"] == found["e"]["usage"]["prompt_tokens"]


def test_second_run_writes_the_same_files(finished, chat_model, caplog):
    caplog.set_level("INFO", logger="raybatch")
    before = [(finished / name).read_bytes() for name in ("out.jsonl", "err.jsonl")]
    started = []
    batch_run(finished, chat_model).run(start_ray=lambda: started.append(1))
    after = [(finished / name).read_bytes() for name in ("out.jsonl", "err.jsonl")]
    assert (before, []) == (after, started)
    assert "to answer" not in caplog.text


def test_an_output_is_compressed_as_its_name_says_and_again_the_same(chat_model, tmp_path):
    write_batch(tmp_path / "in.jsonl", chat("a"))
    run = batch_run(tmp_path, chat_model)
    output = tmp_path / "out.jsonl.gz"
    run = replace(run, files=run.files._replace(output=str(output)))
    run.run()
    before = output.read_bytes()
    (line,) = gzip.decompress(before).splitlines()
    assert json.loads(line)["custom_id"] == "a"
    run.run()
    assert output.read_bytes() == before


@pytest.mark.parametrize("name", ["out.jsonl", "err.jsonl"])
def test_a_file_of_something_else_stays_unless_told_otherwise(chat_model, tmp_path, name):
    write_batch(tmp_path / "in.jsonl", chat("a"), "{broken")
    (tmp_path / name).write_text("mine")
    run = batch_run(tmp_path, chat_model)
    with pytest.raises(ConfigError, match=rf"{name} exists; .* set --overwrite$"):
        run.run()
    assert (tmp_path / name).read_text() == "mine"
    run.run(overwrite=True)
    # from now on it is this batch's
    run.run()
    assert len(read_file(tmp_path / name)) == 1


def test_a_file_of_something_else_stays_also_where_the_batch_has_answers(chat_model, tmp_path):
    write_batch(tmp_path / "in.jsonl", chat("a"))
    run = batch_run(tmp_path, chat_model)
    run.run()
    (tmp_path / "notes.txt").write_text("mine")
    errors = str(tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match=r"notes\.txt exists"):
        replace(run, files=run.files._replace(errors=errors)).run()


@pytest.mark.parametrize("name", ["out.jsonl", "err.jsonl"])
def test_a_folder_for_an_output_is_told_before_any_work(chat_model, tmp_path, name):
    write_batch(tmp_path / "in.jsonl", chat("a"))
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is a folder; name a file$"):
        batch_run(tmp_path, chat_model).run()
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", name}


def test_an_output_that_cannot_be_written_is_told_before_any_work(chat_model, tmp_path):
    write_batch(tmp_path / "in.jsonl", chat("a"))
    run = batch_run(tmp_path, chat_model)
    errors = str(tmp_path / "in.jsonl" / "err.jsonl")
    run = replace(run, files=run.files._replace(errors=errors))
    with pytest.raises(ConfigError, match=r"err\.jsonl cannot be written"):
        run.run()
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.fixture
def cut(chat_model, tmp_path):
    """A batch of 40 requests that was ended in the middle."""
    lines = [chat(f"r{i}", f"question {i}", max_tokens=1 + i % 8) for i in range(40)]
    write_batch(tmp_path / "in.jsonl", *lines, "{broken")
    hold = Hold(tmp_path, 16)
    run = batch_run(
        tmp_path,
        chat_model,
        fake={"max_num_seqs": 2, **hold.options},
        plan={"unit_rows": 4, "max_unit_rows": 4},
        flush_every_s=0.1,
    )
    seen = []
    counts = run.run(
        progress=lambda stats, _: seen.append(stats.rows_done),
        ending=lambda: "the test" if seen and seen[-1] >= 8 else None,
    )
    assert counts.stopped == "the test"
    hold.release()
    return run, tmp_path


def test_batch_that_ended_early_writes_what_is_done(cut):
    run, folder = cut
    assert not (folder / "out.jsonl").exists()
    counts = run.close("batch_expired")
    answers, errors = read_file(folder / "out.jsonl"), read_file(folder / "err.jsonl")
    assert 8 <= counts.num_completed == len(answers) < 40
    order = [int(line["custom_id"][1:]) for line in answers]
    assert order == sorted(set(order))
    missing = [line["custom_id"] for line in errors[:-1]]
    assert missing == [f"r{i}" for i in range(40) if i not in order]
    assert {line["error"]["code"] for line in errors[:-1]} == {"batch_expired"}
    assert errors[-1]["error"]["code"] == "invalid_json_line"


def test_batch_that_ended_early_goes_on(cut):
    run, folder = cut
    counts = run.run()
    assert (counts.num_completed, counts.num_failed) == (40, 1)
    assert [line["custom_id"] for line in read_file(folder / "out.jsonl")] == [
        f"r{i}" for i in range(40)
    ]


def test_overwrite_begins_again(chat_model, tmp_path):
    write_batch(tmp_path / "in.jsonl", chat("a"))
    batch_run(tmp_path, chat_model).run()
    write_batch(tmp_path / "in.jsonl", chat("b"))
    with pytest.raises(ConfigError, match="another batch file"):
        batch_run(tmp_path, chat_model).run()
    batch_run(tmp_path, chat_model).run(overwrite=True)
    assert [line["custom_id"] for line in read_file(tmp_path / "out.jsonl")] == ["b"]


def test_file_without_a_good_line_needs_no_job(chat_model, tmp_path):
    write_batch(tmp_path / "in.jsonl", "{", chat("a", bogus=1))
    started = []
    counts = batch_run(tmp_path, chat_model).run(start_ray=lambda: started.append(1))
    assert (counts.exit_code(), started, read_file(tmp_path / "out.jsonl")) == (2, [], [])
    assert len(read_file(tmp_path / "err.jsonl")) == 2


def test_command_writes_answers_and_errors(chat_model, tmp_path):
    source = write_batch(tmp_path / "in.jsonl", chat("a"), "{")
    options = ["--model", str(chat_model), "--model-name", "m", "--replicas", "1"]
    options += ["--set", "backend=fake"]
    args = ["run", str(source), "--openai", "-o", str(tmp_path / "out.jsonl"), *options]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 2, result.output
    assert "2 requests: 1 answered, 1 failed" in result.output
    assert len(read_file(tmp_path / "out.jsonl")) == 1
    assert len(read_file(tmp_path / "out.errors.jsonl")) == 1


@pytest.mark.parametrize(
    "job",
    [
        {"source": "x"},
        {"stage": {"prompt": "{a}"}},
        {"stage": {"sampling": {"n": 2}}},
        {"stage": {"system": "x"}},
    ],
    ids=json.dumps,
)
def test_options_that_a_batch_file_says_itself_are_refused(job):
    with pytest.raises(ConfigError, match="cannot be set here"):
        BatchOptions(job=job)


def test_an_endpoint_is_no_engine_for_batch_files():
    backend = {"kind": "openai", "options": {"base_url": "http://localhost:1/v1"}}
    with pytest.raises(ConfigError, match="backend 'openai'"):
        BatchOptions(job={"stage": {"model": "m", "backend": backend}})
