"""Batch files of embeddings: answered by a job, made of datasets, and brought back."""

import base64

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.backends.fake import fake_vector
from raybatch.errors import ConfigError
from raybatch.records.types import Request, Sampling
from raybatch_openai.batch.collect import collect_answers
from raybatch_openai.batch.export import Export, export_rows
from raybatch_openai.batch.run import BatchOptions
from tests.openai.batch.support import batch_run, chat, embedding, read_file, write_batch

LINES = [
    embedding("a", "one"),
    embedding("b", ["two", "three"], encoding_format="base64"),
    embedding("c", [1, 2], dimensions=5),
    embedding("d", "x" * 100),
    chat("e"),
    embedding("f", ""),
]


def expected(tokens, **options):
    request = Request(
        request_id=0,
        row_id="",
        prompt_token_ids=np.array(tokens, np.int32),
        sampling=Sampling(),
        payload={"pooling": options} if options else {},
    )
    return fake_vector(request, "embed").tolist()


@pytest.fixture(scope="module")
def finished(chat_model, locally, tmp_path_factory):
    """A batch that is done; its folder is read only."""
    folder = tmp_path_factory.mktemp("finished")
    write_batch(folder / "in.jsonl", *LINES)
    counts = batch_run(folder, chat_model, stage={"task": "embed"}).run()
    assert (counts.num_requests, counts.num_completed, counts.num_failed) == (6, 3, 3)
    assert (counts.prompt_tokens, counts.generated_tokens) == (3 + 8 + 2, 0)
    return folder


def bodies(folder):
    return {x["custom_id"]: x["response"]["body"] for x in read_file(folder / "out.jsonl")}


def test_each_input_has_its_vector_in_the_form_of_openai(finished):
    found = bodies(finished)
    assert found["a"] == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": expected(list(b"one"))}],
        "model": "m",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert found["c"]["data"][0]["embedding"] == expected([1, 2], dimensions=5)


def test_vectors_in_base64_are_those_numbers(finished):
    data = bodies(finished)["b"]["data"]
    vectors = [np.frombuffer(base64.b64decode(x["embedding"]), "<f4").tolist() for x in data]
    assert vectors == [expected(list(text)) for text in (b"two", b"three")]
    assert [x["index"] for x in data] == [0, 1]


def test_requests_without_a_vector_are_error_lines(finished):
    found = {
        x["custom_id"]: x["response"]["body"]["error"]["code"]
        for x in read_file(finished / "err.jsonl")
    }
    assert found == {"d": "context_length_exceeded", "e": "invalid_url", "f": "invalid_request"}


def test_answers_come_back_to_the_rows_of_a_dataset(finished, tmp_path):
    (tmp_path / "in").mkdir()
    table = pa.table({"key": ["c", "a", "d", "z"]})
    pq.write_table(table, tmp_path / "in" / "part.parquet")
    lines = [x for x in read_file(finished / "out.jsonl") if x["custom_id"] != "b"]
    write_batch(tmp_path / "out.jsonl", *lines)
    found = collect_answers(
        [str(finished / "err.jsonl"), str(tmp_path / "out.jsonl")],
        source=str(tmp_path / "in"),
        sink=str(tmp_path / "answers"),
        id_column="key",
    )
    rows = {row["key"]: row for row in pq.read_table(tmp_path / "answers").to_pylist()}
    assert (found.num_answered, found.num_failed) == (2, 2)
    assert rows["a"]["embeddings"] == expected(list(b"one"))
    assert (rows["d"]["embeddings"], rows["z"]["embeddings"]) == (None, None)
    assert rows["a"]["num_input_tokens"] == 3
    assert "generated_text" not in rows["a"]


def test_texts_and_vectors_are_not_brought_back_together(tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"key": ["a", "b"]}), tmp_path / "in" / "part.parquet")
    text = {"choices": [{"index": 0, "text": "t"}]}
    vector = {"data": [{"embedding": [1.0]}]}
    write_batch(
        tmp_path / "out.jsonl",
        *(
            {"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}
            for name, body in (("a", text), ("b", vector))
        ),
    )
    with pytest.raises(ConfigError, match="texts and embeddings"):
        collect_answers(
            [str(tmp_path / "out.jsonl")],
            source=str(tmp_path / "in"),
            sink=str(tmp_path / "answers"),
            id_column="key",
        )


def vector_line(custom_id, *embeddings):
    body = {"data": [{"embedding": e} for e in embeddings], "usage": {"prompt_tokens": 2}}
    return {"custom_id": custom_id, "response": {"status_code": 200, "body": body}, "error": None}


def test_a_line_that_is_no_embedding_of_one_row_is_an_error_row(tmp_path):
    (tmp_path / "in").mkdir()
    keys = ["good", "two", "none", "nan", "text"]
    pq.write_table(pa.table({"key": keys}), tmp_path / "in" / "part.parquet")
    odd = {"two": [[1.0], [2.0]], "none": [], "nan": [[float("nan")]], "text": ["?"]}
    lines = [vector_line("good", [1.0, 2.0]), *(vector_line(k, *v) for k, v in odd.items())]
    write_batch(tmp_path / "out.jsonl", *lines)
    found = collect_answers(
        [str(tmp_path / "out.jsonl")],
        source=str(tmp_path / "in"),
        sink=str(tmp_path / "answers"),
        id_column="key",
    )
    rows = {row["key"]: row for row in pq.read_table(tmp_path / "answers").to_pylist()}
    assert (found.num_answered, found.num_failed) == (1, 4)
    assert {key: row["embeddings"] for key, row in rows.items()} == {
        **dict.fromkeys(odd),
        "good": [1.0, 2.0],
    }
    errors = {key: rows[key]["__inference_error__"] for key in odd}
    assert [error.split(": ")[0] for error in errors.values()] == ["BadAnswer"] * 4
    assert errors["two"] == "BadAnswer: the line has 2 embeddings, expected 1"


def test_rows_become_requests_for_embeddings(tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"key": ["a"], "text": ["w"]}), tmp_path / "in" / "part.parquet")
    made = {"source": str(tmp_path / "in"), "output": str(tmp_path / "b.jsonl"), "model": "m"}
    made |= {"prompt": "{text}", "endpoint": "embeddings", "id_column": "key"}
    export_rows(Export(**made, sampling={"dimensions": 4}))
    assert read_file(tmp_path / "b.jsonl") == [embedding("a", "w", dimensions=4)]
    with pytest.raises(ConfigError, match="embeddings have no option 'temperature'"):
        Export(**made, sampling={"temperature": 1})


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"task": "score"}, "stage.task='score'"),
        ({"task": "embed", "pooling_column": "p"}, "stage.pooling_column"),
    ],
)
def test_options_that_no_batch_has_are_refused(chat_model, stage, message):
    stage = {"model": str(chat_model), "backend": "fake", **stage}
    with pytest.raises(ConfigError, match=message):
        BatchOptions(job={"stage": stage})
