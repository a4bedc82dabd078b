"""`raybatch serve` as a process that is killed: the next one resumes its batch."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import ray
import yaml

openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve", exc_type=ImportError)

from tests.openai.batch.support import chat  # noqa: E402
from tests.openai.serving.conftest import KEY, free_port, job_of, wait_until  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]

IDS = [f"r{i}" for i in range(64)]


@contextmanager
def server(folder, port):
    """A server on the Ray of the tests; it is killed where it still runs at the end."""
    command = [sys.executable, "-m", "raybatch", "serve", str(folder / "job.yaml")]
    options = ["--folder", str(folder / "served"), "--port", str(port), "--model-name", "m"]
    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAYBATCH_API_KEY": KEY}
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [*command, *options], env={**os.environ, **variables}, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def is_served(client):
    try:
        return bool(client.models.list().data)
    except openai.APIError:
        return False


def test_a_batch_goes_on_after_its_server_was_killed(chat_model, tmp_path):
    job = job_of(chat_model, step_s=0.05, max_num_seqs=2)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    port = free_port()
    text = "".join(f"{json.dumps(chat(name, f'question {name}'))}\n" for name in IDS)
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(api_key=KEY, base_url=url, max_retries=0) as client:
        with server(tmp_path, port) as process:
            wait_until(lambda: is_served(client))
            file = client.files.create(
                file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch"
            )
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 4)
            process.send_signal(signal.SIGKILL)
            process.wait()
        # the API outlives its server on the same Ray, and tells what is so
        assert client.batches.retrieve(batch.id).status == "in_progress"
        with server(tmp_path, port) as process:
            wait_until(lambda: is_served(client) and is_completed(client, batch))
            done = client.batches.retrieve(batch.id)
            lines = client.files.content(done.output_file_id).text.splitlines()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert [json.loads(line)["custom_id"] for line in lines] == IDS


def is_completed(client, batch):
    try:
        return client.batches.retrieve(batch.id).status == "completed"
    except openai.APIConnectionError:
        return False
