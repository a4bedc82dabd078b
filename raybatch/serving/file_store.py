"""Files of the API: a record each, and the content beside it.

files/<id>/content       written first
files/<id>/record.json   the file is there once this is
"""

import json
import posixpath
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

import fsspec

from raybatch.durable.storage import store_of
from raybatch.openai_batch.files import published, remove_folder
from raybatch.serving.ids import FILE, check_id, new_id
from raybatch.serving.problems import Problem

_CHUNK_BYTES = 1 << 20
_RECORD = "record.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What is known of a file; the names are those of the API.

    Args:
        created_at: seconds since 1970.
        filename: as its client calls it; never used as a name here.
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
    """The files below the folder of a server.

    Args:
        folder: of the server, local or a URI.
    """

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
            while chunk := content.read(_CHUNK_BYTES):
                file.write(chunk)
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
        name = f"files/{check_id(file_id, FILE)}/{_RECORD}"
        try:
            return FileRecord(**json.loads(self._store.read(name)))
        except FileNotFoundError:
            raise Problem(
                "there is no such file", status=404, param="id", code="not_found"
            ) from None

    def all(self) -> list[FileRecord]:
        """Return all files, the newest first."""
        names = self._store.names("files")
        ids = sorted((n.split("/")[1] for n in names if n.endswith(f"/{_RECORD}")), reverse=True)
        found = []
        for file_id in ids:
            with suppress(Problem):  # removed since
                found.append(self.get(file_id))
        return found

    def remove(self, file_id: str) -> None:
        """Remove a file that is there, the record first."""
        self._store.remove(f"files/{check_id(file_id, FILE)}/{_RECORD}")
        remove_folder(posixpath.dirname(self.path(file_id)))

    def chunks(self, file_id: str) -> Iterator[bytes]:
        """Yield the content of a file."""
        with fsspec.open(self.path(file_id), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
