"""Lists the files of a source: a file, a folder or a glob, in any fsspec file system."""

import glob
import json
import logging
import os
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from raybatch.durable.commit import partition_values
from raybatch.durable.storage import real_path
from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import safe_text

logger = logging.getLogger(__name__)

PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = tuple(
    f"{name}{end}" for end in ("", ".gz", ".zst") for name in (".jsonl", ".ndjson", ".json")
)
CSV_SUFFIXES = tuple(f"{name}{end}" for end in ("", ".gz", ".zst") for name in (".csv", ".tsv"))
IPC_SUFFIXES = (".arrow", ".feather", ".ipc")
Kind = Literal["parquet", "json", "csv", "ipc"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
    **dict.fromkeys(JSON_SUFFIXES, "json"),
    **dict.fromkeys(CSV_SUFFIXES, "csv"),
    **dict.fromkeys(IPC_SUFFIXES, "ipc"),
}
# first bytes of files; also of Parquet with an encrypted footer and of Feather version 1
_KIND_OF_HEAD: dict[bytes, Kind] = {
    **dict.fromkeys((b"PAR1", b"PARE"), "parquet"),
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff", b"FEA1"), "ipc"),
    # gzip, zstd, marks of UTF-8 and UTF-16
    **dict.fromkeys((b"\x1f\x8b", b"\x28\xb5\x2f\xfd"), "json"),
    **dict.fromkeys((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"{", b"["), "json"),
}
_HEAD_BYTES = 256
_NAMES_SHOWN = 3
_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
# names in different versions of datasets
_INDICES = ("_indices_files", "_indices_data_files")


def saved_datasets(
    fs: fsspec.AbstractFileSystem, paths: Collection[str], *, has_columns: bool
) -> dict[str, list[str]]:
    """Return the data files, in order, of each folder that holds a saved Hugging Face dataset.

    `paths` are all files of the source. `has_columns`: the user names the columns to read.

    Raises:
        ConfigError: there are several splits, rows are reordered by indices, or a file is missing.
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
                f"{folder} is a saved DatasetDict with the splits {', '.join(names)}; use the "
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
                        f"{safe_text(path)} lists the data file {name!r}, which is not in its "
                        "folder; copy the whole folder, or save the dataset again"
                    )
            datasets[folder] = [f"{folder}/{name}" for name in stored]
    return datasets


def _check_rows(state: dict[str, Any], path: str, has_columns: bool) -> None:
    where = f"the dataset of {safe_text(path)}"
    if any(state.get(name) for name in _INDICES):
        raise ConfigError(
            f"{where} selects or reorders rows by an indices file; save it again with "
            "dataset.flatten_indices().save_to_disk(...)"
        )
    if state.get("_format_columns") and not has_columns:
        raise ConfigError(
            f"{where} shows only the columns {state['_format_columns']} of its files; set columns, "
            "or save it again after dataset.reset_format()"
        )


def _read_json(fs: fsspec.AbstractFileSystem, path: str) -> object:
    try:
        return json.loads(fs.cat_file(path))
    except ValueError:
        return None


class ListedFile(NamedTuple):
    """A file of a source; its printable name, relative to the source's root, is part of row ids.

    `folder_columns` are names and values of partition folders such as "lang=en" below the root.
    """

    path: str
    name: str
    kind: Kind
    folder_columns: tuple[tuple[str, str | None], ...] = ()


class Root(NamedTuple):
    """Location of a source; a pattern is a glob unless a file or folder has this name."""

    fs: Any
    path: str
    is_glob: bool

    @classmethod
    def of(cls, source: str) -> "Root":
        fs, path = fsspec.core.url_to_fs(source)
        return cls(fs, path, glob.has_magic(path) and not fs.exists(path))

    @property
    def folder(self) -> str:
        """The source itself, or the folder before the first wildcard of a glob."""
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

    Folders, also those that a glob matches, are searched recursively; names that begin with "_" or
    ".", links to a folder above and files with other suffixes are skipped and logged. For a file
    that is named, or matched by a glob that does not end in "*", the content decides its format.
    `has_columns`: the user names the columns to read.

    Raises:
        ConfigError: there is no file, or a saved dataset that cannot be read as it is.
    """
    # fsspec also has prefixes for caches of files
    if "::" in source and source.split("::")[0] not in fsspec.available_protocols():
        raise _chained(f"source {safe_text(source)}")
    root, paths, named = _resolved(source)
    hidden = [path for path in paths if root.is_hidden(path) and path not in named]
    paths = sorted(set(paths).difference(hidden))
    saved = saved_datasets(root.fs, paths, has_columns=has_columns)
    # name that gives a file its place in the order, to its path and kind
    places: dict[str, tuple[str, Kind]] = {}
    others = []
    for path in paths:
        if posixpath.dirname(path) in saved:
            continue
        kind = _kind_of_name(path)
        # the content decides for a single file, and for one without a known suffix
        if path in named and kind != "csv" and (kind is None or not root.is_glob):
            kind = _kind_of_content(root.fs, path) or kind
        if kind is None:
            others.append(root.name_of(path))
        else:
            places[root.name_of(path)] = path, kind
    for folder, data_files in saved.items():
        for index, path in enumerate(data_files):
            places[root.name_of(f"{folder}/{index:09d}")] = path, "ipc"
    left_out = _left_out(others, len(hidden))
    if not places:
        raise _nothing(source, root, left_out, is_file=bool(named) and not root.is_glob)
    if left_out:
        level = logging.WARNING if others else logging.INFO
        logger.log(level, "source %s: left out %s", safe_text(source), left_out)
    if chained := [path for path, _ in places.values() if "::" in path]:
        raise _chained(f"source file {safe_text(min(chained))}")
    return [
        ListedFile(
            root.fs.unstrip_protocol(path),
            safe_text(root.name_of(path)),
            kind,
            partition_values(root.name_of(path)),
        )
        for _, (path, kind) in sorted(places.items())
    ]


def _resolved(source: str) -> tuple[Root, list[str], set[str]]:
    """Return the location of a source, all paths in it, and those that it names explicitly."""
    root = Root.of(source)
    if not root.is_glob and root.fs.isdir(root.path):
        return root, _files_below(root.fs, root.path), set()
    if not root.is_glob and root.fs.exists(root.path):
        return root._replace(path=root.path.rpartition("/")[0]), [root.path], {root.path}
    if not root.is_glob:
        raise ConfigError(f"source {source!r} does not exist")
    if isinstance(root.fs, LocalFileSystem) and "**" in root.path:
        paths = root.matching(_files_below(root.fs, root.folder))
    else:
        paths = []
        for path, info in root.fs.glob(root.path, detail=True).items():
            is_folder = info["type"] == "directory" and not root.is_hidden(path)
            paths += _files_below(root.fs, path) if is_folder else [path]
    pattern = re.compile(glob_translate(root.path))
    named = {path for path in paths if pattern.match(path) and not root.is_hidden(path)}
    return root, paths, set() if root.path.endswith("*") else named


def _kind_of_name(path: str) -> Kind | None:
    return next((kind for end, kind in _KINDS.items() if path.lower().endswith(end)), None)


def _kind_of_content(fs: fsspec.AbstractFileSystem, path: str) -> Kind | None:
    """Return the format of a file by its first bytes; None if unknown or not readable."""
    try:
        head = fs.cat_file(path, start=0, end=_HEAD_BYTES)
    except OSError:
        return None  # reading the file raises the error
    begins = (head, head.lstrip())
    heads = _KIND_OF_HEAD.items()
    return next((kind for mark, kind in heads if any(b.startswith(mark) for b in begins)), None)


def _left_out(others: Sequence[str], num_hidden: int) -> str:
    """Return a text that lists the skipped files, "" for none."""
    by_ending: dict[str, list[str]] = {}
    for name in others:
        by_ending.setdefault(posixpath.splitext(name)[1].lower(), []).append(safe_text(name))
    parts = []
    for ending, names in sorted(by_ending.items()):
        shown = ", ".join(names[:_NAMES_SHOWN]) + ", ..." * (len(names) > _NAMES_SHOWN)
        what = f"named *{safe_text(ending)}" if ending else "without a suffix"
        parts.append(f"{_count(len(names), 'file')} {what} ({shown})")
    if num_hidden:
        parts.append(
            f"{_count(num_hidden, 'file or folder', 'files and folders')} with a leading '_' or '.'"
        )
    hint = " (to read such a file, name it as the source)" if others else ""
    return ", ".join(parts) + hint


def _nothing(source: str, root: Root, left_out: str, *, is_file: bool) -> ConfigError:
    endings = ", ".join(_KINDS)
    if is_file:
        return ConfigError(
            f"source {source!r} is not Parquet, JSON lines, CSV or Arrow IPC, by its content or "
            f"its name ({endings}); convert it to one of these"
        )
    why = " (read as a pattern, since no such file or folder exists)"
    return ConfigError(
        f"source {source!r}{why if root.is_glob else ''} has no file that ends in {endings}"
        f"{left_out and f', but {left_out}'}; convert other formats to one of these"
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def names_by_links(root: Root, path: str) -> Iterator[str]:
    """Yield the paths below a local source that lead to the folder `path` through symlinks."""
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
        f"{what} has '::' in its path, which fsspec reads as a chain of protocols; rename it"
    )


def _files_below(fs: fsspec.AbstractFileSystem, folder: str) -> list[str]:
    is_local = isinstance(fs, LocalFileSystem)
    return list(_walk(folder, (os.path.realpath(folder),)) if is_local else fs.find(folder))


def _walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """Yield the files below a local folder; a folder that cannot be listed is an error.

    `above` are the real paths of the folder and of its parents in the walk.
    """
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        path = f"{folder.rstrip('/')}/{entry.name}"
        if not entry.is_dir():
            # reading a pipe would block; a broken link is reported when it is opened
            if entry.is_file() or not os.path.exists(path):
                yield path
        elif entry.name.startswith(("_", ".")):
            yield path  # skipped like a file, and counted with them
        else:
            real = os.path.realpath(path)
            if real in above:
                logger.warning(
                    "not following the link %s: it leads back to a folder above it", safe_text(path)
                )
            else:
                yield from _walk(path, (*above, real))
