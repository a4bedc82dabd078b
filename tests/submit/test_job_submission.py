"""The documented ways to a cluster, on a real local one: submit, check, and Ray's own client."""

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
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import raybatch
from raybatch_submit.probe import Token
from raybatch_submit.submit import SINK_KEY, JobServer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
RAYBATCH = (sys.executable, "-m", "raybatch")
# Ray Data starts 32 processes by default to read the footers of a few files
HEAD_VARIABLES = {"RAY_AUTH_MODE": "token", "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1"}
START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Cluster:
    """A running head node: where its job server listens, its token, who talks to it, its pid."""

    address: str
    token: str
    environment: dict[str, str]
    pid: int


def free_ports(count):
    """Return distinct free ports."""
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
    _, alive = psutil.wait_procs(family, timeout=5)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    if process.poll() is None:
        process.kill()
        process.wait()


def client_environment(token_file):
    """Return what somebody has who knows where the token lies, and nothing else about Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept.pop("PYTHONPATH", None)
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("aiohttp_cors", reason="the job server needs pip install 'ray[default]'")
    gcs, dashboard, agent, agent_grpc, client, metrics, manager, objects, env_agent = free_ports(9)
    # socket paths must stay short, pytest's folders are not
    with tempfile.TemporaryDirectory(prefix="rb", ignore_cleanup_errors=True) as temp_dir:
        token = secrets.token_hex(32)
        token_file = Path(temp_dir, "token")
        token_file.write_text(token)
        token_file.chmod(0o600)
        environment = client_environment(token_file)
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
                env={**environment, **HEAD_VARIABLES},
                # not the source tree: jobs must find raybatch in what is sent
                cwd=temp_dir,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{agent}/api/local_raylet_healthz"
            wait_until_healthy(process, url, log)
            address = f"http://127.0.0.1:{dashboard}"
            yield Cluster(address=address, token=token, environment=environment, pid=process.pid)
        finally:
            end(process)
            log.unlink()


def write_job(folder, *, texts, source=None, unit_rows=None, **fake):
    """Write prompts and a job file with the fake backend, and return the options of the job."""
    prompts = folder / "prompts"
    prompts.mkdir(parents=True)
    table = pa.table({"text": pa.array(texts, pa.string()), "n": range(len(texts))})
    pq.write_table(table, prompts / "part-0.parquet")
    job = {
        "source": source or str(prompts),
        "sink": str(folder / "answers"),
        "stage": {
            "model": "demo",
            "prompt": "{text}",
            "sampling": {"max_tokens": 8},
            "pool": {"replicas": 1},
            "backend": {"kind": "fake", "options": fake},
        },
    }
    if unit_rows is not None:
        job["plan"] = {"unit_rows": unit_rows, "max_unit_rows": unit_rows}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return job


def start(cluster, folder, *command, **variables):
    """Start a command of this source tree in the folder of a job."""
    return subprocess.Popen(
        command,
        env={**cluster.environment, "PYTHONPATH": str(ROOT), **variables},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_submit(cluster, folder, *flags):
    command = (*RAYBATCH, "submit", "job.yaml", "--address", cluster.address, *flags)
    return start(cluster, folder, *command)


def start_script(cluster, folder):
    """Start the script of `raybatch manifest ray`; it leaves the package to the hosts."""
    flags = ("--env", f"PYTHONPATH={ROOT}", "--output", "job.sh")
    code, _, err = finish(start(cluster, folder, *RAYBATCH, "manifest", "ray", "job.yaml", *flags))
    assert code == 0, err
    return start(cluster, folder, "sh", "job.sh", RAY_API_SERVER_ADDRESS=cluster.address)


def finish(process):
    """Return exit code, output and notes of a command."""
    out, err = process.communicate(timeout=JOB_TIMEOUT_S)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory):
    """Jobs of every outcome: two good ones, one with a bad row, and one without its source."""
    names = ("good", "bad_row", "no_source", "script")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    texts = [f"Oak {i} is green." for i in range(20)]
    write_job(folders["good"], texts=texts)
    write_job(folders["bad_row"], texts=[*texts, None], source="prompts")
    write_job(folders["no_source"], texts=texts)
    write_job(folders["script"], texts=texts)
    (folders["no_source"] / "prompts" / "part-0.parquet").unlink()
    # the prompts of this one go with the job, in its working directory
    flags = {"bad_row": ("--working-dir", ".")}
    # the code is new to the host for all of them
    running = {
        name: start_submit(cluster, folders[name], *flags.get(name, ())) for name in names[:3]
    }
    running["script"] = start_script(cluster, folders["script"])
    return {name: (*finish(process), folders[name]) for name, process in running.items()}


def test_submitted_job_ends_with_0_and_its_log_is_shown(ended):
    code, out, err, _ = ended["good"]
    assert (code, "rows: 20 in, 20 out, 0 lost" in out) == (0, True), out + err


def test_submitted_job_writes_every_row(ended):
    answers = pq.read_table(ended["good"][3] / "answers", columns=["n"])
    assert sorted(answers.column("n").to_pylist()) == list(range(20))


def test_submit_says_whose_token_it_sends_and_what(ended):
    token, sent, job = ended["good"][2].splitlines()
    assert token.startswith("the cluster requires a token: sending the one from ")
    assert sent == f"sending job.yaml (1 KiB) and raybatch-{raybatch.__version__}"
    assert job.startswith("job ")


def test_submitted_job_with_a_bad_row_ends_with_2(ended):
    code, out, err, _ = ended["bad_row"]
    assert (code, "rows: 21 in, 21 out, 0 lost" in out) == (2, True), out + err


def test_submitted_job_that_cannot_run_ends_with_1(ended):
    code, out, err, _ = ended["no_source"]
    assert (code, "has no file" in out) == (1, True), out + err


def test_wrong_option_is_told_before_anything_is_sent(cluster, tmp_path):
    job = write_job(tmp_path, texts=["a"])
    job["stage"]["promt"] = job["stage"].pop("prompt")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    code, out, err = finish(start_submit(cluster, tmp_path))
    message = "error: job.yaml: stage: unknown option 'promt' (did you mean 'prompt'?)\n"
    assert (code, out, err) == (1, "", message)


def test_wrong_token_is_one_line(cluster, tmp_path):
    write_job(tmp_path, texts=["a"])
    environment = {**cluster.environment, "RAY_AUTH_TOKEN": "wrong"}
    wrong = replace(cluster, token="", environment=environment)
    code, _, err = finish(start_submit(wrong, tmp_path))
    message = err.splitlines()[-1]
    assert (code, message.startswith(f"error: {cluster.address}: ")) == (1, True), message
    assert "token" in message
    assert "RAY_AUTH_TOKEN_PATH" in message


def test_ctrl_c_leaves_the_job_and_a_second_run_on_its_sink_is_warned_of(cluster, tmp_path):
    job = write_job(tmp_path, texts=["a"], start_s=300.0)
    first = start_submit(cluster, tmp_path, "--submission-id", "slow")
    server = JobServer(cluster.address, Token(cluster.token, "test"))
    wait_for_note(first, "job slow is at")
    first.send_signal(signal.SIGINT)
    code, _, err = finish(first)
    assert (code, "follow it with" in err) == (130, True), err
    assert ["slow"] == server.running(SINK_KEY, job["sink"])
    second = start_submit(cluster, tmp_path, "--no-wait", "--submission-id", "beside", "--yes")
    code, out, err = finish(second)
    assert (code, out) == (0, "beside\n"), err
    assert f"warning: slow already writes to {job['sink']}" in err
    for submission_id in ("slow", "beside"):
        server._client.stop_job(submission_id)


def wait_for_note(process, text):
    """Read what a command says until it says `text`."""
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"ended without saying {text!r}")


def test_check_finds_a_closed_cluster_closed(cluster, tmp_path):
    command = (*RAYBATCH, "check", "--address", cluster.address)
    _, out, err = finish(start(cluster, tmp_path, *command, RAY_AUTH_MODE="token"))
    # Ray listens on every interface, regardless of the head's options; the rest is closed
    open_ports = ("warning: Ray's own ports answer", "warning: metrics are readable")
    lines = [line for line in out.splitlines() if not line.startswith(open_ports)]
    assert lines in ([], [f"{cluster.address}: nothing to warn about"]), out + err


def test_the_script_of_the_manifest_runs_a_job(ended):
    code, out, err, _ = ended["script"]
    assert (code, "rows: 20 in, 20 out, 0 lost" in out) == (0, True), out + err


def kill_when_written(cluster, data, num_parts):
    """End a job's driver and its workers once `num_parts` units are written."""
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    while len(list(data.glob("*.parquet"))) < num_parts:
        assert time.monotonic() < deadline_s, f"{data} does not fill"
        time.sleep(0.02)
    marks = ("-m raybatch run", "ray::Replica", "ray::Coordinator", "ray::MapWorker")
    killed = set()
    for process in psutil.Process(cluster.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if mark := next((mark for mark in marks if mark in command), None):
                process.kill()
                killed.add(mark)
    assert killed.issuperset(marks[:2]), killed


def test_a_submitted_job_that_is_killed_twice_ends_with_every_row_once(cluster, tmp_path):
    texts = [f"Oak {i} is green." for i in range(300)]
    job = write_job(tmp_path, texts=texts, unit_rows=5, step_s=0.02, max_num_seqs=8)
    sink = Path(job["sink"])
    for number, num_parts in enumerate((5, 25)):
        running = start_submit(cluster, tmp_path, "--submission-id", f"killed-{number}")
        kill_when_written(cluster, sink / "data", num_parts)
        code, out, err = finish(running)
        assert code, out + err
        assert not (sink / "_SUCCESS").exists()
    code, out, err = finish(start_submit(cluster, tmp_path, "--submission-id", "killed-last"))
    assert (code, "rows: 300 in, 300 out, 0 lost" in out) == (0, True), out + err
    code, out, err = finish(start(cluster, tmp_path, *RAYBATCH, "verify", str(sink), "--deep"))
    assert code == 0, out + err
    rows = pq.read_table(sink, columns=["n"]).column("n").to_pylist()
    assert sorted(rows) == list(range(300))
