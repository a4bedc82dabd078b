"""Options of a server: their checks before it starts, and what it stores."""

import io
import os
import socket
import subprocess
import sys

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.errors import ConfigError
from raybatch_openai.batch.requests import Refusal, refusal_of
from raybatch_openai.batch.writing import BatchCounts
from raybatch_openai.serving.http_api import NewBatch, page_of, window_seconds
from raybatch_openai.serving.server import ServeOptions, _check_free, serve_batches
from raybatch_openai.serving.stores import (
    BATCH,
    FILE,
    BatchStatus,
    BatchStore,
    FileStore,
    check_id,
    new_id,
)


def test_server_without_a_key_does_not_start(tmp_path, monkeypatch):
    monkeypatch.delenv("RAYBATCH_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", "--folder", str(tmp_path)])
    assert "no API key" in str(result.exception)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"limits": {"max_tokens": 5}}, "limits"),
        ({"sink": "x"}, "'sink' cannot be set here"),
        ({"stage": {"prompt": "{a}"}}, r"stage\.prompt"),
        ({"stage": {"pool": {"replica": 1}}}, "replica"),
        ({"planned": True}, "planned"),
    ],
)
def test_wrong_options_are_told_at_once(job, message):
    with pytest.raises(ConfigError, match=message):
        ServeOptions(folder="f", job=job)


def test_address_that_is_taken_is_told():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            _check_free(*other.getsockname())


@pytest.mark.filterwarnings("default")  # of Ray Serve and the libraries below it
@pytest.mark.parametrize(
    ("model", "folder", "message"),
    [
        ("nosuch/", "served", "nosuch.* does not exist"),
        ("demo", "file", "--folder .*file' cannot be used; choose"),
        ("demo", "file/below", "--folder .*below' cannot be used; choose"),
    ],
)
def test_model_and_folder_are_looked_at_before_ray_starts(tmp_path, model, folder, message):
    pytest.importorskip("ray.serve", exc_type=ImportError)
    (tmp_path / "file").touch()
    options = ServeOptions(folder=str(tmp_path / folder), job={"stage": {"model": model}})
    with pytest.raises(ConfigError, match=message):
        serve_batches(options, start_ray=lambda: pytest.fail("Ray starts"))


def test_address_is_looked_at_before_ray_starts(tmp_path):
    pytest.importorskip("ray.serve", exc_type=ImportError)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        script = f"""
from raybatch_openai.serving.server import ServeOptions, serve_batches
options = ServeOptions(folder={str(tmp_path)!r}, job={{}}, port={port})
serve_batches(options, start_ray=lambda: print("Ray starts"))
"""
        environment = {**os.environ, "RAY_ADDRESS": ""}
        # this process may have a cluster of other tests
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "cannot listen on" in ended.stderr
    assert "Ray starts" not in ended.stdout


def test_ids_have_the_order_of_time_and_no_two_are_alike():
    ids = [new_id(FILE, now_s) for now_s in (1.0, 1.5, 1.5, 1e9)]
    assert [check_id(found, FILE) for found in ids] == ids
    assert len(set(ids)) == 4
    assert (ids[0], ids[-1]) == (min(ids), max(ids))


@pytest.mark.parametrize(
    "text", ["", "file-", "file-../../etc", "batch_" + "0" * 32, "file-\u0660"]
)
def test_text_that_is_no_id_never_becomes_a_path(text):
    with pytest.raises(Refusal, match="no such file"):
        check_id(text, FILE)


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86400), ("90m", 5400), ("7d", 604_800)])
def test_windows_are_times(text, seconds):
    assert window_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "1.5h", "31d", "99999999h", 24, None])
def test_windows_that_are_no_times_are_refused(text):
    with pytest.raises(Refusal, match="completion_window"):
        window_seconds(text)


@pytest.mark.parametrize(
    "value", [[], "x", {"a": 1}, {"a": "\ud800"}, {"a" * 65: "x"}, {str(i): "" for i in range(17)}]
)
def test_metadata_that_are_more_than_texts_are_refused(value):
    with pytest.raises(ValidationError) as caught:
        NewBatch(input_file_id="f", endpoint="e", metadata=value)
    refusal = refusal_of(caught.value)
    assert (refusal.param, "metadata" in refusal.message) == ("metadata", True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpoint": "e"}, "input_file_id is missing"),
        ({"input_file_id": 3, "endpoint": "e"}, "input_file_id must be a string, got 3"),
        ({"input_file_id": "f", "endpoint": "e", "more": 1}, "more is not supported"),
        (
            {"input_file_id": "f", "metadata": {str(i): "" for i in range(17)}},
            "metadata must be an object of at most 16 keys, got {'0': '', '1': '', ",
        ),
        (
            {"input_file_id": "f", "metadata": {"a" * 65: ""}},
            "a key of metadata must be a string of at most 64 characters, got 'aaa",
        ),
        (
            {"input_file_id": "f", "metadata": {"a": "\ud800"}},
            "metadata.a must be a string without unpaired surrogates",
        ),
    ],
)
def test_what_is_wrong_with_a_new_batch_is_told_by_its_key(values, message):
    with pytest.raises(ValidationError) as caught:
        NewBatch.model_validate(values)
    assert refusal_of(caught.value).message.startswith(message)


def test_pages_follow_each_other():
    ids = [str(i) for i in range(5)]
    assert page_of(ids, {"limit": "2"}, default=20, most=100) == (["0", "1"], True)
    assert page_of(ids, {"limit": "2", "after": "2"}, default=20, most=100) == (["3", "4"], False)


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "x"}, {"limit": "101"}, {"after": "9"}]
)
def test_pages_that_are_nowhere_are_refused(query):
    with pytest.raises(Refusal):
        page_of(["1"], query, default=20, most=100)


def test_file_is_there_once_its_content_is(tmp_path):
    files = FileStore(str(tmp_path))
    record = files.add(io.BytesIO(b"x" * 3_000_000), filename="../a", purpose="batch")
    assert (record.bytes, files.all()) == (3_000_000, [record])
    assert sum(map(len, files.chunks(record.id))) == 3_000_000
    files.remove(record.id)
    assert (files.all(), list((tmp_path / "files").iterdir())) == ([], [])


def test_batch_is_what_its_records_say(tmp_path):
    store = BatchStore(str(tmp_path))
    batch = store.add(
        endpoint="/v1/completions",
        input_file_id="f",
        completion_window="1h",
        window_s=3600,
        metadata=None,
    )
    name = check_id(batch.request.id, BATCH)
    assert (batch.state, batch.request.expires_at - batch.request.created_at) == (
        "validating",
        3600,
    )
    store.write(name, BatchStatus(status="in_progress", counts=BatchCounts(num_requests=3)))
    assert store.get(name).view("m")["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    store.cancel(name)
    assert (store.get(name).state, store.ids()) == ("cancelling", [name])
    store.write(name, BatchStatus(status="cancelled"))
    assert BatchStore(str(tmp_path)).get(name).state == "cancelled"
