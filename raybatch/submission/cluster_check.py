"""What of a cluster is open to others: facts from outside, and a warning for each bad one."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from raybatch.submission.probe import (
    QUICK_S,
    Reply,
    accepts_connections,
    address_on_network,
    find_token,
    get,
    is_loopback,
    server_auth_mode,
    token_path,
)

_METRICS = "metrics"
# by their names in Ray's list of nodes
_NODE_PORTS = {
    "nodeManagerPort": "raylet",
    "objectManagerPort": "object manager",
    "metricsExportPort": _METRICS,
}


class _Place(NamedTuple):
    what: str
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    address: str
    auth_mode: str | None
    """What the job server says; None where it does not."""
    is_open: bool
    """The list of jobs is given to those who have no token."""
    network_address: str | None
    """Where the dashboard answers on the network; None if it does not."""
    open_ports: tuple[str, ...]
    """Of Ray itself, on the network, such as "raylet 10.0.0.5:41123"."""
    open_metrics: tuple[str, ...]
    """URLs that give metrics to those who have no token."""
    were_ports_tried: bool
    """False where the list of nodes was refused."""
    token_file: Path | None
    """In which Ray looks for the token; None where there is no such file."""
    token_file_mode: int
    client_auth_mode: str | None
    """RAY_AUTH_MODE of this process; None if not set."""


def find_warnings(facts: ClusterFacts) -> list[str]:
    """Return what is wrong, each with the way out."""
    dashboard = facts.network_address or ""
    mode, file = facts.token_file_mode, facts.token_file
    checks = (
        (
            facts.is_open,
            f"{facts.address} takes jobs without a token, and whoever sends one runs code on the "
            "cluster; start the cluster with RAY_AUTH_MODE=token",
        ),
        (
            dashboard,
            f"the dashboard answers on the network at {dashboard}; start the head "
            "with --dashboard-host=127.0.0.1 and reach it through a tunnel, or close the port",
        ),
        (
            dashboard.startswith("http://") and not facts.is_open,
            f"a token sent to {dashboard} travels in clear; use a tunnel, or put TLS in front",
        ),
        (
            facts.open_ports,
            f"Ray's own ports answer on the network ({', '.join(facts.open_ports)}), and so do "
            "those of its workers; keep all hosts in a private network, with a firewall, and set "
            "RAY_USE_TLS=1 between hosts",
        ),
        (
            facts.open_metrics,
            f"metrics are given without a token at {', '.join(facts.open_metrics)}; let the "
            "firewall pass the metrics server alone",
        ),
        (
            not facts.were_ports_tried,
            "the list of hosts was refused, so their ports were not tried; give the token of the "
            "cluster in RAY_AUTH_TOKEN_PATH",
        ),
        (
            file is not None and mode & 0o077,
            f"{file} can be read by others (mode {mode:03o}): chmod 600 {file}",
        ),
        (
            facts.auth_mode == "token" and facts.client_auth_mode != "token",
            "the cluster asks for a token and RAY_AUTH_MODE is not set here: 'ray job' and the "
            "Python clients get 401 (raybatch submit does not); export RAY_AUTH_MODE=token",
        ),
    )
    return [warning for is_so, warning in checks if is_so]


def probe_cluster(
    address: str, environment: Mapping[str, str], home: Path, *, network_host: str | None = None
) -> ClusterFacts:
    """Ask a cluster, as somebody without a token and as its user, what it gives away.

    `network_host` is this host on its network; None finds it out. ConfigError: no server answers.
    """
    auth_mode = server_auth_mode(address)
    is_local = is_loopback(address)
    network_host = (network_host or address_on_network()) if is_local else None
    on_network: str | None = address
    if is_local:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        on_network = f"{parts.scheme}://{network_host}:{port}" if network_host else None
    is_reached = on_network is not None and get(on_network, timeout_s=QUICK_S) is not None
    jobs = get(f"{address}/api/jobs/")
    # a server that asks for no token gets none
    token = find_token(environment, home) if auth_mode == "token" else None
    listening = _listening(
        get(f"{address}/nodes?view=summary", token=token.value if token else None)
    )
    # the same ports at the addresses that others reach
    places = {place for place in listening if not is_loopback(place.host)}
    if network_host is not None:
        places |= {place._replace(host=network_host) for place in listening}
    metrics = [f"http://{host}:{port}/metrics" for w, host, port in sorted(places) if w == _METRICS]
    file = token_path(environment, home)
    is_file = file.is_file()
    return ClusterFacts(
        address=address,
        auth_mode=auth_mode,
        is_open=jobs is not None and jobs.status == 200,
        network_address=on_network if is_reached else None,
        open_ports=tuple(
            f"{what} {host}:{port}"
            for what, host, port in sorted(places)
            if what != _METRICS and accepts_connections(host, port)
        ),
        open_metrics=tuple(
            url for url in metrics if (reply := get(url, timeout_s=QUICK_S)) and reply.status == 200
        ),
        were_ports_tried=bool(listening),
        token_file=file if is_file else None,
        token_file_mode=stat.S_IMODE(file.stat().st_mode) if is_file else 0,
        client_auth_mode=environment.get("RAY_AUTH_MODE") or None,
    )


def _listening(nodes: Reply | None) -> list[_Place]:
    """Return what the living hosts of a cluster say that they listen on."""
    data = nodes.member("data") if nodes is not None and nodes.status == 200 else None
    places = []
    for node in (data or {}).get("summary") or []:
        raylet = node.get("raylet") or {}
        host = str(raylet.get("nodeManagerAddress") or node.get("ip") or "")
        if raylet.get("state") == "ALIVE" and host:
            places += [
                _Place(what, host, int(raylet[key]))
                for key, what in _NODE_PORTS.items()
                if raylet.get(key)
            ]
    return places
