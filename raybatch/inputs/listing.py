"""Which files a source has: a file, a folder or a glob, in any file system that fsspec knows."""

import glob
import json
import logging
import os
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from raybatch.durable.storage import real_path
from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import safe_text

logger = logging.getLogger(__name__)

PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = tuple(
    f"{name}{end}" for end in ("", ".gz", ".zst") for name in (".jsonl", ".ndjson", ".json")
)
IPC_SUFFIXES = (".arrow", ".feather", ".ipc")
_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
# names of different versions
_INDICES = ("_indices_files", "_indices_data_files")


def saved_datasets(
    fs: fsspec.AbstractFileSystem, paths: Collection[str], *, has_columns: bool
) -> dict[str, list[str]]:
    """Return the folders of saved datasets among some files, to their data files in order.

    Raises:
        ConfigError: several splits, rows that are not those of the files, or a file that lacks.
    """
    known = set(paths)
    for path in sorted(known):
        if posixpath.basename(path) != _DICT:
            continue
        content = _read_json(fs, path)
        splits = content.get("splits") if isinstance(content, dict) else None
        if isinstance(splits, list):
            folder = safe_text(posixpath.dirname(path))
            names = [safe_text(str(split)) for split in splits]
            example = f": {folder}/{names[0]}" if names else ""
            raise ConfigError(
                f"{folder} is a saved DatasetDict with the splits {', '.join(names)}; take the "
                f"folder of one of them as the source{example}"
            )
    datasets = {}
    for path in sorted(known):
        folder = posixpath.dirname(path)
        if posixpath.basename(path) != _STATE or f"{folder}/{_INFO}" not in known:
            continue
        state = _read_json(fs, path)
        if isinstance(state, dict) and "_data_files" in state:
            _check_rows(state, path, has_columns)
            entries = state["_data_files"] or []
            stored = [one.get("filename") if isinstance(one, dict) else None for one in entries]
            for name in stored:
                if not isinstance(name, str) or f"{folder}/{name}" not in known:
                    raise ConfigError(
                        f"{safe_text(path)} names the data file {name!r}, which is not in its "
                        "folder; copy the whole folder, or save the dataset again"
                    )
            datasets[folder] = [f"{folder}/{name}" for name in stored]
    return datasets


def _check_rows(state: dict[str, Any], path: str, has_columns: bool) -> None:
    where = f"the dataset of {safe_text(path)}"
    if any(state.get(name) for name in _INDICES):
        raise ConfigError(
            f"{where} picks or reorders rows by a file of indices; save it again with "
            "dataset.flatten_indices().save_to_disk(...)"
        )
    if state.get("_format_columns") and not has_columns:
        raise ConfigError(
            f"{where} shows only the columns {state['_format_columns']} of its files; name the "
            "columns to read (columns), or save it again after dataset.reset_format()"
        )


def _read_json(fs: fsspec.AbstractFileSystem, path: str) -> object:
    try:
        return json.loads(fs.cat_file(path))
    except ValueError:
        return None


class ListedFile(NamedTuple):
    """A file of a source; its printable name, relative to the source's root, is part of row ids."""

    path: str
    name: str


class Root(NamedTuple):
    """Where a source lies; a glob is a pattern for which there is no file or folder of its name."""

    fs: Any
    path: str
    is_glob: bool

    @classmethod
    def of(cls, source: str) -> "Root":
        fs, path = fsspec.core.url_to_fs(source)
        return cls(fs, path, glob.has_magic(path) and not fs.exists(path))

    @property
    def folder(self) -> str:
        """The source itself, or the folder in front of the first wildcard of a glob."""
        if not self.is_glob:
            return self.path
        first = min(self.path.index(c) for c in "*?[" if c in self.path)
        return self.path[:first].rpartition("/")[0]

    def without_links(self) -> "Root":
        folder = real_path(self.fs, self.folder or "/").rstrip("/")
        return self._replace(path=folder + self.path[len(self.folder) :])

    def name_of(self, path: str) -> str:
        return path.removeprefix(self.folder).lstrip("/")

    def is_hidden(self, path: str) -> bool:
        return any(part.startswith(("_", ".")) for part in self.name_of(path).split("/"))

    def matching(self, paths: Iterable[str]) -> list[str]:
        pattern, least = re.compile(glob_translate(self.path)), len(self.folder)

        def is_matched(path: str) -> bool:
            while len(path) > least:
                if pattern.match(path):
                    return True
                path = posixpath.dirname(path)
            return False

        return [path for path in paths if is_matched(path)]


def list_files(source: str, *, has_columns: bool = False) -> list[ListedFile]:
    """Return the files of a source, sorted by name; those of a saved dataset in its order.

    A folder that a glob matches is searched through like one that is named. Names that begin with
    "_" or "." are left out, and so is a link that leads back to a folder above it. `has_columns`:
    the user names the columns to read.

    Raises:
        ConfigError: there is no file, or a saved dataset that cannot be read as it is.
    """
    # a word in front stands for a cache of files
    if "::" in source and source.split("::")[0] not in fsspec.available_protocols():
        raise _chained(f"source {safe_text(source)}")
    root = Root.of(source)
    if root.is_glob and isinstance(root.fs, LocalFileSystem) and "**" in root.path:
        paths = root.matching(_files_below(root.fs, root.folder))
    elif root.is_glob:
        found = set[str]()
        for path, info in root.fs.glob(root.path, detail=True).items():
            found.update(_files_below(root.fs, path) if info["type"] == "directory" else [path])
        paths = sorted(found)
    elif root.fs.isdir(root.path):
        paths = _files_below(root.fs, root.path)
    elif root.fs.exists(root.path):
        paths, root = [root.path], root._replace(path=root.path.rpartition("/")[0])
    else:
        raise ConfigError(f"source {source!r} does not exist")
    paths = [path for path in paths if not root.is_hidden(path)]
    saved = saved_datasets(root.fs, paths, has_columns=has_columns)
    suffixes = PARQUET_SUFFIXES + JSON_SUFFIXES + IPC_SUFFIXES
    # a place in the order of names, to the file that stands there
    places = {
        root.name_of(path): path
        for path in paths
        if path.lower().endswith(suffixes) and posixpath.dirname(path) not in saved
    }
    for folder, data_files in saved.items():
        for index, path in enumerate(data_files):
            places[root.name_of(f"{folder}/{index:09d}")] = path
    if not places:
        why = ", which was read as a pattern because there is no such file or folder,"
        raise ConfigError(
            f"source {source!r}{why if root.is_glob else ''} holds no file that ends in "
            f"{', '.join(suffixes)}; other formats have to be converted to one of these"
        )
    if chained := [path for path in places.values() if "::" in path]:
        raise _chained(f"source file {safe_text(min(chained))}")
    return [
        ListedFile(root.fs.unstrip_protocol(path), safe_text(root.name_of(path)))
        for _, path in sorted(places.items())
    ]


def names_by_links(root: Root, path: str) -> Iterator[str]:
    """Yield the names below a local source by which links in it lead to the folder `path`."""
    if not isinstance(root.fs, LocalFileSystem) or (root.is_glob and "**" not in root.path):
        return
    to_search, seen = [root.folder], set[str]()
    while to_search:
        for folder, children, _ in os.walk(to_search.pop()):
            children[:] = [name for name in children if not name.startswith(("_", "."))]
            for link in (os.path.join(folder, name) for name in children):
                target = os.path.realpath(link) if os.path.islink(link) else ""
                if not target or target in seen:
                    continue
                seen.add(target)
                to_search.append(link)
                if f"{path}/".startswith(f"{target}/"):
                    yield link + path[len(target) :]


def _chained(what: str) -> ConfigError:
    return ConfigError(
        f"{what} has '::' in its path, which file systems take for a chain of protocols; rename it"
    )


def _files_below(fs: fsspec.AbstractFileSystem, folder: str) -> list[str]:
    is_local = isinstance(fs, LocalFileSystem)
    return list(_walk(folder, (os.path.realpath(folder),)) if is_local else fs.find(folder))


def _walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """Yield the files below a local folder; one that cannot be listed is an error.

    `above` are the real paths of the folder and of those that it was reached through.
    """
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        path = f"{folder.rstrip('/')}/{entry.name}"
        if not entry.is_dir():
            # pipes would be waited for; a link without its target is told when it is opened
            if entry.is_file() or not os.path.exists(path):
                yield path
        elif not entry.name.startswith(("_", ".")):
            real = os.path.realpath(path)
            if real in above:
                logger.warning("the link %s leads back to a folder above it", safe_text(path))
            else:
                yield from _walk(path, (*above, real))
