"""How a job has ended, and errors of Ray's client in one line."""

import sys
from types import SimpleNamespace

import pytest

from raybatch.errors import ConfigError, MissingDependency
from raybatch_submit.probe import Token
from raybatch_submit.submit import JobEnd, JobServer, read_end
from tests.submit.job_servers import serving

common = pytest.importorskip("ray.dashboard.modules.job.common")
pytest.importorskip("aiohttp")

VERSION = {"/api/version": {"ray_version": "2.60.0"}}


def job(status, code=None, message=None):
    status = common.JobStatus(status)
    return SimpleNamespace(status=status, driver_exit_code=code, message=message)


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_running_job_has_not_ended(status):
    assert read_end(job(status)) is None


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("FAILED", 2)])
def test_exit_code_of_the_job_is_kept(status, code):
    assert read_end(job(status, code)) == JobEnd(code)


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (job("STOPPED"), "the job was stopped"),
        (job("FAILED", 127), "the head node has no 'python' on its path"),
        (job("FAILED", -9), "the driver of the job ended with -9"),
        (job("FAILED", None, "Runtime env setup failed"), "Runtime env setup failed"),
        (job("FAILED"), "no reason given"),
    ],
)
def test_other_ends_are_1_with_a_reason(ended, reason):
    end = read_end(ended)
    assert (end.exit_code, reason in end.reason) == (1, True), end


def test_success_without_a_code_is_0():
    assert read_end(job("SUCCEEDED")) == JobEnd(0)


def test_missing_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingDependency, match=r"pip install -e \./raybatch-submit \(.*aiohttp"):
        JobServer("http://127.0.0.1:1", None)


def test_missing_token_is_one_line():
    with (
        serving(VERSION, token="t") as (url, _),
        pytest.raises(ConfigError, match=f"^{url}: the cluster requires a token; set RAY_AUTH"),
    ):
        JobServer(url, None)


def test_token_is_sent():
    with serving({**VERSION, "/api/jobs/": []}, token="t") as (url, _):
        assert JobServer(url, Token("t", "test")).running("k", "v") == []


def test_running_jobs_are_found_by_their_metadata():
    jobs = [
        {"type": "SUBMISSION", "submission_id": i, "status": s, "entrypoint": "", "metadata": m}
        for i, s, m in (
            ("a", "RUNNING", {"k": "v"}),
            ("b", "PENDING", {"k": "v"}),
            ("c", "FAILED", {"k": "v"}),
            ("d", "RUNNING", {"k": "w"}),
            ("e", "RUNNING", None),
        )
    ]
    with serving({**VERSION, "/api/jobs/": jobs}) as (url, _):
        assert JobServer(url, None).running("k", "v") == ["a", "b"]


def test_server_that_is_gone_is_one_line():
    with serving(VERSION) as (url, _):
        server = JobServer(url, None)
    with pytest.raises(ConfigError, match=f"^{url}: ") as caught:
        server.running("k", "v")
    assert "\n" not in str(caught.value)


def test_missing_agent_is_told_with_the_way_out():
    with serving(VERSION) as (url, _):
        server = JobServer(url, None)
    message = "Request failed with status code 500: No available agent to submit job, please"
    with (
        pytest.raises(ConfigError, match="own --dashboard-agent-listen-port"),
        server.as_one_line(),
    ):
        raise RuntimeError(message)
