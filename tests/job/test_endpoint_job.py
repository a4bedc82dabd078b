"""Jobs whose rows an OpenAI-compatible endpoint answers: costs, limits, secrets, ends."""

import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ReplicaError
from raybatch.job.job import Job
from raybatch.stages.feeder import LLMStage
from tests.jobs import LARGE, local_job
from tests.openai.endpoint.endpoint_server import (
    EndpointServer,
    expected_embedding,
    expected_text,
    prompt_ids,
)
from tests.stages.support import write_parquet

KEY = "k3y-of-the-tests-0f9a1b"
NUM_ROWS = 64
PRICES = {
    "price_per_million_input_tokens": 1e6,
    "price_per_million_cached_input_tokens": 0,
    "price_per_million_output_tokens": 2e6,
}

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


@pytest.fixture(scope="module")
def running_server():
    with EndpointServer() as made:
        yield made


@pytest.fixture
def server(running_server):
    """One server for all tests, so that they share a pool of engines."""
    running_server.reset()
    return running_server


def write_source(folder: Path, num_rows: int = NUM_ROWS) -> None:
    # rows of eight documents, which the plan brings together
    texts = [f"document {i % 8} " * 30 + f"question {i}" for i in range(num_rows)]
    write_parquet(folder / "in" / "0.parquet", pa.table({"text": texts}))


def make_job(folder, server, *, options=(), plan=(), **job):
    (folder / "key").write_text(KEY)
    stage = LLMStage(
        "served",
        prompt="{text}",
        system="Be short.",
        sampling={"max_tokens": 4},
        backend={
            "kind": "openai",
            "options": {
                "base_url": server.url,
                "api_key_file": str(folder / "key"),
                "max_concurrency": 4,
                **PRICES,
                **dict(options),
            },
        },
        pool={"max_start_failures": 1},
    )
    units = {"unit_rows": 8, "max_unit_rows": 8}
    return local_job(folder / "in", folder / "out", stage, plan={**units, **dict(plan)}, **job)


def messages_of(text):
    return [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]


def output(folder):
    return pq.read_table(folder / "out" / "data").to_pylist()


def texts_asked(server):
    return [body["messages"][1]["content"] for body in server.requested]


@pytest.mark.parametrize(
    "plan", [{}, pytest.param(LARGE, marks=pytest.mark.ray)], ids=["small", "large"]
)
def test_every_row_is_answered_once_with_the_counts_of_the_endpoint(tmp_path, server, plan):
    write_source(tmp_path)
    report = make_job(tmp_path, server, plan=plan).run()
    rows = output(tmp_path)
    assert len(rows) == len(server.requested) == NUM_ROWS
    for row in rows:
        body = {"messages": messages_of(row["text"]), "max_tokens": 4}
        assert row["generated_text"] == expected_text(body)
        assert row["num_input_tokens"] == len(prompt_ids(body))
        assert (row["num_generated_tokens"], row["generated_tokens"]) == (4, [])
    computed = sum(row["num_input_tokens"] - row["num_cached_tokens"] for row in rows)
    assert report.cost == pytest.approx(computed + 2 * 4 * NUM_ROWS)
    assert report.exit_code() == 0
    assert report.plan.plan.answer_cost is not None


def test_rows_of_a_group_are_asked_one_after_the_other(tmp_path, server):
    write_source(tmp_path)
    make_job(tmp_path, server, options={"max_concurrency": 1}).run()
    documents = [text.split()[1] for text in texts_asked(server)]
    changes = sum(a != b for a, b in pairwise(documents))
    assert changes == 7


def test_rows_that_the_endpoint_refuses_are_error_rows(tmp_path, server):
    refused = {"error": {"message": "too rude", "code": "content_filter"}}
    server.react = lambda _, body: (
        (400, {}, refused) if body["messages"][1]["content"].endswith(" 7") else None
    )
    write_source(tmp_path)
    report = make_job(tmp_path, server).run()
    (failed,) = [row for row in output(tmp_path) if row["__inference_error__"]]
    assert failed["__inference_error__"] == "ContentFilter: 400 too rude"
    assert (report.rows_failed, report.exit_code()) == (1, 2)


def test_a_refused_key_ends_the_run_at_once(tmp_path, server):
    refusal = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    server.react = lambda number, body: (401, {}, refusal)
    write_source(tmp_path)
    with pytest.raises(ReplicaError, match="refuses all requests: 401 Incorrect API key") as caught:
        make_job(tmp_path, server).run()
    assert KEY not in str(caught.value)
    assert len(server.requested) <= 4


def test_an_endpoint_that_is_not_there_is_told_as_such(tmp_path, server):
    write_source(tmp_path)
    options = {"base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(ReplicaError, match=r"127\.0\.0\.1:9/v1 cannot be reached"):
        make_job(tmp_path, server, options=options).run()


def test_a_budget_stops_the_run_and_what_was_answered_is_not_asked_again(tmp_path, server):
    write_source(tmp_path)
    server.delay_s = 0.2
    job = make_job(tmp_path, server, limits={"max_cost": 500})
    first = job.run()
    assert first.stopped.startswith("limits.max_cost")
    assert first.cost >= 500
    kept = set(range(NUM_ROWS)) - {int(text.split()[-1]) for text in unanswered_texts(tmp_path)}
    assert kept
    num_requested = len(server.requested)
    server.delay_s = 0.0
    second = make_job(tmp_path, server).run()
    again = {int(text.split()[-1]) for text in texts_asked(server)[num_requested:]}
    assert again == set(range(NUM_ROWS)) - kept
    assert second.exit_code() == 0
    assert second.cost > first.cost
    assert len({row["row_id"] for row in output(tmp_path)}) == NUM_ROWS


def test_what_was_answered_before_a_run_failed_is_not_asked_again(tmp_path, server):
    write_source(tmp_path)
    server.react = lambda number, body: (401, {}, "revoked") if number >= 21 else None
    with pytest.raises(ReplicaError, match="401 revoked"):
        make_job(tmp_path, server, flush_every_s=600.0).run()
    num_answered = server.num_answered
    server.reset()
    report = make_job(tmp_path, server).run()
    # those whose answer was on its way when the key was refused may be among them
    assert NUM_ROWS - num_answered <= len(server.requested) <= NUM_ROWS - num_answered + 3
    assert report.exit_code() == 0


def unanswered_texts(folder):
    """The texts of rows that are neither in a part nor in the journal."""
    sink = folder / "out"
    done = {row["text"] for path in sink.glob("data/*.parquet") for row in rows_of(path)}
    for path in sink.glob("_raybatch/frag/*/*.arrow"):
        with pa.OSFile(str(path)) as file:
            done |= set(pa.ipc.open_file(file).read_all().column("text").to_pylist())
    return {row["text"] for row in rows_of(folder / "in" / "0.parquet")} - done


def rows_of(path):
    return pq.read_table(path).to_pylist()


@pytest.mark.ray
def test_the_key_is_sent_and_written_nowhere(tmp_path, server):
    import ray

    write_source(tmp_path, 8)
    job = make_job(tmp_path, server, executor="ray")
    shown = str(job.explain()) + str(job.run()) + repr(job.config)
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in shown
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    folders = [tmp_path / "out", session / "logs"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_explaining_a_job_asks_nothing(tmp_path, server):
    write_source(tmp_path)
    explanation = make_job(tmp_path, server).explain()
    assert "the speed of an endpoint is not measured" in str(explanation)
    # triples of bytes, of which the prices make a few thousand
    assert "answers cost about" in str(explanation)
    least, most = explanation.answer_cost
    assert 2 * 4 * NUM_ROWS < least < most
    assert server.requested == []


def test_a_job_file_names_an_endpoint(tmp_path, server):
    write_source(tmp_path, 8)
    options = {"base_url": server.url, "endpoint": "completions"}
    mapping = {
        "source": str(tmp_path / "in"),
        "sink": str(tmp_path / "out"),
        "stage": {
            "model": "served",
            "prompt": "{text}",
            "sampling": {"max_tokens": 2, "temperature": 0.5, "n": 2},
            "backend": {"kind": "openai", "options": options},
        },
    }
    Job.from_mapping(json.loads(json.dumps(mapping)) | {"executor": "local"}).run()
    assert set(server.paths) == {"/v1/completions"}
    for row in output(tmp_path):
        (body,) = [body for body in server.requested if body["prompt"] == row["text"]]
        assert row["generated_text"][0] == expected_text(body)
        assert row["num_generated_tokens"] == [2, 2]


def test_a_job_makes_embeddings_at_an_endpoint(tmp_path, server):
    texts = [f"text {i}" for i in range(8)]
    write_parquet(tmp_path / "in" / "0.parquet", pa.table({"text": texts}))
    options = {"base_url": server.url, **PRICES}
    stage = LLMStage(
        "served",
        task="embed",
        prompt="{text}",
        pooling={"dimensions": 5},
        backend={"kind": "openai", "options": options},
        pool={"max_start_failures": 1},
    )
    report = local_job(tmp_path / "in", tmp_path / "out", stage).run()
    rows = pq.read_table(tmp_path / "out" / "data").to_pylist()
    expected = {t: expected_embedding({"input": t, "dimensions": 5}).tolist() for t in texts}
    assert {row["text"]: row["embeddings"] for row in rows} == expected
    assert report.cost == sum(len(text) for text in texts)


def test_a_first_look_tells_what_all_answers_cost(tmp_path, server):
    write_source(tmp_path)
    preview = make_job(tmp_path, server).preview(8)
    assert len(server.requested) == 8
    assert all(any(text in prompt for prompt in preview.prompts) for text in texts_asked(server))
    rows = preview.rows.to_pylist()
    spent = sum(r["num_input_tokens"] - r["num_cached_tokens"] for r in rows)
    spent += 2 * sum(r["num_generated_tokens"] for r in rows)
    assert preview.rest.money.expected == pytest.approx(spent * NUM_ROWS / 8)
    assert "time      unknown" in preview.to_text()
    assert KEY not in preview.to_text()
    assert not (tmp_path / "out").exists()
