"""Files and batches of the API, below the folder of a server, which is local or a URI.

files/<id>/content          written first
files/<id>/record.json      written last: without it there is no file
batches/<id>/request.json   written once, by the HTTP API
batches/<id>/cancel.json    written once, by the HTTP API
batches/<id>/status.json    written by the runner only
"""

import json
import posixpath
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import fsspec

from raybatch.durable.storage import store_of
from raybatch_openai.batch.files import published, remove_folder
from raybatch_openai.batch.requests import Refusal
from raybatch_openai.batch.writing import BatchCounts

_CHUNK_BYTES = 1 << 20
_RECORD = "record.json"
ENDED = ("completed", "failed", "expired", "cancelled")
FILE, BATCH = "file-", "batch_"
_TAIL = re.compile(r"[0-9a-f]{32}", re.ASCII)


def no_such(what: str, param: str = "id") -> Refusal:
    return Refusal(f"there is no such {what}", status=404, param=param, code="not_found")


def new_id(kind: str, now_s: float) -> str:
    """Return a new id: its kind, the time in milliseconds, and 80 secret random bits.

    `kind` is the prefix of ids of files or batches.
    """
    return f"{kind}{int(now_s * 1000):012x}{secrets.token_hex(10)}"


def check_id(text: str, kind: str) -> str:
    """Return an id that a client sent; raise Refusal if it is no well-formed id of this kind."""
    if not text.startswith(kind) or not _TAIL.fullmatch(text.removeprefix(kind)):
        raise no_such("file" if kind == FILE else "batch")
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Metadata of an uploaded file, with the field names of the API.

    `filename` comes from the client, and is never used as a path.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def view(self) -> dict[str, Any]:
        return {**asdict(self), "object": "file", "status": "processed"}


class _Records:
    """Reads and writes records below the folder of a server, each of them atomically."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._store = store_of(folder)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads(self._store.read(name))
        except FileNotFoundError:
            return None
        return record

    def _create(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a record, unless it exists."""
        self._store.create(name, json.dumps(record).encode())

    def _ids(self, below: str, record: str) -> list[str]:
        names = self._store.names(below)
        return sorted(name.split("/")[1] for name in names if name.endswith(f"/{record}"))


class FileStore(_Records):
    def new_id(self) -> str:
        return new_id(FILE, time.time())

    def path(self, file_id: str) -> str:
        """Return the path of the content of a file, whether it exists or not."""
        return posixpath.join(self._folder, "files", check_id(file_id, FILE), "content")

    def add(self, content: IO[bytes], *, filename: str, purpose: str) -> FileRecord:
        file_id = self.new_id()
        with published(self.path(file_id)) as file:
            shutil.copyfileobj(content, file, _CHUNK_BYTES)
        return self.register(file_id, filename=filename, purpose=purpose)

    def register(self, file_id: str, *, filename: str, purpose: str) -> FileRecord:
        """Record the metadata of a file whose content was written to `path`, unless recorded."""
        fs, name = fsspec.core.url_to_fs(self.path(file_id))
        record = FileRecord(
            id=file_id,
            bytes=int(fs.size(name)),
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        self._create(f"files/{file_id}/{_RECORD}", asdict(record))
        return self.get(file_id)

    def get(self, file_id: str) -> FileRecord:
        record = self._read(f"files/{check_id(file_id, FILE)}/{_RECORD}")
        if record is None:
            raise no_such("file")
        return FileRecord(**record)

    def all(self) -> list[FileRecord]:
        records = []
        for file_id in reversed(self._ids("files", _RECORD)):
            with suppress(Refusal):  # removed in the meantime
                records.append(self.get(file_id))
        return records

    def remove(self, file_id: str) -> None:
        """Remove a file: first its record, then its content."""
        self._store.remove(f"files/{check_id(file_id, FILE)}/{_RECORD}")
        remove_folder(posixpath.dirname(self.path(file_id)))

    def chunks(self, file_id: str) -> Iterator[bytes]:
        with fsspec.open(self.path(file_id), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStatus:
    status: str = "validating"
    """As in the API, which shows a cancelled batch as "cancelling" until it ends."""
    times: Mapping[str, int] = field(default_factory=dict)
    """Unix seconds by their names in the API, such as in_progress_at."""
    output_file_id: str = ""
    error_file_id: str = ""
    counts: BatchCounts = field(default_factory=BatchCounts)
    problem: str = ""
    """Why the batch failed, or ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Snapshot of a batch; `cancelling_at` is None unless a client has cancelled it."""

    request: BatchRequest
    status: BatchStatus
    cancelling_at: int | None = None

    @property
    def state(self) -> str:
        is_open = self.status.status not in ENDED
        return "cancelling" if is_open and self.cancelling_at is not None else self.status.status

    def view(self, model: str) -> dict[str, Any]:
        status, request, counts = self.status, self.request, self.status.counts
        # clients see files once the batch has ended, and none of a failed one
        has_files = status.status in ENDED and status.status != "failed"
        has_output, has_errors = has_files and counts.num_completed, has_files and counts.num_failed
        times = {
            f"{n}_at": status.times.get(f"{n}_at") for n in ("in_progress", "finalizing", *ENDED)
        }
        error = {"code": "invalid_batch", "message": status.problem, "line": None, "param": None}
        return {
            **asdict(request),
            **times,
            "object": "batch",
            "model": model,
            "errors": {"object": "list", "data": [error]} if status.problem else None,
            "status": self.state,
            "cancelling_at": self.cancelling_at,
            "output_file_id": status.output_file_id if has_output else None,
            "error_file_id": status.error_file_id if has_errors else None,
            "request_counts": {
                "total": counts.num_requests,
                "completed": counts.num_completed,
                "failed": counts.num_failed,
            },
            "usage": {
                "input_tokens": counts.prompt_tokens,
                "output_tokens": counts.generated_tokens,
                "total_tokens": counts.prompt_tokens + counts.generated_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached_tokens},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }


class BatchStore(_Records):
    def run_folder(self, batch_id: str) -> str:
        return posixpath.join(self._folder, "runs", check_id(batch_id, BATCH))

    def add(self, *, window_s: int, **requested: Any) -> Batch:  # noqa: ANN401
        now_s = time.time()
        request = BatchRequest(
            id=new_id(BATCH, now_s),
            created_at=int(now_s),
            expires_at=int(now_s) + window_s,
            **requested,
        )
        self._create(_name(request.id, "request"), asdict(request))
        return self.get(request.id)

    def get(self, batch_id: str) -> Batch:
        request = self._read(_name(batch_id, "request"))
        if request is None:
            raise no_such("batch")
        cancel = self._read(_name(batch_id, "cancel"))
        status = self._read(_name(batch_id, "status")) or {}
        counts = BatchCounts(**status.pop("counts", {}))
        return Batch(
            request=BatchRequest(**request),
            status=BatchStatus(**status, counts=counts),
            cancelling_at=None if cancel is None else cancel["cancelling_at"],
        )

    def ids(self) -> list[str]:
        return self._ids("batches", "request.json")

    def cancel(self, batch_id: str) -> None:
        """Request that a batch ends; the runner ends it later. Repeated calls have no effect."""
        self._create(_name(batch_id, "cancel"), {"cancelling_at": int(time.time())})

    def is_cancelled(self, batch_id: str) -> bool:
        return self._store.size(_name(batch_id, "cancel")) is not None

    def write(self, batch_id: str, status: BatchStatus) -> None:
        """Write the status of a batch; only the `BatchRunner` may call this."""
        self._store.replace(_name(batch_id, "status"), json.dumps(asdict(status)).encode())


def _name(batch_id: str, what: str) -> str:
    return f"batches/{check_id(batch_id, BATCH)}/{what}.json"
