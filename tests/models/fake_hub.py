"""A hub of one model, of which there may be several commits, on a port of this host."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar
from urllib.parse import unquote

MODEL = "org/model"
_Server = TypeVar("_Server", bound=ThreadingHTTPServer)


class FakeHub(ThreadingHTTPServer):
    """Answers as the hub does for files that are not large, and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, Mapping[str, bytes]] = {}
        self.main = ""
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Make these files the newest commit, and return its name."""
        text = repr((sorted(files.items()), len(self.commits)))
        self.main = hashlib.sha1(text.encode()).hexdigest()
        self.commits[self.main] = dict(files)
        return self.main


class HubHandler(BaseHTTPRequestHandler):
    """Sends what a hub answers."""

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class _Handler(HubHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        match parts:
            case ["api", "models", *model] if "/".join(model) == MODEL:
                self._json({"id": MODEL, "sha": self.server.main})
            case ["api", "models", *model, "revision", revision] if "/".join(model) == MODEL:
                self._in_commit(revision, lambda sha, _: self._json({"id": MODEL, "sha": sha}))
            case ["api", "models", *model, "tree", revision] if "/".join(model) == MODEL:
                self._in_commit(revision, lambda _, files: self._json(_tree(files)))
            case ["org", "model", "resolve", revision, name]:
                self._in_commit(revision, lambda sha, files: self._file(sha, files.get(name)))
            case _:
                self._fail(404, "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _in_commit(self, revision, answer) -> None:
        sha = self.server.main if revision == "main" else revision
        if sha in self.server.commits:
            answer(sha, self.server.commits[sha])
        else:
            self._fail(404, "RevisionNotFound")

    def _file(self, sha: str, data: bytes | None) -> None:
        if data is None:
            self._fail(404, "EntryNotFound")
        else:
            self._send(200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": sha})


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _tree(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
        for name, data in files.items()
    ]


@contextmanager
def served(server: _Server) -> Iterator[_Server]:
    """Answer requests in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fake_hub() -> AbstractContextManager[FakeHub]:
    return served(FakeHub())
