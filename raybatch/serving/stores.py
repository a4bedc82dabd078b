"""Files and batches of the API, below the folder of a server, which is local or a URI.

files/<id>/content          written first
files/<id>/record.json      the file is there once this is
batches/<id>/request.json   by whoever answers HTTP, once
batches/<id>/cancel.json    by whoever answers HTTP, once
batches/<id>/status.json    by the runner alone
"""

import json
import posixpath
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

import fsspec

from raybatch.durable.storage import store_of
from raybatch.durable.stores import Store
from raybatch.openai_batch.files import published, remove_folder
from raybatch.openai_batch.writing import BatchCounts
from raybatch.serving.http_values import BATCH, FILE, Problem, check_id, new_id, no_such

_CHUNK_BYTES = 1 << 20
_RECORD = "record.json"
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What is known of a file; the names are those of the API.

    The filename is that of the client, and never used as a name here.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def view(self) -> dict[str, Any]:
        """Return the object of the API."""
        return {**asdict(self), "object": "file", "status": "processed"}


class FileStore:
    """The files below the folder of a server."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._store = store_of(folder)

    def new_id(self) -> str:
        """Return an id that no file has."""
        return new_id(FILE, time.time())

    def path(self, file_id: str) -> str:
        """Return where the content of a file lies, or will lie."""
        return posixpath.join(self._folder, "files", check_id(file_id, FILE), "content")

    def add(self, content: IO[bytes], *, filename: str, purpose: str) -> FileRecord:
        """Keep a file."""
        file_id = self.new_id()
        with published(self.path(file_id)) as file:
            shutil.copyfileobj(content, file, _CHUNK_BYTES)
        return self.register(file_id, filename=filename, purpose=purpose)

    def register(self, file_id: str, *, filename: str, purpose: str) -> FileRecord:
        """Make a file of content that lies at its path; one that is there stays as it is."""
        fs, name = fsspec.core.url_to_fs(self.path(file_id))
        record = FileRecord(
            id=file_id,
            bytes=int(fs.size(name)),
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        self._store.create(f"files/{file_id}/{_RECORD}", json.dumps(asdict(record)).encode())
        return self.get(file_id)

    def get(self, file_id: str) -> FileRecord:
        """Return the record of a file.

        Raises:
            Problem: there is none.
        """
        record = _read_json(self._store, f"files/{check_id(file_id, FILE)}/{_RECORD}")
        if record is None:
            raise no_such("file")
        return FileRecord(**record)

    def all(self) -> list[FileRecord]:
        """Return all files, the newest first."""
        names = self._store.names("files")
        ids = sorted((n.split("/")[1] for n in names if n.endswith(f"/{_RECORD}")), reverse=True)
        records = []
        for file_id in ids:
            with suppress(Problem):  # removed since
                records.append(self.get(file_id))
        return records

    def remove(self, file_id: str) -> None:
        """Remove a file that is there, the record first."""
        self._store.remove(f"files/{check_id(file_id, FILE)}/{_RECORD}")
        remove_folder(posixpath.dirname(self.path(file_id)))

    def chunks(self, file_id: str) -> Iterator[bytes]:
        """Yield the content of a file."""
        with fsspec.open(self.path(file_id), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """What a client asks for."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStatus:
    """What has become of a batch.

    Args:
        status: of the API; a cancelled batch is called "cancelling" there until it ends.
        times: names of the API, such as in_progress_at, to seconds since 1970.
        problem: why it has failed; "" where it has not.
    """

    status: str = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    output_file_id: str = ""
    error_file_id: str = ""
    counts: BatchCounts = field(default_factory=BatchCounts)
    problem: str = ""

    def now(self, status: str, **changes: Any) -> "BatchStatus":  # noqa: ANN401
        """Return it in another state that it has entered at this moment."""
        times = {**self.times, f"{status}_at": int(time.time())}
        return replace(self, status=status, times=times, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A batch as it is at some moment; `cancelling_at` is None where nobody has cancelled it."""

    request: BatchRequest
    status: BatchStatus
    cancelling_at: int | None = None

    @property
    def state(self) -> str:
        """Return the status of the API."""
        is_open = self.status.status not in ENDED
        return "cancelling" if is_open and self.cancelling_at is not None else self.status.status

    def view(self, model: str) -> dict[str, Any]:
        """Return the object of the API."""
        status, request, counts = self.status, self.request, self.status.counts
        # files come with the end, and not with a failure
        has_files = status.status in ENDED and status.status != "failed"
        has_output, has_errors = has_files and counts.num_completed, has_files and counts.num_failed
        times = {
            f"{name}_at": status.times.get(f"{name}_at")
            for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
        }
        errors = None
        if status.problem:
            error = {
                "code": "invalid_batch",
                "message": status.problem,
                "line": None,
                "param": None,
            }
            errors = {"object": "list", "data": [error]}
        return {
            **asdict(request),
            **times,
            "object": "batch",
            "model": model,
            "errors": errors,
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


class BatchStore:
    """The batches below the folder of a server."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._store = store_of(folder)

    def run_folder(self, batch_id: str) -> str:
        """Return the folder for the rows and jobs of a batch."""
        return posixpath.join(self._folder, "runs", check_id(batch_id, BATCH))

    def add(
        self,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: int,
        metadata: Mapping[str, str] | None,
    ) -> Batch:
        """Keep a new batch."""
        now_s = time.time()
        request = BatchRequest(
            id=new_id(BATCH, now_s),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=int(now_s),
            expires_at=int(now_s) + window_s,
            metadata=metadata,
        )
        self._store.create(_name(request.id, "request"), json.dumps(asdict(request)).encode())
        return self.get(request.id)

    def get(self, batch_id: str) -> Batch:
        """Return a batch as it is now.

        Raises:
            Problem: there is none.
        """
        check_id(batch_id, BATCH)
        request = self._read(batch_id, "request")
        if request is None:
            raise no_such("batch")
        cancel = self._read(batch_id, "cancel")
        return Batch(
            request=BatchRequest(**request),
            status=_status(self._read(batch_id, "status") or {}),
            cancelling_at=None if cancel is None else cancel["cancelling_at"],
        )

    def ids(self) -> list[str]:
        """Return the ids of all batches, the oldest first."""
        names = self._store.names("batches")
        return sorted(name.split("/")[1] for name in names if name.endswith("/request.json"))

    def cancel(self, batch_id: str) -> None:
        """Ask for the end of a batch; the first time counts."""
        record = {"cancelling_at": int(time.time())}
        self._store.create(_name(batch_id, "cancel"), json.dumps(record).encode())

    def is_cancelled(self, batch_id: str) -> bool:
        """Return whether the end of a batch was asked for."""
        return self._store.size(_name(batch_id, "cancel")) is not None

    def write(self, batch_id: str, status: BatchStatus) -> BatchStatus:
        """Write what has become of a batch; for the runner alone."""
        self._store.replace(_name(batch_id, "status"), json.dumps(asdict(status)).encode())
        return status

    def _read(self, batch_id: str, what: str) -> dict[str, Any] | None:
        return _read_json(self._store, _name(batch_id, what))


def _status(values: Mapping[str, Any]) -> BatchStatus:
    return BatchStatus(**{**values, "counts": BatchCounts(**values.get("counts", {}))})


def _read_json(store: Store, name: str) -> dict[str, Any] | None:
    """Return a record; None where there is none."""
    try:
        record: dict[str, Any] = json.loads(store.read(name))
    except FileNotFoundError:
        return None
    return record


def _name(batch_id: str, what: str) -> str:
    return f"batches/{check_id(batch_id, BATCH)}/{what}.json"
