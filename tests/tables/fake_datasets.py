"""A hub of dataset repositories, on a port of this host: as much as commits and listings need."""

import base64
import json
from contextlib import AbstractContextManager
from http.server import ThreadingHTTPServer
from urllib.parse import unquote

from tests.models.fake_hub import HubHandler, served

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


class _Handler(HubHandler):
    server: FakeDatasets

    def do_GET(self) -> None:  # noqa: N802 - the name is of http.server
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
                    self._fail(404, "EntryNotFound")
                else:
                    # the tag is that of the content, or an older copy would be taken from the cache
                    tag = f"{abs(hash(data)):040x}"
                    headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.server.sha}
                    self._send(200, data, headers)
            case _:
                self._fail(404, "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:  # noqa: N802
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
                self._fail(404, "RepoNotFound")

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


def fake_datasets() -> AbstractContextManager[FakeDatasets]:
    return served(FakeDatasets())
