"""A hub of dataset repositories, on a port of this host: as much as commits and listings need."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

_SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeDatasets(ThreadingHTTPServer):
    """Keeps the files of repositories by name, and the messages of their commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.fails_after_commit = False

    @property
    def sha(self) -> str:
        """Return the name of the newest commit of all repositories."""
        return f"{len(self.messages):040x}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeDatasets

    def do_GET(self) -> None:
        files = self.server.files
        match unquote(self.path.partition("?")[0]).strip("/").split("/"):
            case ["api", "datasets", owner, name] if f"{owner}/{name}" in files:
                self._json({"id": f"{owner}/{name}", "sha": self.server.sha})
            case ["api", "datasets", owner, name, "tree", _] if f"{owner}/{name}" in files:
                self._json(
                    [
                        {"type": "file", "path": path, "size": len(data), "oid": _SHA}
                        for path, data in files[f"{owner}/{name}"].items()
                    ]
                )
            case ["datasets", owner, name, "resolve", _, *path] if f"{owner}/{name}" in files:
                data = files[f"{owner}/{name}"].get("/".join(path))
                if data is None:
                    self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                else:
                    # the tag is that of the content, or an older copy would be taken from the cache
                    tag = f"{abs(hash(data)):040x}"
                    headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.server.sha}
                    self._send(200, data, headers)
            case _:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        match unquote(self.path.partition("?")[0]).strip("/").split("/"):
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                wanted = json.loads(body)
                name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
                self.server.files.setdefault(name, {".gitattributes": b""})
                self._json({"url": f"{self.server.url}/datasets/{name}"})
            case ["api", "datasets", *_, "preupload", "main"]:
                files = json.loads(body)["files"]
                modes = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for one in files
                ]
                self._json({"files": modes})
            case ["api", "datasets", owner, name, "commit", "main"]:
                self._commit(f"{owner}/{name}", [json.loads(x) for x in body.splitlines()])
            case _:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _commit(self, name: str, lines: list[dict]) -> None:
        (header,) = (line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, self.server.sha):
            self._send(412, b"", {})
            return
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[name][value["path"]] = base64.b64decode(value["content"])
        if self.server.fails_after_commit:
            self.server.fails_after_commit = False
            self._send(500, b"", {})
            return
        url = f"{self.server.url}/datasets/{name}/commit/{_SHA}"
        self._json({"commitUrl": url, "commitOid": _SHA})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_datasets() -> Iterator[FakeDatasets]:
    with FakeDatasets() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
