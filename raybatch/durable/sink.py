"""The output folder of a job: checks of its ownership, and preparation for a run."""

import json
import os
import posixpath
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.layout import (
    BELOW,
    COPY,
    DATA,
    DONE,
    FRAGMENTS,
    JOINED,
    PLAN,
    SOURCE,
    SOURCE_RECORD,
    STAGING,
    SUCCESS,
    part_unit,
    probe_name,
    source_folder,
)
from raybatch.durable.run_log import FRESH_S, live_runs
from raybatch.durable.storage import Store, error_context, real_path, store_of
from raybatch.errors import ConfigError, did_you_mean, shell_path

_PARTITION_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_date,
)

# its presence marks a folder that a run of this library has written
_MARKER = "_raybatch/run.json"
_LAYOUT = 2
_LATER_PLAN = re.compile(r"_raybatch/plan-\d+\.json")
_FOLDERS = "plan|frag|runs|attempts|done|joined|published|staging"
_OURS = re.compile(rf"_raybatch/(?:(?:{_FOLDERS})/(?:[^/]+/)?)?[^/]+")


def check_place(sink: str) -> None:
    """Raise ConfigError if workers cannot write to a sink, or it is inside another output."""
    if "::" in sink:
        raise ConfigError(
            f"sink {sink!r} has '::' in its path, which fsspec reads as a chain of protocols; "
            "choose another folder"
        )
    if sink.startswith("memory:"):
        raise ConfigError(
            f"sink {sink!r} is in the memory of one process, which other workers cannot access; "
            "choose a folder or a bucket"
        )
    with error_context(f"sink {sink!r} cannot be used; choose a writable folder"):
        fs, path = fsspec.core.url_to_fs(sink)
        parents, path = [], real_path(fs, path)
        while (parent := fs._parent(path)) and parent != path:
            parents.append(path := parent)
        for parent in parents:
            if fs.exists(f"{parent.rstrip('/')}/{_MARKER}"):
                raise ConfigError(
                    f"sink {sink!r} is inside the output {parent}, whose readers would see "
                    "every row twice, or rows of another job; choose another folder"
                )
    if sink.rstrip("/").rpartition("/")[2] in BELOW:
        raise ConfigError(f"sink {sink!r} has the name of a folder below an output; choose another")


def prepare_sink(
    sink: str, *, is_overwrite: bool, source_paths: Collection[str] = frozenset()
) -> None:
    """Create and mark the folder, or accept one that an earlier run of raybatch has marked.

    With `is_overwrite` all files of earlier runs are removed. Other files in a marked folder are
    kept.

    Args:
        sink: folder, local or with a protocol.
        source_paths: source files of the job, with their protocols.

    Raises:
        ConfigError: the folder has files but no mark of an earlier run, or has source files; it
            cannot be written; or with `is_overwrite` another run writes to it.
    """
    with error_context(f"sink {sink!r} cannot be used; choose a writable folder"):
        fs, root = fsspec.core.url_to_fs(sink)
        root = root.rstrip("/")
        # some clients cache listings of buckets until the process ends
        fs.invalidate_cache()
        if fs.isfile(root):
            raise ConfigError(f"sink {sink!r} is a file; name a folder for the output")
        _check_no_source(sink, fs, root, source_paths)
        store = store_of(sink)
        paths = fs.find(root) if fs.exists(root) else []
        names = [path.removeprefix(root).lstrip("/") for path in paths]
        # a concurrent run may be about to write its mark; names with a dot, such as .gitkeep, are
        # ignored by readers and runs
        ours = f"{STAGING}/", probe_name("")
        is_hidden = re.compile(r"\.[^/]*").fullmatch
        foreign = [name for name in names if not (name.startswith(ours) or is_hidden(name))]
        if foreign and _MARKER not in names and store.size(_MARKER) is None:
            raise ConfigError(
                f"sink {sink!r} has {len(foreign)} files, for example {foreign[0]}, but no "
                f"{_MARKER} of an earlier run; choose another folder"
            )
        if isinstance(fs, LocalFileSystem) and DATA in names:
            raise ConfigError(
                f"{root}/{DATA} is a file, but must be the folder of the parts; move it away"
            )
        if is_overwrite:
            _remove_output(sink, store, names)
        elif foreign:
            _check_layout(sink, store.read(_MARKER))
        store.create(_MARKER, json.dumps({"writer": "raybatch", "layout": _LAYOUT}).encode())


def check_partitions(source: pa.Schema, columns: Sequence[str]) -> None:
    """Raise ConfigError if the output cannot be partitioned by these columns."""
    for name in columns:
        if name not in source.names:
            raise ConfigError(
                f"partition_by: the source has no column {name!r}{did_you_mean(name, source.names)}"
                "; only columns of the source can partition the output"
            )
        if name.startswith(("_", ".")):
            raise ConfigError(
                f"partition_by: readers skip folders with a name like {name!r}; rename the column"
            )
        kind = source.field(name).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not any(is_kind(kind) for is_kind in _PARTITION_TYPES):
            raise ConfigError(
                f"partition_by: column {name!r} is {kind}; use a column of texts, whole numbers, "
                "booleans or dates"
            )


def _check_no_source(
    sink: str, fs: fsspec.AbstractFileSystem, root: str, source_paths: Collection[str]
) -> None:
    """Raise ConfigError if the sink contains files of the source, also through symlinks."""
    below = fs.unstrip_protocol(root).rstrip("/") + "/"
    really_below = fs.unstrip_protocol(real_path(fs, root)).rstrip("/") + "/"
    local = "file://"
    for path in source_paths:
        if path.startswith(f"{below}{SOURCE}/"):
            continue
        is_local = path.startswith(local)
        real = local + os.path.realpath(path.removeprefix(local)) if is_local else path
        if path.startswith(below) or real.startswith(really_below):
            raise ConfigError(
                f"the source file {path} is below the sink {sink!r}; choose another sink"
            )


def _remove_output(sink: str, store: Store, names: Collection[str]) -> None:
    """Remove an output and those below it; ConfigError: another program or run writes to one."""
    own = {
        prefix: [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for prefix in (*(f"{folder}/" for folder in BELOW), "")
    }
    for prefix, of_output in reversed(own.items()):
        strange = [name for name in of_output if name.startswith(f"{DATA}/") and not _is_ours(name)]
        if strange:
            raise ConfigError(
                f"cannot overwrite sink {sink!r}: it has {len(strange)} files that no run has "
                f"written, such as {prefix}{strange[0]}; move them away, or choose another folder"
            )
    check_not_in_use(sink)
    # records of units are removed before the units, and the plan before its shards
    for prefix, of_output in own.items():
        for name in sorted(filter(_is_ours, of_output), key=_order_of_removal):
            store.remove(prefix + name)


def check_not_in_use(sink: str) -> None:
    """Raise ConfigError if a live run writes to a sink that is to be overwritten."""
    for folder in (sink, *folders_below(sink)):
        for run in live_runs(store_of(folder), time.time()):
            raise ConfigError(
                f"sink {sink!r} is in use: {run}, and overwrite would remove its files. End that "
                f"run, or if it is dead wait until its heartbeat is {FRESH_S:.0f} s old, or remove "
                f"{run.path}"
            )


def _is_ours(name: str) -> bool:
    return name == SUCCESS or part_unit(name) is not None or bool(_OURS.fullmatch(name))


def _order_of_removal(name: str) -> tuple[int, str]:
    # later plans go before the first one that they extend; the mark goes last, since without it a
    # second attempt would refuse the remaining files
    if name.startswith(f"{JOINED}/"):  # else a new plan would take units for joined ones
        return 0, name
    rank = {SUCCESS: 0, PLAN: 2, _MARKER: 4}.get(name, 1 if _LATER_PLAN.fullmatch(name) else 3)
    return rank, name


def _check_layout(sink: str, marker: bytes) -> None:
    try:
        layout = json.loads(marker)["layout"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{sink.rstrip('/')}/{_MARKER} was not written by a run; choose another folder"
        ) from None
    if layout != _LAYOUT:
        raise ConfigError(
            f"the output in {sink} has layout {layout}, but this version of raybatch writes layout "
            f"{_LAYOUT}; choose another folder, or set overwrite=True (--overwrite in a shell)"
        )


def holds_answers(sink: str) -> bool:
    """Return whether runs have written rows below a sink, even if only to the journal."""
    folders = (DATA, DONE, FRAGMENTS, JOINED)
    return any(
        store.size(SUCCESS) is not None or any(store.names(folder) for folder in folders)
        for store in (store_of(one) for one in (sink, *folders_below(sink)))
    )


def folders_below(sink: str) -> list[str]:
    """Return the folders of the outputs from which the output of a sink is made."""
    return [f"{sink.rstrip('/')}/{name}" for name in BELOW]


def is_marked(store: Store) -> bool:
    """Return whether a run of this library has written the folder."""
    return store.size(_MARKER) is not None


def begin_copy(store: Store, source: str, command: str) -> None:
    """Note that a folder gets a copy of the output `source`, made by `raybatch <command>`.

    Raises:
        ConfigError: it has rows of something else.
    """
    mine = {"source": source, "command": command}
    # a job that makes its output of another one has its first plan in a folder below
    outputs = (store, *map(store_of, folders_below(store.uri)))
    if all(one.size(PLAN) is None for one in outputs):
        store.create(COPY, json.dumps(mine).encode())
    if (known := _copy_record(store)) != mine:
        what = "rows of another output"
        if known:
            what = f"a copy of {known['source']} by `raybatch {known['command']}`"
        raise ConfigError(
            f"{store.uri} has {what}, not a copy of {source} by `raybatch {command}`; choose "
            "another folder"
        )


def how_to_resume(store: Store) -> str:
    """Return what to do so that an output is completed."""
    if known := _copy_record(store):
        paths = f"{shell_path(known['source'])} {shell_path(store.uri)}"
        return f"run `raybatch {known['command']} {paths}` again"
    return "run the job again"


def _copy_record(store: Store) -> dict[str, str]:
    """Return what a folder has a copy of; {} if it is no copy, or the record is damaged."""
    try:
        record = json.loads(store.read(COPY))
        return {name: str(record[name]) for name in ("source", "command")}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def source_record(store: Store) -> dict[str, Any] | None:
    """Return the record about rows of a Ray dataset that a job staged; None if there is none."""
    try:
        record: dict[str, Any] = json.loads(store.read(SOURCE_RECORD))
    except FileNotFoundError:
        return None
    return record


def unused_source_files(store: Store) -> list[str]:
    """Return the names of staged dataset files that no run reads.

    They were left by drivers that died, or that staged the dataset at the same time as another.
    """
    record = source_record(store)
    used = (SOURCE_RECORD,) if record is None else (SOURCE_RECORD, source_folder(record["token"]))
    return [name for name in store.names(SOURCE) if not name.startswith(used)]


def output_files(sink: str) -> list[str]:
    """Return the paths of the part files, sorted."""
    store = store_of(sink)
    names = sorted(name for name in store.names(DATA) if part_unit(name) is not None)
    return [posixpath.join(store.uri, name) for name in names]
