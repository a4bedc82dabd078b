"""A store in a bucket, or on any other file system that fsspec knows."""

import logging
import uuid
from collections.abc import Mapping
from typing import Any

import fsspec

from raybatch.durable.layout import check_name, probe_name
from raybatch.durable.stores.protocols import warn_last_writer_wins
from raybatch.durable.stores.repeating import says_it_exists, says_unsupported

logger = logging.getLogger(__name__)

# a write is one request, and one that must not replace is decided where the object lies
_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
# a range may be asked for from its end
_SUFFIX_RANGES = frozenset({"s3", "s3a", "memory"})


class ObjectStore:
    """Objects below a prefix, each written by one request; nothing is repeated here.

    Args:
        uri: root with its protocol; it holds no secrets, credentials come from the environment.
        is_exclusive: what an earlier probe of the same store found; None probes once.
    """

    def __init__(
        self,
        uri: str,
        *,
        is_exclusive: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = dict(options or {})
        # a file system of its own: nobody else's settings, and no listing is kept
        self._fs, root = fsspec.core.url_to_fs(
            uri, skip_instance_cache=True, use_listings_cache=False, **self._options
        )
        self._root = root.rstrip("/")
        self._is_exclusive = is_exclusive
        protocols = self._fs.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.uri, self._is_exclusive, self._options)

    @property
    def uri(self) -> str:
        return str(self._fs.unstrip_protocol(self._root)).rstrip("/")

    @property
    def is_exclusive(self) -> bool:
        if self._is_exclusive is None:
            self._is_exclusive = bool(self._protocols & _CONDITIONAL) and self._probe()
            if not self._is_exclusive:
                warn_last_writer_wins(self.uri)
        return self._is_exclusive

    def create(self, name: str, data: bytes) -> bool:
        if self.is_exclusive:
            return self._create(name, data)
        if self.size(name) is not None:
            return False
        self.replace(name, data)
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path_to_write(name), data)

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(name)))

    def tail(self, name: str, num_bytes: int) -> bytes:
        path = self._path(name)
        if self._protocols & _SUFFIX_RANGES:
            return bytes(self._fs.cat_file(path, start=-num_bytes))
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(path)
        return bytes(self._fs.cat_file(path, start=max(0, size - num_bytes), end=size))

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.find(self._path(folder))
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(self._root).lstrip("/") for path in paths)

    def remove(self, name: str) -> None:
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path_to_write(name), data, mode="create")
        except Exception as error:  # each file system has errors of its own
            if says_it_exists(error):
                return False
            raise
        return True

    def _probe(self) -> bool:
        """Return whether the second of two creates of one name is refused."""
        name = probe_name(uuid.uuid4().hex)
        try:
            # a first one that is refused means a repeated request, and shows the same
            return not (self._create(name, b"") and self._create(name, b""))
        except Exception as error:
            if not says_unsupported(error):
                raise
            logger.info("%s refuses conditional writes: %s", self.uri, error)
            return False
        finally:
            self._forget(name)

    def _forget(self, name: str) -> None:
        try:
            self.remove(name)
        except Exception as error:  # who may only add files can work all the same
            logger.info("%s/%s is left behind: %s", self.uri, name, error)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _path_to_write(self, name: str) -> str:
        path = self._path(name)
        if not self._protocols & _CONDITIONAL:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path


def _reopened(uri: str, is_exclusive: bool | None, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore(uri, is_exclusive=is_exclusive, options=options)
