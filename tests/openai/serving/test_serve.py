"""The server with the official client: files, batches, states, errors, and a restart."""

import io
import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve", exc_type=ImportError)

from raybatch_openai.serving.server import ServeOptions, api_of, served  # noqa: E402
from raybatch_openai.serving.stores import BatchStore  # noqa: E402
from tests.jobs import Hold  # noqa: E402
from tests.openai.batch.support import chat, completion  # noqa: E402
from tests.openai.serving.conftest import KEY, free_port, job_of, running, wait_until  # noqa: E402

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("cluster"),
    # of Ray Serve and the libraries below it
    pytest.mark.filterwarnings("default"),
]

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def client(cluster, chat_model, folder):
    """A client of a server that runs no batches yet."""
    port = free_port()
    options = ServeOptions(
        folder=str(folder),
        job=job_of(chat_model),
        names=("m",),
        port=port,
        key=KEY,
        max_file_bytes=100_000,
    )
    with (
        served(options, api_of(options)),
        openai.OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as client,
    ):
        yield client


def upload(client, *lines):
    text = "".join(f"{json.dumps(x) if isinstance(x, dict) else x}\n" for x in lines)
    return client.files.create(file=("../in.jsonl", io.BytesIO(text.encode())), purpose="batch")


def start(client, *lines, **options):
    options = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, *lines).id, **options)


def ended(client, batch):
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def lines_of(client, file_id):
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_batch_is_answered(client, chat_model, folder):
    batch = start(client, chat("a"), "{", chat("b", n=2), metadata={"who": "test"})
    assert (batch.status, batch.metadata) == ("validating", {"who": "test"})
    with running(folder, job_of(chat_model, executor="ray")):
        done = ended(client, batch)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
    assert [x["custom_id"] for x in lines_of(client, done.output_file_id)] == ["a", "b"]
    (error,) = lines_of(client, done.error_file_id)
    assert error["error"]["code"] == "invalid_json_line"
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.usage.total_tokens > 0


def test_batch_in_progress_goes_on_after_a_restart(client, chat_model, folder, tmp_path):
    hold = Hold(tmp_path, 32 - 2)
    slow = job_of(chat_model, max_num_seqs=2, **hold.options)
    batch = start(client, *(chat(f"r{i}", f"question {i}") for i in range(32)))

    def is_at_work():
        return client.batches.retrieve(batch.id).request_counts.completed >= 4

    with running(folder, slow):
        wait_until(is_at_work)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    hold.release()
    with running(folder, slow):
        done = ended(client, batch)
    ids = [x["custom_id"] for x in lines_of(client, done.output_file_id)]
    assert (done.status, ids) == ("completed", [f"r{i}" for i in range(32)])


def test_cancelled_batch_keeps_what_is_done(client, chat_model, folder, tmp_path):
    batch = start(client, *(chat(f"r{i}", f"question {i}") for i in range(32)))
    job = job_of(chat_model, max_num_seqs=2, **Hold(tmp_path, 32 - 2).options)
    with running(folder, job):
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = ended(client, batch)
    assert done.status == "cancelled"
    errors = lines_of(client, done.error_file_id)
    assert {x["error"]["code"] for x in errors} == {"batch_cancelled"}
    answers = lines_of(client, done.output_file_id)
    assert len(answers) + len(errors) == 32
    assert 2 <= done.request_counts.completed == len(answers)


def test_batch_that_was_cancelled_before_it_began_answers_nothing(client, chat_model, folder):
    batch = start(client, chat("a"))
    client.batches.cancel(batch.id)
    with running(folder, job_of(chat_model)):
        done = ended(client, batch)
    assert (done.status, done.output_file_id, done.request_counts.failed) == ("cancelled", None, 1)


def test_expired_batch_keeps_what_is_done(client, chat_model, folder, tmp_path):
    file = upload(client, *(chat(f"r{i}", f"question {i}") for i in range(64)))
    job = job_of(chat_model, max_num_seqs=1, **Hold(tmp_path, 8).options)
    with running(folder, job):
        # a window that the API does not give
        batch = BatchStore(str(folder)).add(
            endpoint="/v1/chat/completions",
            input_file_id=file.id,
            completion_window="24h",
            window_s=3,
            metadata=None,
        )
        done = ended(client, batch.request)
    errors = lines_of(client, done.error_file_id)
    assert (done.status, {x["error"]["code"] for x in errors}) == ("expired", {"batch_expired"})
    assert done.request_counts.completed + len(errors) == 64


def test_input_without_requests_fails(client, chat_model, folder):
    batch = start(client, "")
    with running(folder, job_of(chat_model)):
        done = ended(client, batch)
    assert (done.status, done.errors.data[0].message) == (
        "failed",
        "the input file has no requests",
    )


def test_input_with_too_many_requests_fails(client, chat_model, folder):
    batch = start(client, chat("a"), chat("b"))
    with running(folder, job_of(chat_model), max_requests=1):
        assert "1 are allowed" in ended(client, batch).errors.data[0].message


def test_lines_for_another_endpoint_are_errors(client, chat_model, folder):
    batch = start(client, completion("a"))
    with running(folder, job_of(chat_model)):
        done = ended(client, batch)
    assert (done.status, done.request_counts.failed) == ("completed", 1)


def test_batches_are_listed_in_pages(client):
    first = client.batches.list(limit=2)
    assert first.has_more
    ids = [batch.id for batch in client.batches.list(limit=2)]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == len(set(ids)) >= 5


def test_files_are_listed_read_and_removed(client):
    file = upload(client, chat("a"))
    assert file.filename == "in.jsonl"
    assert client.files.retrieve(file.id) == file
    assert file.id in [found.id for found in client.files.list(purpose="batch")]
    assert client.files.content(file.id).read().startswith(b'{"custom_id"')
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_what_is_no_form_or_no_file_is_told(client):
    with pytest.raises(openai.BadRequestError, match="send multipart/form-data"):
        client.post("/files", body={"purpose": "batch"}, cast_to=object)
    with pytest.raises(openai.NotFoundError, match="'file-1'") as caught:
        client.batches.create(
            input_file_id="file-1", endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert caught.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/chat/completions is not served here"):
        client.chat.completions.create(model="m", messages=[])


def test_an_order_that_is_none_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="order must be asc or desc"):
        client.files.list(order="up")


def test_a_wrong_endpoint_has_the_code_of_wrong_lines(client):
    with pytest.raises(openai.BadRequestError) as caught:
        start(client, chat("a"), endpoint="/v1/nothing")
    assert caught.value.code == "invalid_url"


def test_input_of_an_open_batch_is_not_removed(client, chat_model, folder):
    batch = start(client, chat("a"))
    with pytest.raises(openai.ConflictError, match=batch.id):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)


def test_models_are_those_that_are_served(client):
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "raybatch"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


@pytest.mark.parametrize("key", ["wrong", KEY + "x"])
def test_wrong_key_is_refused(client, key):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=key).models.list()


@pytest.mark.parametrize(
    "name", ["file-../../x", "file-" + "0" * 32, "batch_" + "g" * 32, "%2e%2e", "x"]
)
def test_ids_that_nothing_has_are_not_found(client, name):
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(name)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(name)


def test_file_that_is_too_large_is_refused(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("a", b"x" * 200_000), purpose="batch")
    assert caught.value.status_code == 413


def test_other_purposes_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"x"), purpose="fine-tune")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("endpoint", "/v1/embeddings"),
        ("endpoint", "/v1/nothing"),
        ("completion_window", "soon"),
        ("completion_window", "0h"),
        ("completion_window", "31d"),
        ("metadata", {"a": "x" * 600}),
    ],
)
def test_batch_with_a_wrong_option_is_refused(client, option, value):
    with pytest.raises(openai.BadRequestError, match=option.partition("_")[0]):
        start(client, chat("a"), **{option: value})


def test_unknown_operation_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.post("/nothing", cast_to=object)
