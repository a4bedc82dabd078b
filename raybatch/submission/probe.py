"""What a job server tells those who have no token, and what else listens near it."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from raybatch.errors import ConfigError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_TIMEOUT_S = 10.0
_QUICK_S = 2.0
# an answer of a job server is far smaller, and one of something else may never end
_MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    text: str

    def json(self) -> Any:  # noqa: ANN401 - it is somebody else's
        """Return the body as JSON, or None where it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


def read_address(address: str | None, environment: Mapping[str, str]) -> str:
    """Return the URL of the job server.

    Where the user gives none it is RAY_API_SERVER_ADDRESS, then RAY_ADDRESS where it is a URL, then
    the usual port of this host.

    Raises:
        ConfigError: it is no address of a job server.
    """
    address = address or environment.get("RAY_API_SERVER_ADDRESS")
    if not address:
        other = environment.get("RAY_ADDRESS", "")
        address = other if other.startswith("http") else DEFAULT_ADDRESS
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")) or not _host(address):
        raise ConfigError(
            f"--address {address}: not the address of a job server; it is that of the dashboard, "
            "such as http://HEAD:8265"
        )
    return address.rstrip("/")


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
    """Return "token" or "disabled", as the job server says; None where it is too old to say.

    Raises:
        ConfigError: nobody answers there, or no job server does.
    """
    reply = get(f"{address}/api/authentication_mode")
    if reply is None:
        raise ConfigError(
            f"no job server answers at {address}: give the address of the dashboard with --address "
            "(http://HEAD:8265), through a tunnel where it is not open, such as "
            "'ssh -L 8265:127.0.0.1:8265 HEAD' or 'kubectl port-forward svc/NAME-head-svc 8265'"
        )
    body = reply.json()
    if isinstance(body, dict) and "authentication_mode" in body:
        return str(body["authentication_mode"])
    version = get(f"{address}/api/version")
    is_known = version is not None and version.status in (401, 403)
    version_body = version.json() if version is not None else None
    if is_known or (isinstance(version_body, dict) and "ray_version" in version_body):
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
    """Return whether somebody listens there."""
    try:
        with socket.create_connection((host, port), timeout=_QUICK_S):
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
