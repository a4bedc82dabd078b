"""Results of scans of files, kept below the sink of a job, so that a resumed run repeats none.

A file is known by its path, its size, and its entity tag or times. Files whose store tells neither
are scanned again.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa

from raybatch.durable.layout import SCAN
from raybatch.durable.storage import Store
from raybatch.inputs.file_slices import FileSlice
from raybatch.inputs.listing import ListedFile

_TAGS = ("ETag", "etag", "md5Hash", "content_md5")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "ino")
# files whose versions are asked for at once
_THREADS = 32
# of a slice, besides its row groups and its schema
_NUMBERS = ("first_row", "num_rows", "num_bytes", "offset")

_Scan = tuple[pa.Schema, list[FileSlice]]


class _Known(NamedTuple):
    version: str
    scan: _Scan


class KnownScans:
    """Scans of the files of a source; `options` are all options that decide what a scan tells."""

    def __init__(self, *options: object) -> None:
        self._options = _digest(options)
        self._files: dict[str, _Known] = {}
        self._versions: dict[str, str] = {}
        # digest of the files whose rows were checked, and of how
        self._checked = ""
        self._is_changed = False

    def load(self, store: Store) -> None:
        """Read what an earlier run has kept; nothing if there is none, or if it is damaged."""
        try:
            kept = json.loads(store.read(SCAN))
            if kept["options"] != self._options:
                return
            schemas = [_schema_of(text) for text in kept["schemas"]]
            self._files = {
                file["path"]: _Known(file["version"], _scan_of(file, schemas))
                for file in kept["files"]
            }
            self._checked = str(kept["checked"])
        except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException):
            self._files = {}

    def save(self, store: Store) -> None:
        """Keep the scans, if this run has made any."""
        if self._is_changed:
            schemas: dict[str, int] = {}
            files = [_to_json(path, known, schemas) for path, known in self._files.items()]
            kept = {"options": self._options, "checked": self._checked, "files": files}
            text = json.dumps({**kept, "schemas": list(schemas)}, separators=(",", ":"))
            store.replace(SCAN, text.encode())
            self._is_changed = False

    def unknown(self, files: Sequence[ListedFile]) -> list[ListedFile]:
        """Ask for the versions of files; forget scans of other ones, and return what to scan."""
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(threads.map(_version_of, files))
        self._versions = {file.path: version for file, version in zip(files, found, strict=True)}
        kept = {p: one for p, one in self._files.items() if one.version == self._versions.get(p)}
        self._is_changed, self._files = kept != self._files, kept
        return [file for file in files if file.path not in kept]

    def scanned(self, file: ListedFile, scan: Callable[[], _Scan]) -> _Scan:
        """Return the scan of a file, which is made if it is not known."""
        if known := self._files.get(file.path):
            return known.scan
        made, version = scan(), self._versions[file.path]
        if version:
            self._files[file.path], self._is_changed = _Known(version, made), True
        return made

    def is_checked(self, *how: object) -> bool:
        """Return whether rows of these files were checked so in a run whose scans were kept."""
        return self._checked == self._digest_of(how)

    def note_checked(self, *how: object) -> None:
        if all(self._versions.values()):
            self._checked, self._is_changed = self._digest_of(how), True

    def _digest_of(self, how: object) -> str:
        return _digest((self._options, sorted(self._versions.items()), how))


def _version_of(file: ListedFile) -> str:
    """Return what changes if a file is replaced; "" if its store does not tell."""
    try:
        fs, path = fsspec.core.url_to_fs(file.path)
        info = fs.info(path)
    except Exception:  # file systems raise various classes; scanning the file raises the error
        return ""
    tags = [str(info[key]) for key in _TAGS if info.get(key)]
    known = tags or [str(info[key]) for key in _TIMES if info.get(key)]
    return _digest((info.get("size"), *known)) if known else ""


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _schema_of(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def _to_json(path: str, known: _Known, schemas: dict[str, int]) -> dict[str, Any]:
    def number(schema: pa.Schema | None) -> int | None:
        if schema is None:
            return None
        text = base64.b64encode(schema.serialize().to_pybytes()).decode()
        return schemas.setdefault(text, len(schemas))

    schema, slices = known.scan
    groups = [part.row_groups and (part.row_groups.start, part.row_groups.stop) for part in slices]
    return {
        "path": path,
        "version": known.version,
        "schema": number(schema),
        "of_file": slices
        and {name: getattr(slices[0], name) for name in ("name", "kind", "folder_columns")},
        "slices": [
            [*(getattr(part, name) for name in _NUMBERS), of_part, number(part.schema)]
            for part, of_part in zip(slices, groups, strict=True)
        ],
    }


def _scan_of(file: dict[str, Any], schemas: Sequence[pa.Schema]) -> _Scan:
    slices = []
    for *numbers, groups, schema in file["slices"]:
        of_file = file["of_file"]
        slices.append(
            FileSlice(
                path=file["path"],
                name=of_file["name"],
                kind=of_file["kind"],
                folder_columns=tuple((name, value) for name, value in of_file["folder_columns"]),
                row_groups=None if groups is None else range(*groups),
                schema=None if schema is None else schemas[schema],
                **dict(zip(_NUMBERS, numbers, strict=True)),
            )
        )
    return schemas[file["schema"]], slices
