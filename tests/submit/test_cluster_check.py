"""What a cluster gives away becomes a warning with the way out; a closed one gets none."""

import dataclasses

import pytest

from raybatch_submit.probe import ClusterStatus, find_warnings, probe_cluster
from tests.submit.job_servers import serving

CLOSED = ClusterStatus(
    address="http://127.0.0.1:8265",
    auth_mode="token",
    is_open=False,
    network_address=None,
    open_ports=(),
    open_metrics=(),
    were_ports_tried=True,
    token_file=None,
    token_file_mode=0,
    client_auth_mode="token",
)


def warnings(**changes):
    return find_warnings(dataclasses.replace(CLOSED, **changes))


def test_closed_cluster_gets_no_warning():
    assert warnings() == []


@pytest.mark.parametrize(
    ("changes", "problem", "way_out"),
    [
        ({"is_open": True}, "accepts jobs without a token", "RAY_AUTH_MODE=token"),
        ({"open_ports": ("raylet 10.0.0.5:1",)}, "raylet 10.0.0.5:1", "private network"),
        ({"open_metrics": ("http://10.0.0.5:2/metrics",)}, "without a token at", "firewall"),
        ({"were_ports_tried": False}, "refused", "RAY_AUTH_TOKEN_PATH"),
        ({"client_auth_mode": None}, "RAY_AUTH_MODE is not set here", "export RAY_AUTH_MODE=token"),
        ({"network_address": "https://head", "is_open": False}, "on the network", "127.0.0.1"),
    ],
)
def test_each_problem_is_one_warning_with_the_way_out(changes, problem, way_out):
    (warning,) = warnings(**changes)
    assert (problem in warning, way_out in warning) == (True, True), warning


def test_open_dashboard_without_tls_shows_the_token():
    messages = warnings(network_address="http://10.0.0.5:8265")
    assert ["the dashboard answers" in messages[0], "is not encrypted" in messages[1]] == [
        True,
        True,
    ]


def test_mode_is_not_asked_for_where_the_cluster_takes_everyone():
    (warning,) = warnings(auth_mode="disabled", is_open=True, client_auth_mode=None)
    assert "accepts jobs without a token" in warning


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0), (0o400, 0), (0o644, 1), (0o660, 1)])
def test_token_file_that_others_can_read_is_warned_of(tmp_path, mode, expected):
    messages = warnings(token_file=tmp_path / "t", token_file_mode=mode)
    assert [f"chmod 600 {tmp_path / 't'}" in warning for warning in messages] == [True] * expected


def replies(port, *, auth_mode="token"):
    """Return what a job server says, with a raylet and metrics on `port`."""
    ports = {"nodeManagerPort": port, "metricsExportPort": port}
    raylet = {"state": "ALIVE", "nodeManagerAddress": "127.0.0.1", **ports}
    dead = {"state": "DEAD", "nodeManagerAddress": "127.0.0.1", "objectManagerPort": port}
    return {
        "/": "dashboard",
        "/api/authentication_mode": {"authentication_mode": auth_mode},
        "/api/jobs/": [],
        "/nodes?view=summary": {"data": {"summary": [{"raylet": raylet}, {"raylet": dead}]}},
    }


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("t\n")
    path.chmod(0o644)
    return path


def probe(url, tmp_path, environment=None):
    # another loopback address stands for this host on its network
    return probe_cluster(url, environment or {}, tmp_path, network_host="127.0.0.2")


def test_probe_of_a_closed_cluster_finds_it_closed(tmp_path, token_file):
    with serving({"/metrics": "m"}) as (other, _):
        port = int(other.rpartition(":")[2])
        with serving(replies(port), token="t") as (url, _):
            facts = probe(url, tmp_path, {"RAY_AUTH_MODE": "token"})
    expected = dataclasses.replace(
        CLOSED, address=url, token_file=token_file, token_file_mode=0o644
    )
    assert facts == expected


def test_probe_finds_what_listens_on_the_network(tmp_path, token_file):
    with serving({"/metrics": "m"}, host="127.0.0.2") as (other, _):
        port = int(other.rpartition(":")[2])
        with serving(replies(port), token="t") as (url, _):
            facts = probe(url, tmp_path)
    assert (facts.open_ports, facts.open_metrics) == (
        (f"raylet 127.0.0.2:{port}",),
        (f"http://127.0.0.2:{port}/metrics",),
    )


def test_probe_finds_a_dashboard_on_every_interface(tmp_path):
    with serving(replies(1), host="0.0.0.0") as (url, _):
        facts = probe(url.replace("0.0.0.0", "127.0.0.1"), tmp_path)
    assert facts.network_address == url.replace("0.0.0.0", "127.0.0.2")


def test_probe_finds_a_cluster_that_takes_everyone(tmp_path):
    with serving(replies(1, auth_mode="disabled")) as (url, _):
        assert probe(url, tmp_path).is_open


def test_token_is_not_sent_to_a_cluster_that_does_not_ask(tmp_path, token_file):
    with serving(replies(1, auth_mode="disabled")) as (url, seen):
        probe(url, tmp_path)
    assert [headers for headers in seen if "Authorization" in headers] == []


def test_refused_list_of_hosts_is_known(tmp_path):
    with serving(replies(1), token="t") as (url, _):
        assert not probe(url, tmp_path).were_ports_tried
