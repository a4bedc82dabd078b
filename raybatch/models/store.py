"""A folder behind a URI: what its store lists of it, and its place in the cache of this host."""

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from raybatch.config import cache_dir
from raybatch.errors import ConfigError, UnreachableError, error_text
from raybatch.models.fetching import StoredFile, fetch_files

# what a file system knows of the content: a checksum, else a time of change
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id")
_VERSIONS = (*_CHECKSUMS, "LastModified", "mtime", "updated", "created")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFolder:
    """The files of a folder that somebody wants, by name; `what` names the folder in errors."""

    uri: str
    what: str
    root: str
    filesystem: Any
    files: Mapping[str, StoredFile]

    def digest(self, names: Collection[str]) -> str:
        """Return what names the content of some of the files, as far as a listing tells."""
        digest = hashlib.sha256()
        for name in sorted(names):
            file = self.files[name]
            digest.update(f"\0{name}\0{file.size}\0{file.version}".encode())
        return digest.hexdigest()[:32]

    @property
    def cached_at(self) -> Path:
        """Return the folder of this host for these files, and no others from that place."""
        place = hashlib.sha256(f"{self.uri}\0{self.digest(self.files)}".encode()).hexdigest()
        return cache_dir() / "models" / f"{PurePosixPath(self.root).name}-{place[:16]}"

    def has(self, names: Collection[str]) -> bool:
        """Return whether some of the files are in the cache."""
        paths = ((self.cached_at / name, self.files[name]) for name in names)
        return all(path.is_file() and path.stat().st_size == file.size for path, file in paths)

    def fetch(self, names: Collection[str], target: Path | None = None) -> int:
        """Bring some of the files to a folder, by default the cached one; return bytes fetched.

        Raises:
            ConfigError: they cannot be read, or there is no room for them.
        """
        what = f"{self.what} {self.uri!r}"
        wanted = {name: self.files[name] for name in sorted(names)}
        try:
            return fetch_files(self.filesystem, wanted, target or self.cached_at, what=what)
        except ConfigError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise UnreachableError(f"{what} cannot be downloaded: {error_text(error)}") from error


def local_path(uri: str) -> Path | None:
    """Return the folder of a URI of this host; None for one that lies elsewhere."""
    if not uri.startswith(("file://", "local://")):
        return None
    return Path(fsspec.core.url_to_fs(uri)[1])


def list_folder(uri: str, *, what: str, patterns: Sequence[str], needed: str = "") -> StoreFolder:
    """Ask a store for the files at `uri` whose names match; `needed` is one of them.

    Raises:
        ConfigError: the folder cannot be read, or lacks that file.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
        # what this process has seen of it may be old
        filesystem.invalidate_cache()
        listing = filesystem.ls(root, detail=True)
    except Exception as error:  # each file system has errors of its own
        raise UnreachableError(f"{what} {uri!r} cannot be read: {error_text(error)}") from error
    files = {
        PurePosixPath(entry["name"]).name: _stored_file(entry)
        for entry in listing
        if entry["type"] == "file"
    }
    wanted = {
        name: file
        for name, file in files.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if needed and needed not in wanted:
        raise ConfigError(f"{what} {uri!r} has no {needed}; pass the folder that holds it")
    uri = uri.rstrip("/")
    return StoreFolder(uri=uri, what=what, root=root, filesystem=filesystem, files=wanted)


def _stored_file(entry: Mapping[str, Any]) -> StoredFile:
    key = next((key for key in _VERSIONS if entry.get(key) is not None), "")
    md5 = entry.get("md5Hash")  # of Google's; an ETag of S3 is one only without encryption
    return StoredFile(
        path=entry["name"],
        size=entry["size"],
        version=str(entry.get(key, "")),
        version_key=key if key in _CHECKSUMS else "",
        md5=None if md5 is None else base64.b64decode(md5),
    )
