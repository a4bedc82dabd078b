"""What a job server tells those who have no token, the token it may want, and what is open of it.

Ray's job clients send the token only where RAY_AUTH_MODE=token is set in their process, whatever
the cluster wants; here its authentication mode is read first.
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
# an answer of a job server is far smaller, and one of something else may never end
_MAX_BYTES = 8 << 20
_METRICS = "metrics"
# by their names in Ray's list of nodes
_NODE_PORTS = {
    "nodeManagerPort": "raylet",
    "objectManagerPort": "object manager",
    "metricsExportPort": _METRICS,
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token, and the variable or file that it comes from."""

    value: str = field(repr=False)
    origin: str


def token_path(environment: Mapping[str, str], home: Path) -> Path:
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    return Path(named).expanduser() if named else home / ".ray" / "auth_token"


def find_token(environment: Mapping[str, str], home: Path) -> Token | None:
    """Return the token that Ray would take; ConfigError: RAY_AUTH_TOKEN_PATH cannot be read."""
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
    """Return the token that a job server asks for, if it does; ConfigError: there is none here."""
    # an old server does not say; what it wants is then what the user has set
    if (auth_mode or environment.get("RAY_AUTH_MODE", "").lower()) != "token":
        return None
    token = find_token(environment, home)
    if token is None:
        raise ConfigError(
            f"{address} asks for a token, and none is here: copy the token of the cluster into "
            "~/.ray/auth_token (mode 600), or name its file in RAY_AUTH_TOKEN_PATH; on Kubernetes "
            "it lies in the secret that has the cluster's name"
        )
    return token


def read_address(address: str | None, environment: Mapping[str, str]) -> str:
    """Return the URL of the job server; ConfigError: it is none.

    Where the user gives none it is RAY_API_SERVER_ADDRESS, then RAY_ADDRESS where it is a URL, then
    the usual port of this host.
    """
    address = address or environment.get("RAY_API_SERVER_ADDRESS")
    if not address:
        other = environment.get("RAY_ADDRESS", "")
        address = other if other.startswith("http") else _DEFAULT_ADDRESS
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")) or not _host(address):
        raise ConfigError(
            f"--address {address}: not the address of a job server; it is that of the dashboard, "
            "such as http://HEAD:8265"
        )
    return address.rstrip("/")


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    text: str

    def member(self, name: str) -> Any:  # noqa: ANN401 - it is somebody else's
        """Return a member of the body; None where that is no JSON object with it."""
        try:
            body = json.loads(self.text)
        except ValueError:
            return None
        return body.get(name) if isinstance(body, dict) else None


def get(url: str, *, timeout_s: float = _TIMEOUT_S, token: str | None = None) -> Reply | None:
    """Ask for `url` and return the reply; None where nobody answers with HTTP."""
    request = urllib.request.Request(url)
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    # a proxy would answer for a port of this host that nobody listens on
    handlers = [urllib.request.ProxyHandler({})] if is_loopback(url) else []
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read(_MAX_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.read(_MAX_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException):
        return None


def server_auth_mode(address: str) -> str | None:
    """Return "token" or "disabled", None where a server is too old; ConfigError: none answers."""
    reply = get(f"{address}/api/authentication_mode")
    if reply is None:
        raise ConfigError(
            f"no job server answers at {address}: give the address of the dashboard with --address "
            "(http://HEAD:8265), through a tunnel where it is not open, such as "
            "'ssh -L 8265:127.0.0.1:8265 HEAD' or 'kubectl port-forward svc/NAME-head-svc 8265'"
        )
    if (mode := reply.member("authentication_mode")) is not None:
        return str(mode)
    version = get(f"{address}/api/version")
    if version is not None and (version.status in (401, 403) or version.member("ray_version")):
        return None
    raise ConfigError(
        f"what answers at {address} is no Ray job server; give the address of the dashboard, such "
        "as http://HEAD:8265 (not the port of the cluster or of the Ray client)"
    )


def is_loopback(address: str) -> bool:
    """Return whether the URL or host names this host by its loopback interface."""
    host = _host(address) if "://" in address else address
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def address_on_network() -> str | None:
    """Return the address of this host on its network; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing: it only chooses the interface that would be taken
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
    is_reached = on_network is not None and get(on_network, timeout_s=_FAST_S) is not None
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
            url for url in metrics if (reply := get(url, timeout_s=_FAST_S)) and reply.status == 200
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
