"""Addresses are parsed, and job servers are distinguished from other servers."""

import pytest

from raybatch.errors import ConfigError
from raybatch_submit.probe import (
    accepts_connections,
    get,
    is_loopback,
    read_address,
    server_auth_mode,
)
from tests.submit.job_servers import serving

ENVIRONMENT = {"RAY_API_SERVER_ADDRESS": "http://api:1", "RAY_ADDRESS": "http://ray:2"}


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ("http://head:8265/", ENVIRONMENT, "http://head:8265"),
        (None, ENVIRONMENT, "http://api:1"),
        (None, {"RAY_ADDRESS": "http://ray:2"}, "http://ray:2"),
        (None, {"RAY_ADDRESS": "head:6379"}, "http://127.0.0.1:8265"),
        (None, {}, "http://127.0.0.1:8265"),
        ("head:8265", {}, "http://head:8265"),
        ("https://head", {}, "https://head"),
    ],
)
def test_address_is_the_first_that_is_given(given, environment, expected):
    assert read_address(given, environment) == expected


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "http://", "auto://x", "http://[x", "head:99999"]
)
def test_other_address_says_which_one_is_meant(address):
    with pytest.raises(ConfigError, match="not the address of a job server"):
        read_address(address, {})


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_job_server_says_its_mode(mode):
    with serving({"/api/authentication_mode": {"authentication_mode": mode}}) as (url, _):
        assert server_auth_mode(url) == mode


def test_older_job_server_says_nothing():
    with serving({"/api/version": {"ray_version": "2.40.0"}}) as (url, _):
        assert server_auth_mode(url) is None


def test_older_job_server_behind_a_token_says_nothing():
    with serving({}, token="t") as (url, _):
        assert server_auth_mode(f"{url}/behind") is None


def test_other_server_is_told_apart():
    with (
        serving({"/api/authentication_mode": "<html>", "/api/version": "[1"}) as (url, _),
        pytest.raises(ConfigError, match="not a Ray job server"),
    ):
        server_auth_mode(url)


def test_refused_connection_says_what_to_give():
    with serving({}) as (url, _):
        pass
    with pytest.raises(ConfigError, match=r"no job server answers at .*--address .*ssh -L"):
        server_auth_mode(url)


def test_token_is_sent_where_it_is_given():
    with serving({"/x": {}}, token="t") as (url, _):
        assert [get(f"{url}/x").status, get(f"{url}/x", token="t").status] == [401, 200]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "http://127.0.0.2:1", "http://[::1]"])
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "head", "http://head:1", ""])
def test_other_hosts_are_not_loopback(host):
    assert not is_loopback(host)


def test_listening_port_accepts():
    with serving({}) as (url, _):
        port = int(url.rpartition(":")[2])
        assert accepts_connections("127.0.0.1", port)
    assert not accepts_connections("127.0.0.1", port)
