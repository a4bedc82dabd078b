"""A server whose model makes embeddings, with the official client."""

import io
import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve", exc_type=ImportError)

from raybatch_openai.serving.server import ServeOptions, api_of, served  # noqa: E402
from tests.openai.batch.support import embedding  # noqa: E402
from tests.openai.serving import conftest  # noqa: E402


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
# of Ray Serve and the libraries below it
@pytest.mark.filterwarnings("default")
def test_a_batch_of_embeddings_is_answered_and_one_of_chats_is_refused(chat_model, tmp_path):
    job = conftest.job_of(chat_model)
    job["stage"]["task"] = "embed"
    port = conftest.free_port()
    options = ServeOptions(folder=str(tmp_path), job=job, names=("m",), port=port, key=conftest.KEY)
    text = "".join(f"{json.dumps(embedding(name, name, dimensions=3))}\n" for name in "ab")
    with (
        served(options, api_of(options)),
        openai.OpenAI(
            api_key=conftest.KEY, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0
        ) as client,
        conftest.running(tmp_path, job),
    ):
        file = client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch")
        arguments = {"input_file_id": file.id, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="endpoint must be /v1/embeddings"):
            client.batches.create(endpoint="/v1/chat/completions", **arguments)
        batch = client.batches.create(endpoint="/v1/embeddings", **arguments)
        conftest.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        lines = client.files.content(done.output_file_id).text.splitlines()
    sizes = [len(json.loads(x)["response"]["body"]["data"][0]["embedding"]) for x in lines]
    assert sizes == [3, 3]
