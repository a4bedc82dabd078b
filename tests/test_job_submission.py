"""The documented way to a cluster: `ray job submit` of `raybatch run`, on a real local cluster."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
RAY = (sys.executable, "-m", "ray.scripts.scripts")
START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Cluster:
    """A running head node: where its job server listens, and what its clients need."""

    address: str
    environment: dict[str, str]


def free_ports(count):
    """Return ports that nobody listens on now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until_healthy(process, url, log):
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            pytest.fail(f"ray start ended with {process.returncode}: {log.read_text()[-3000:]}")
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.5)
    pytest.fail(f"no answer from {url} within {START_TIMEOUT_S} s")


def end(process):
    """End the head node: its own process tree, nothing else on this host."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=15)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    if process.poll() is None:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("aiohttp_cors", reason="the job server needs pip install 'ray[default]'")
    gcs, dashboard, agent, agent_grpc, client, metrics, manager, objects, env_agent = free_ports(9)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    # socket paths must stay short, pytest's folders are not
    with tempfile.TemporaryDirectory(prefix="rb", ignore_cleanup_errors=True) as temp_dir:
        options = {
            "num-cpus": 4,
            "port": gcs,
            "node-ip-address": "127.0.0.1",
            "node-manager-port": manager,
            "object-manager-port": objects,
            "object-store-memory": 200 << 20,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent,
            "dashboard-agent-grpc-port": agent_grpc,
            "runtime-env-agent-port": env_agent,
            "ray-client-server-port": client,
            "metrics-export-port": metrics,
            "temp-dir": temp_dir,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        log = Path(f"{temp_dir}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*RAY, "start", "--head", "--block", "--disable-usage-stats", *arguments],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{agent}/api/local_raylet_healthz"
            wait_until_healthy(process, url, log)
            yield Cluster(address=f"http://127.0.0.1:{dashboard}", environment=environment)
        finally:
            end(process)
            log.unlink()


@pytest.fixture
def job_folder(tmp_path):
    """A working directory with a job file, and the prompts beside it."""
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    table = pa.table({"text": [f"Oak {i} is green." for i in range(20)], "n": range(20)})
    pq.write_table(table, prompts / "part-0.parquet")
    job = {
        "source": str(prompts),
        "sink": str(tmp_path / "answers"),
        "stage": {
            "model": "demo",
            "prompt": "{text}\n\nQuestion: What colour is the oak?",
            "sampling": {"max_tokens": 8},
            "pool": {"replicas": 1},
        },
    }
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder


def submit(cluster, folder, submission_id):
    """Run `ray job submit` as docs/jobs.md says and return the finished process."""
    runtime_env = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    return subprocess.run(
        [
            *RAY,
            *("job", "submit", "--address", cluster.address, "--submission-id", submission_id),
            *("--working-dir", str(folder), "--runtime-env-json", json.dumps(runtime_env)),
            *("--", sys.executable, "-m", "raybatch", "run", "job.yaml"),
        ],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=JOB_TIMEOUT_S,
    )


def test_submitted_job_writes_its_output_and_succeeds(cluster, job_folder):
    done = submit(cluster, job_folder, "rb-good")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows: 20 in, 20 out, 0 lost" in done.stdout
    answers = pq.read_table(job_folder.parent / "answers", columns=["n", "generated_text"])
    assert sorted(answers.column("n").to_pylist()) == list(range(20))


def test_submitted_job_with_a_wrong_option_fails_with_one_line(cluster, job_folder):
    job_file = job_folder / "job.yaml"
    job = json.loads(job_file.read_text())
    job["stage"]["promt"] = job["stage"].pop("prompt")
    job_file.write_text(json.dumps(job))
    done = submit(cluster, job_folder, "rb-bad")
    assert done.returncode != 0
    assert "did you mean 'prompt'" in done.stdout + done.stderr
