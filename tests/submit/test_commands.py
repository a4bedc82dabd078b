"""The commands on clusters: what they take, what they refuse, and how they end."""

import os
import re
from pathlib import Path

import pytest
import typer.main
import yaml

from raybatch.cli.app import app
from tests.cli.test_cli import run_main
from tests.submit.job_servers import serving

JOB = {"source": "/data/in", "sink": "s3://b/out", "stage": {"model": "demo", "prompt": "{a}"}}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    """Let nothing of this host's Ray be found, and go into an empty folder."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # the command line leaves the address there for Ray's client
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def job_file(tmp_path):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return "job.yaml"


@pytest.fixture
def nobody():
    """An address without a listener."""
    with serving({}) as (url, _):
        pass
    return url


def test_submit_takes_the_flags_of_a_job():
    commands = typer.main.get_command(app).commands
    names = {name: {p.name for p in commands[name].params} for name in ("run", "submit")}
    own = {"address", "submission_id", "no_wait", "working_dir", "wheel", "env", "yes"}
    of_batch_files = {"openai", "out", "errors", "model_name"}
    assert names["submit"] - own == names["run"] - of_batch_files - {"limit"}


def test_documented_flags_of_submit_are_its_own():
    page = (Path(__file__).parents[2] / "docs" / "start" / "on-a-cluster.md").read_text()
    table = page.split("| flag | meaning |\n")[1].split("\n\n")[0]
    commands = typer.main.get_command(app).commands
    shared = {option for p in commands["run"].params for option in p.opts}
    own = {option for p in commands["submit"].params for option in p.opts} - shared
    assert set(re.findall(r"^\| `(--[a-z-]+)", table, re.MULTILINE)) == own - {"--address"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "answers"], "sink 'answers' is relative"),
        (["--input", "prompts"], "source 'prompts' is relative"),
        (["--set", "promt=x"], "job.yaml: stage: unknown option 'promt'"),
        (["--env", "HF_TOKEN=x"], "--env HF_TOKEN is a secret"),
        (["--submission-id", "a b"], "--submission-id 'a b': use letters"),
        (["--address", "ray://head:10001"], "not the address of a job server"),
    ],
)
def test_submit_refuses_before_anything_is_sent(monkeypatch, capsys, job_file, flags, message):
    code = run_main(monkeypatch, "submit", job_file, *flags)
    err = capsys.readouterr().err
    assert (code, message in err, err.count("\n")) == (1, True, 1), err


def test_submit_where_nobody_listens_is_one_line(monkeypatch, capsys, job_file, nobody):
    code = run_main(monkeypatch, "submit", job_file, "--address", nobody)
    err = capsys.readouterr().err
    assert (code, err.startswith(f"error: no job server answers at {nobody}")) == (1, True), err


def test_submit_without_a_token_is_one_line(monkeypatch, capsys, job_file):
    replies = {"/api/authentication_mode": {"authentication_mode": "token"}}
    with serving(replies, token="t") as (url, _):
        code = run_main(monkeypatch, "submit", job_file, "--address", url)
    err = capsys.readouterr().err
    assert (code, f"error: {url} requires a token, but none was found" in err) == (1, True), err


def test_manifest_is_printed(monkeypatch, capsys, job_file):
    code = run_main(monkeypatch, "manifest", "kuberay", job_file, "--image", "oak:1")
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert (code, kinds) == (0, ["ConfigMap", "RayJob"])


def test_manifest_is_written_to_a_file(monkeypatch, capsys, job_file, tmp_path):
    flags = ["--image", "oak:1", "--output", "oak.yaml"]
    code = run_main(monkeypatch, "manifest", "anyscale", job_file, *flags)
    written = yaml.safe_load((tmp_path / "oak.yaml").read_text())
    assert (code, written["image_uri"], capsys.readouterr().out) == (0, "oak:1", "")


def test_every_flag_of_pods_reaches_the_manifest(monkeypatch, capsys, job_file):
    flags = {
        "--gpus-per-pod": ("8", "nvidia.com/gpu: '8'"),
        "--cpus-per-pod": ("88", "cpu: '88'"),
        "--memory-per-pod": ("700Gi", "memory: 700Gi"),
        "--head-cpus": ("7", "cpu: '7'"),
        "--head-memory": ("31Gi", "memory: 31Gi"),
        "--secret": ("HF_TOKEN=hub:token", "secretKeyRef"),
        "--model-volume": ("weights", "claimName: weights"),
        "--spill-size": ("321Gi", "sizeLimit: 321Gi"),
        "--image-pull-secret": ("registry", "imagePullSecrets"),
        "--queue": ("nights", "queue-name: nights"),
        "--node-selector": ("pool=spot", "pool: spot"),
        "--toleration": ("spot:NoExecute", "effect: NoExecute"),
    }
    given = [word for flag, (value, _) in flags.items() for word in (flag, value)]
    code = run_main(monkeypatch, "manifest", "kuberay", job_file, "--image", "oak:1", *given)
    text = capsys.readouterr().out
    missing = [flag for flag, (_, expected) in flags.items() if expected not in text]
    assert (code, missing) == (0, [])


def test_manifest_notes_what_hosts_need(monkeypatch, capsys, job_file):
    run_main(monkeypatch, "manifest", "ray", job_file)
    assert capsys.readouterr().err == "note: source /data/in must exist on every host\n"


def test_manifest_refuses_secrets(monkeypatch, capsys, job_file):
    code = run_main(monkeypatch, "manifest", "ray", job_file, "--env", "API_KEY=x")
    assert (code, "--env API_KEY is a secret" in capsys.readouterr().err) == (1, True)


def test_manifest_that_cannot_be_written_is_one_line(monkeypatch, capsys, job_file):
    code = run_main(monkeypatch, "manifest", "ray", job_file, "--output", "no/such/file")
    err = capsys.readouterr().err
    assert (code, "error: --output no/such/file: cannot write it" in err) == (1, True), err


def test_check_of_an_open_cluster_ends_with_1(monkeypatch, capsys):
    replies = {
        "/api/authentication_mode": {"authentication_mode": "disabled"},
        "/api/jobs/": [],
        "/nodes?view=summary": {"data": {"summary": []}},
    }
    with serving(replies) as (url, _):
        code = run_main(monkeypatch, "check", "--address", url)
    out = capsys.readouterr().out
    assert (code, f"warning: {url} accepts jobs without a token" in out) == (1, True), out


def test_check_where_nobody_listens_is_one_line(monkeypatch, capsys, nobody):
    code = run_main(monkeypatch, "check", "--address", nobody)
    err = capsys.readouterr().err
    assert (code, f"error: no job server answers at {nobody}" in err) == (1, True), err
