"""What of a cluster is open to others: facts from outside, and a warning for each bad one."""

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from raybatch.submission.probe import (
    accepts_connections,
    address_on_network,
    get,
    is_loopback,
    server_auth_mode,
)
from raybatch.submission.tokens import find_token, token_path

_METRICS = "metrics"
# by their names in Ray's list of nodes
_NODE_PORTS = {
    "nodeManagerPort": "raylet",
    "objectManagerPort": "object manager",
    "metricsExportPort": _METRICS,
}
_QUICK_S = 2.0


class _Place(NamedTuple):
    what: str
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """What was found about a cluster.

    Args:
        auth_mode: what the job server says; None where it does not.
        is_open: the list of jobs is given to those who have no token.
        network_address: where the dashboard answers on the network; None if it does not.
        open_ports: of Ray itself, on the network, such as "raylet 10.0.0.5:41123".
        open_metrics: URLs that give metrics to those who have no token.
        were_ports_tried: False where the list of nodes was refused.
        token_file: in which Ray looks for the token; None where there is no such file.
        client_auth_mode: RAY_AUTH_MODE of this process; None if not set.
    """

    address: str
    auth_mode: str | None
    is_open: bool
    network_address: str | None
    open_ports: tuple[str, ...]
    open_metrics: tuple[str, ...]
    were_ports_tried: bool
    token_file: Path | None
    token_file_mode: int
    client_auth_mode: str | None


def find_warnings(facts: ClusterFacts) -> list[str]:
    """Return what is wrong, each with the way out."""
    return [*_of_dashboard(facts), *_of_ports(facts), *_of_token(facts)]


def probe_cluster(
    address: str, environment: Mapping[str, str], home: Path, *, network_host: str | None = None
) -> ClusterFacts:
    """Ask a cluster, as somebody without a token and as its user, what it gives away.

    `network_host` is this host on its network; None finds it out.

    Raises:
        ConfigError: no job server answers at the address.
    """
    auth_mode = server_auth_mode(address)
    is_local = is_loopback(address)
    network_host = (network_host or address_on_network()) if is_local else None
    on_network = _on_network(address, network_host) if is_local else address
    is_reached = on_network is not None and get(on_network, timeout_s=_QUICK_S) is not None
    jobs = get(f"{address}/api/jobs/")
    # a server that asks for no token gets none
    token = find_token(environment, home) if auth_mode == "token" else None
    nodes = get(f"{address}/nodes?view=summary", token=token.value if token else None)
    listening = _listening(nodes.json() if nodes is not None and nodes.status == 200 else None)
    places = _on_hosts(listening, network_host)
    file = token_path(environment, home)
    is_file = file.is_file()
    return ClusterFacts(
        address=address,
        auth_mode=auth_mode,
        is_open=jobs is not None and jobs.status == 200,
        network_address=on_network if is_reached else None,
        open_ports=_open_ports(places),
        open_metrics=_open_metrics(places),
        were_ports_tried=bool(listening),
        token_file=file if is_file else None,
        token_file_mode=stat.S_IMODE(file.stat().st_mode) if is_file else 0,
        client_auth_mode=environment.get("RAY_AUTH_MODE") or None,
    )


def _of_dashboard(facts: ClusterFacts) -> Iterator[str]:
    if facts.is_open:
        yield (
            f"{facts.address} takes jobs without a token, and whoever sends one runs code on the "
            "cluster; start the cluster with RAY_AUTH_MODE=token"
        )
    if facts.network_address is not None:
        yield (
            f"the dashboard answers on the network at {facts.network_address}; start the head "
            "with --dashboard-host=127.0.0.1 and reach it through a tunnel, or close the port"
        )
        if facts.network_address.startswith("http://") and not facts.is_open:
            yield (
                f"a token sent to {facts.network_address} travels in clear; use a tunnel, or put "
                "TLS in front"
            )


def _of_ports(facts: ClusterFacts) -> Iterator[str]:
    if facts.open_ports:
        yield (
            f"Ray's own ports answer on the network ({', '.join(facts.open_ports)}), and so do "
            "those of its workers; keep all hosts in a private network, with a firewall, and set "
            "RAY_USE_TLS=1 between hosts"
        )
    if facts.open_metrics:
        yield (
            f"metrics are given without a token at {', '.join(facts.open_metrics)}; let the "
            "firewall pass the metrics server alone"
        )
    if not facts.were_ports_tried:
        yield (
            "the list of hosts was refused, so their ports were not tried; give the token of the "
            "cluster in RAY_AUTH_TOKEN_PATH"
        )


def _of_token(facts: ClusterFacts) -> Iterator[str]:
    if facts.token_file is not None and facts.token_file_mode & 0o077:
        yield (
            f"{facts.token_file} can be read by others (mode {facts.token_file_mode:03o}): "
            f"chmod 600 {facts.token_file}"
        )
    if facts.auth_mode == "token" and facts.client_auth_mode != "token":
        yield (
            "the cluster asks for a token and RAY_AUTH_MODE is not set here: 'ray job' and the "
            "Python clients get 401 (raybatch submit does not); export RAY_AUTH_MODE=token"
        )


def _on_network(address: str, network_host: str | None) -> str | None:
    """Return the URL of the same port on the network."""
    if network_host is None:
        return None
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{network_host}:{port}"


def _listening(nodes: Any) -> list[_Place]:  # noqa: ANN401 - Ray's JSON
    """Return what the living hosts of a cluster say that they listen on."""
    places = []
    for node in ((nodes or {}).get("data") or {}).get("summary") or []:
        raylet = node.get("raylet") or {}
        host = str(raylet.get("nodeManagerAddress") or node.get("ip") or "")
        if raylet.get("state") == "ALIVE" and host:
            places += [
                _Place(what, host, int(raylet[key]))
                for key, what in _NODE_PORTS.items()
                if raylet.get(key)
            ]
    return places


def _on_hosts(listening: list[_Place], network_host: str | None) -> list[_Place]:
    """Return the same ports at the addresses that others reach."""
    places = {place for place in listening if not is_loopback(place.host)}
    if network_host is not None:
        places |= {place._replace(host=network_host) for place in listening}
    return sorted(places)


def _open_ports(places: list[_Place]) -> tuple[str, ...]:
    return tuple(
        f"{place.what} {place.host}:{place.port}"
        for place in places
        if place.what != _METRICS and accepts_connections(place.host, place.port)
    )


def _open_metrics(places: list[_Place]) -> tuple[str, ...]:
    urls = [f"http://{host}:{port}/metrics" for what, host, port in places if what == _METRICS]
    replies = {url: get(url, timeout_s=_QUICK_S) for url in urls}
    return tuple(url for url, reply in replies.items() if reply and reply.status == 200)
