"""What happens before a job is sent: who else writes to its sink, and whose address is taken."""

import pytest

from raybatch.errors import ConfigError
from raybatch_submit.submit import SINK_KEY, Console, submit
from tests.submit.job_servers import serving

pytest.importorskip("aiohttp")

JOB = {"source": "/in", "sink": "s3://b/out/", "stage": {"model": "demo", "prompt": "{a}"}}
RUNNING = {
    "type": "SUBMISSION",
    "submission_id": "first",
    "status": "RUNNING",
    "entrypoint": "",
    "metadata": {SINK_KEY: "s3://b/out"},
}


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    """Let Ray's client find no address."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def send(jobs, *, confirm, environment=None):
    """Submit to a server with these jobs, which takes none; return address, error and notes."""
    notes = []
    replies = {
        "/api/authentication_mode": {"authentication_mode": "disabled"},
        "/api/version": {"ray_version": "2.60.0"},
        "/api/jobs/": jobs,
    }
    console = Console(write=notes.append, note=notes.append, confirm=confirm)
    environment = {} if environment is None else environment
    with serving(replies) as (url, _), pytest.raises(ConfigError) as caught:
        submit(JOB, console, where="oak.yaml", environment=environment, address=url, wheel="none")
    return url, str(caught.value), notes


def test_running_job_with_the_same_sink_is_named():
    _, _, notes = send([RUNNING], confirm=lambda question: False)
    assert "warning: first already writes to s3://b/out; " in notes[0]


def test_who_says_no_submits_nothing():
    _, error, _ = send([RUNNING], confirm=lambda question: False)
    assert error == "not submitted"


@pytest.mark.parametrize("confirm", [None, lambda question: True])
def test_warning_does_not_stop_who_says_yes_or_cannot_be_asked(confirm):
    _, error, _ = send([RUNNING], confirm=confirm)
    assert error != "not submitted"


def test_other_jobs_are_not_warned_of():
    other = {**RUNNING, "metadata": {SINK_KEY: "s3://b/other"}}
    _, _, notes = send([other, {**RUNNING, "status": "FAILED"}], confirm=None)
    assert [note for note in notes if note.startswith("warning")] == []


def test_what_is_sent_is_told():
    _, _, notes = send([], confirm=None)
    assert notes == ["sending oak.yaml (1 KiB)"]


def test_given_address_is_put_where_the_client_of_ray_looks_first():
    environment = {"RAY_API_SERVER_ADDRESS": "http://other:1"}
    url, _, _ = send([], confirm=None, environment=environment)
    assert environment == {"RAY_API_SERVER_ADDRESS": url}


def test_refusal_of_the_server_is_one_line():
    url, error, _ = send([], confirm=None)
    assert (error.startswith(f"{url}: "), "\n" in error) == (True, False)
