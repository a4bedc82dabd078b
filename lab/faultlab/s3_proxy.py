"""A proxy in front of an S3 endpoint that answers with errors, before or after the effect."""

import http.client
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# they belong to one connection, so each side has its own
_OF_ONE_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}
)
_CODES = {409: "ConditionalRequestConflict", 500: "InternalError", 503: "SlowDown"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpFault:
    """What happens to a request instead of a plain answer.

    Args:
        status: that is answered; None answers nothing and closes the connection after `hang_s`.
        is_after: the request took effect first.
        hang_s: time without an answer.
    """

    status: int | None
    is_after: bool = False
    hang_s: float = 0.0

    @property
    def name(self) -> str:
        """Return what it is called in tables."""
        what = "no answer" if self.status is None else str(self.status)
        return f"{what} {'after' if self.is_after else 'before'} the effect"


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpRequest:
    """A request that came to the proxy.

    Args:
        number: from 0, in order of arrival.
    """

    number: int
    method: str
    path: str


Decide = Callable[[HttpRequest], HttpFault | None]


class S3Proxy:
    """A running proxy.

    Args:
        decide: says of each request what happens to it; called by one thread at a time.
    """

    def __init__(self, upstream: str, decide: Decide) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._decide = decide
        self._lock = threading.Lock()
        self._num_requests = 0
        self._ended = threading.Event()
        self.faults: Counter[str] = Counter()
        self._server = _QuietServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """Return the address to ask instead of that of the endpoint."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Listen."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening; what hangs is let go."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault_of(self, method: str, path: str) -> HttpFault | None:
        """Return what happens to a request, and count it."""
        with self._lock:
            request = HttpRequest(number=self._num_requests, method=method, path=path)
            self._num_requests += 1
            fault = self._decide(request)
            if fault is not None:
                self.faults[fault.name] += 1
        return fault

    def hang(self, seconds: float) -> None:
        """Wait, but not longer than the proxy runs."""
        self._ended.wait(seconds)

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Ask the endpoint; return status, headers and body."""
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            connection.request(method, path, body=body or None, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that are killed, or give up, close connections at any moment."""


@contextmanager
def s3_proxy(upstream: str, decide: Decide) -> Iterator[S3Proxy]:
    """Run a proxy on a free port of the loopback interface."""
    proxy = S3Proxy(upstream, decide)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()


def _handler_of(proxy: S3Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = proxy.fault_of(self.command, self.path)
            if fault is None or fault.is_after:
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _OF_ONE_HOP}
                status, answered, content = proxy.forward(self.command, self.path, body, headers)
            if fault is None:
                self._answer(status, answered, content)
            elif fault.status is None:
                proxy.hang(fault.hang_s)
                self.close_connection = True
            else:
                code = _CODES.get(fault.status, "InternalError")
                error = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
                self._answer(fault.status, [("Content-Type", "application/xml")], error.encode())

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response_only(status)
            length = str(len(content))
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                if name.lower() not in _OF_ONE_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # noqa: N815 - names of the base

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: faults are counted by the proxy."""

    return Handler
