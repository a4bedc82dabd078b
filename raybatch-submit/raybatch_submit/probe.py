"""Probes a job server: its authentication mode, the token it needs, and services open to others.

Ray's job clients send the token only if RAY_AUTH_MODE=token is set in their process, whatever the
cluster needs; here the server's authentication mode is read first.
"""

import json
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from raybatch.errors import ConfigError

_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_TIMEOUT_S = 10.0
_FAST_S = 2.0
# limit for replies: a job server's are far smaller, others may be endless
_MAX_BYTES = 8 << 20
_METRICS = "metrics"
# ports by their names in Ray's list of nodes
_NODE_PORTS = {
    "nodeManagerPort": "raylet",
    "objectManagerPort": "object manager",
    "metricsExportPort": _METRICS,
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token and its origin, a variable or a file."""

    value: str = field(repr=False)
    origin: str


def token_path(environment: Mapping[str, str], home: Path) -> Path:
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    return Path(named).expanduser() if named else home / ".ray" / "auth_token"


def find_token(environment: Mapping[str, str], home: Path) -> Token | None:
    """Return the token that Ray would use; ConfigError: RAY_AUTH_TOKEN_PATH cannot be read."""
    value = environment.get("RAY_AUTH_TOKEN", "").strip()
    if value:
        return Token(value, "RAY_AUTH_TOKEN")
    path = token_path(environment, home)
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        if environment.get("RAY_AUTH_TOKEN_PATH"):
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: {path} cannot be read: {error}") from error
    return Token(value, str(path)) if value else None


def token_for(
    auth_mode: str | None, environment: Mapping[str, str], home: Path, *, address: str
) -> Token | None:
    """Return the token that a job server requires, if any; ConfigError: there is none here."""
    # old servers do not report their mode: the user's setting decides
    if (auth_mode or environment.get("RAY_AUTH_MODE", "").lower()) != "token":
        return None
    token = find_token(environment, home)
    if token is None:
        raise ConfigError(
            f"{address} requires a token, but none was found: copy the cluster's token into "
            "~/.ray/auth_token (mode 600), or name its file in RAY_AUTH_TOKEN_PATH; on Kubernetes "
            "it is in the secret with the cluster's name"
        )
    return token


def read_address(address: str | None, environment: Mapping[str, str]) -> str:
    """Return the URL of the job server; ConfigError: it is not a URL.

    The default is RAY_API_SERVER_ADDRESS, then RAY_ADDRESS if it is a URL, then the usual port of
    this host.
    """
    address = address or environment.get("RAY_API_SERVER_ADDRESS")
    if not address:
        other = environment.get("RAY_ADDRESS", "")
        address = other if other.startswith("http") else _DEFAULT_ADDRESS
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")) or not _host(address):
        raise ConfigError(
            f"--address {address} is not the address of a job server; use that of the dashboard, "
            "such as http://HEAD:8265"
        )
    return address.rstrip("/")


@dataclass(frozen=True, slots=True)
class ServerReply:
    status: int
    text: str

    def member(self, name: str) -> Any:  # noqa: ANN401 - it is somebody else's
        """Return a member of the body; None if the body is no JSON object with it."""
        try:
            body = json.loads(self.text)
        except ValueError:
            return None
        return body.get(name) if isinstance(body, dict) else None


def get(url: str, *, timeout_s: float = _TIMEOUT_S, token: str | None = None) -> ServerReply | None:
    """Request `url` and return the reply; None if no HTTP server answers."""
    request = urllib.request.Request(url)
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    # a proxy would answer for closed ports of this host
    handlers = [urllib.request.ProxyHandler({})] if is_loopback(url) else []
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return ServerReply(answer.status, answer.read(_MAX_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            return ServerReply(error.code, error.read(_MAX_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException):
        return None


def server_auth_mode(address: str) -> str | None:
    """Return "token" or "disabled", None where a server is too old; ConfigError: none answers."""
    reply = get(f"{address}/api/authentication_mode")
    if reply is None:
        raise ConfigError(
            f"no job server answers at {address}: set the address of the dashboard with --address "
            "(http://HEAD:8265), or open a tunnel to it, such as "
            "'ssh -L 8265:127.0.0.1:8265 HEAD' or 'kubectl port-forward svc/NAME-head-svc 8265'"
        )
    if (mode := reply.member("authentication_mode")) is not None:
        return str(mode)
    version = get(f"{address}/api/version")
    if version is not None and (version.status in (401, 403) or version.member("ray_version")):
        return None
    raise ConfigError(
        f"the server at {address} is not a Ray job server; use the address of the dashboard, such "
        "as http://HEAD:8265 (not the port of the cluster or of the Ray client)"
    )


def is_loopback(address: str) -> bool:
    """Return whether a URL or host is this host's loopback interface."""
    host = _host(address) if "://" in address else address
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def address_on_network() -> str | None:
    """Return the address of this host on its network; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing: it only selects the network interface
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        host = str(probe.getsockname()[0])
    return None if is_loopback(host) else host


def accepts_connections(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_FAST_S):
            return True
    except OSError:
        return False


def _host(address: str) -> str:
    """Return the host of a URL, or "" where host or port are malformed."""
    try:
        parts = urlsplit(address)
        return parts.hostname or "" if parts.port != 0 else ""
    except ValueError:
        return ""


class _Endpoint(NamedTuple):
    what: str
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus:
    address: str
    auth_mode: str | None
    """As reported by the job server; None if it does not report it."""
    is_open: bool
    """The list of jobs is readable without a token."""
    network_address: str | None
    """Address at which the dashboard answers on the network; None if it does not."""
    open_ports: tuple[str, ...]
    """Ray's own ports open on the network, such as "raylet 10.0.0.5:41123"."""
    open_metrics: tuple[str, ...]
    """URLs of metrics readable without a token."""
    were_ports_tried: bool
    """False if the list of nodes was refused."""
    token_file: Path | None
    """Ray's token file; None if it does not exist."""
    token_file_mode: int
    client_auth_mode: str | None
    """RAY_AUTH_MODE of this process; None if not set."""


def find_warnings(cluster: ClusterStatus) -> list[str]:
    """Return warnings, each with what to do."""
    dashboard = cluster.network_address or ""
    mode, file = cluster.token_file_mode, cluster.token_file
    checks = (
        (
            cluster.is_open,
            f"{cluster.address} accepts jobs without a token, so anyone can run code on the "
            "cluster; start the cluster with RAY_AUTH_MODE=token",
        ),
        (
            dashboard,
            f"the dashboard answers on the network at {dashboard}; start the head "
            "with --dashboard-host=127.0.0.1 and reach it through a tunnel, or close the port",
        ),
        (
            dashboard.startswith("http://") and not cluster.is_open,
            f"a token sent to {dashboard} is not encrypted; use a tunnel, or put TLS in front",
        ),
        (
            cluster.open_ports,
            f"Ray's own ports answer on the network ({', '.join(cluster.open_ports)}), and so do "
            "those of its workers; keep all hosts in a private network, with a firewall, and set "
            "RAY_USE_TLS=1 between hosts",
        ),
        (
            cluster.open_metrics,
            f"metrics are readable without a token at {', '.join(cluster.open_metrics)}; allow "
            "only the metrics server in the firewall",
        ),
        (
            not cluster.were_ports_tried,
            "the list of hosts was refused, so their ports were not checked; set the cluster's "
            "token with RAY_AUTH_TOKEN_PATH",
        ),
        (
            file is not None and mode & 0o077,
            f"{file} can be read by others (mode {mode:03o}): chmod 600 {file}",
        ),
        (
            cluster.auth_mode == "token" and cluster.client_auth_mode != "token",
            "the cluster requires a token but RAY_AUTH_MODE is not set here: 'ray job' and the "
            "Python clients get 401 (raybatch submit does not); export RAY_AUTH_MODE=token",
        ),
    )
    return [warning for is_so, warning in checks if is_so]


def probe_cluster(
    address: str, environment: Mapping[str, str], home: Path, *, network_host: str | None = None
) -> ClusterStatus:
    """Probe a cluster with and without a token for services that are open to others.

    `network_host` is this host's address on its network; None detects it. ConfigError: no server
    answers.
    """
    auth_mode = server_auth_mode(address)
    is_local = is_loopback(address)
    network_host = (network_host or address_on_network()) if is_local else None
    on_network: str | None = address
    if is_local:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        on_network = f"{parts.scheme}://{network_host}:{port}" if network_host else None
    is_reached = on_network is not None and get(on_network, timeout_s=_FAST_S) is not None
    jobs = get(f"{address}/api/jobs/")
    # only send a token if the server requires it
    token = find_token(environment, home) if auth_mode == "token" else None
    listening = _listening(
        get(f"{address}/nodes?view=summary", token=token.value if token else None)
    )
    # the same ports at addresses reachable from other hosts
    places = {place for place in listening if not is_loopback(place.host)}
    if network_host is not None:
        places |= {place._replace(host=network_host) for place in listening}
    metrics = [f"http://{host}:{port}/metrics" for w, host, port in sorted(places) if w == _METRICS]
    file = token_path(environment, home)
    is_file = file.is_file()
    return ClusterStatus(
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
            url for url in metrics if (reply := get(url, timeout_s=_FAST_S)) and reply.status == 200
        ),
        were_ports_tried=bool(listening),
        token_file=file if is_file else None,
        token_file_mode=stat.S_IMODE(file.stat().st_mode) if is_file else 0,
        client_auth_mode=environment.get("RAY_AUTH_MODE") or None,
    )


def _listening(nodes: ServerReply | None) -> list[_Endpoint]:
    """Return the endpoints on which the live hosts of a cluster report to listen."""
    data = nodes.member("data") if nodes is not None and nodes.status == 200 else None
    places = []
    for node in (data or {}).get("summary") or []:
        raylet = node.get("raylet") or {}
        host = str(raylet.get("nodeManagerAddress") or node.get("ip") or "")
        if raylet.get("state") == "ALIVE" and host:
            places += [
                _Endpoint(what, host, int(raylet[key]))
                for key, what in _NODE_PORTS.items()
                if raylet.get(key)
            ]
    return places
