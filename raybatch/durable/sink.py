"""The folder that a job writes to: whose it is, and what an earlier run has left there."""

import json
import os
import posixpath
import re
import time
from collections.abc import Collection, Sequence

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.layout import (
    DATA,
    DONE,
    FRAGMENTS,
    PLAN,
    PLAN_ORDER,
    STAGING,
    SUCCESS,
    part_unit,
    probe_name,
)
from raybatch.durable.run_log import FRESH_S, live_runs
from raybatch.durable.storage import Store, error_context, real_path, store_of
from raybatch.errors import ConfigError, did_you_mean

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
_OURS = re.compile(r"_raybatch/(?:(?:plan|frag|runs|attempts|done|staging)/(?:[^/]+/)?)?[^/]+")


def check_place(sink: str) -> None:
    """Raise ConfigError where the workers of a job could not write."""
    if "::" in sink:
        raise ConfigError(
            f"sink {sink!r} has '::' in its path, which file systems take for a chain of "
            "protocols; choose another folder"
        )
    if sink.startswith("memory:"):
        raise ConfigError(
            f"sink {sink!r} lies in the memory of one process, which other workers do not see; "
            "choose a folder or a bucket"
        )


def prepare_sink(
    sink: str, *, is_overwrite: bool, source_paths: Collection[str] = frozenset()
) -> None:
    """Make the folder and mark it, or take it as an earlier run of raybatch has left it.

    With `is_overwrite` what runs have written is removed: parts and the files about runs. Other
    files in a marked folder stay.

    Args:
        sink: folder, local or with a protocol.
        source_paths: files that are read, with their protocols.

    Raises:
        ConfigError: there are files in it but no mark of an earlier run, or files that are read;
            or the folder cannot be written, or with `is_overwrite` another run writes there.
    """
    with error_context(f"sink {sink!r} cannot be used; choose a folder that can be written"):
        fs, root = fsspec.core.url_to_fs(sink)
        root = root.rstrip("/")
        # some clients keep listings of buckets, for as long as the process lives
        fs.invalidate_cache()
        if fs.isfile(root):
            raise ConfigError(f"sink {sink!r} is a file; name a folder for the output")
        _check_no_source(sink, fs, root, source_paths)
        store = store_of(sink)
        paths = fs.find(root) if fs.exists(root) else []
        names = [path.removeprefix(root).lstrip("/") for path in paths]
        # another run that begins at this moment may be about to write its mark; readers and runs
        # leave names with a dot alone, such as .gitkeep
        ours = f"{STAGING}/", probe_name("")
        is_hidden = re.compile(r"\.[^/]*").fullmatch
        foreign = [name for name in names if not (name.startswith(ours) or is_hidden(name))]
        if foreign and _MARKER not in names and store.size(_MARKER) is None:
            raise ConfigError(
                f"sink {sink!r} holds {len(foreign)} files, for example {foreign[0]}, and no "
                f"{_MARKER} of an earlier run, so nothing is written there; choose another folder"
            )
        if isinstance(fs, LocalFileSystem) and DATA in names:
            raise ConfigError(
                f"{root}/{DATA} is a file, and the folder of the parts belongs there; move it away"
            )
        if is_overwrite:
            for folder in ("", PLAN_ORDER):
                _check_removable(sink, names, folder)
            # records of units are removed before the units, and the plan before its shards
            for name in sorted(filter(_is_ours, names), key=_order_of_removal):
                store.remove(name)
        elif foreign:
            _check_layout(sink, store.read(_MARKER))
        store.create(_MARKER, json.dumps({"writer": "raybatch", "layout": _LAYOUT}).encode())


def check_partitions(source: pa.Schema, columns: Sequence[str]) -> None:
    """Raise ConfigError where the output cannot be laid out by the values of these columns."""
    for name in columns:
        if name not in source.names:
            raise ConfigError(
                f"partition_by: the source has no column {name!r}{did_you_mean(name, source.names)}"
                "; the output is laid out by columns of the source, not by generated ones"
            )
        if name.startswith(("_", ".")):
            raise ConfigError(
                f"partition_by: readers skip folders whose names begin as that of {name!r} does; "
                "rename the column"
            )
        kind = source.field(name).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not any(is_kind(kind) for is_kind in _PARTITION_TYPES):
            raise ConfigError(
                f"partition_by: column {name!r} is {kind}; take one of texts, whole numbers, "
                "booleans or dates"
            )


def _check_no_source(
    sink: str, fs: fsspec.AbstractFileSystem, root: str, source_paths: Collection[str]
) -> None:
    """Refuse a sink that holds files of the source, by whatever links either is named."""
    below = fs.unstrip_protocol(root).rstrip("/") + "/"
    really_below = fs.unstrip_protocol(real_path(fs, root)).rstrip("/") + "/"
    local = "file://"
    for path in source_paths:
        is_local = path.startswith(local)
        real = local + os.path.realpath(path.removeprefix(local)) if is_local else path
        if path.startswith(below) or real.startswith(really_below):
            raise ConfigError(
                f"the source file {path} lies below the sink {sink!r}; choose another"
            )


def _check_removable(sink: str, names: Collection[str], folder: str) -> None:
    """Refuse to begin again in an output that another run or somebody else writes to.

    The `folder` below the sink is of an output of its own; "" is that of the sink itself.
    """
    prefix = f"{folder}/" if folder else ""
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    strange = [name for name in own if name.startswith(f"{DATA}/") and not _is_ours(name)]
    if strange:
        raise ConfigError(
            f"sink {sink!r} holds {len(strange)} files that no run has written beside its parts, "
            f"such as {prefix}{strange[0]}, so overwrite could not begin again; move them away, or "
            "choose another folder"
        )
    for run in live_runs(store_of(f"{sink.rstrip('/')}/{folder}".rstrip("/")), time.time()):
        raise ConfigError(
            f"sink {sink!r} is in use: {run}, and overwrite would remove what it writes. End that "
            f"run, or where it is dead wait until its heartbeat is {FRESH_S:.0f} s old, or remove "
            f"{run.path}"
        )


def _is_ours(name: str) -> bool:
    return name == SUCCESS or part_unit(name) is not None or bool(_OURS.fullmatch(name))


def _order_of_removal(name: str) -> tuple[int, str]:
    # without the first plan later ones would be taken to follow another, and the mark goes last:
    # without it a second attempt would refuse what is left
    rank = {SUCCESS: 0, PLAN: 2, _MARKER: 4}.get(name, 1 if _LATER_PLAN.fullmatch(name) else 3)
    return rank, name


def _check_layout(sink: str, marker: bytes) -> None:
    try:
        layout = json.loads(marker)["layout"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{sink.rstrip('/')}/{_MARKER} is not what a run writes, so it is not clear whose "
            "output this is; choose another folder"
        ) from None
    if layout != _LAYOUT:
        raise ConfigError(
            f"the output in {sink} has layout {layout}, this version of raybatch writes layout "
            f"{_LAYOUT}; choose another folder, or set overwrite=True (--overwrite in a shell)"
        )


def holds_answers(sink: str) -> bool:
    """Return whether runs have written rows below a sink, be it to the journal alone."""
    store = store_of(sink)
    folders = (DATA, DONE, FRAGMENTS)
    return store.size(SUCCESS) is not None or any(store.names(folder) for folder in folders)


def is_marked(store: Store) -> bool:
    """Return whether a run of this library has written the folder."""
    return store.size(_MARKER) is not None


def output_files(sink: str) -> list[str]:
    """Return the paths of the part files, sorted."""
    store = store_of(sink)
    names = sorted(name for name in store.names(DATA) if part_unit(name) is not None)
    return [posixpath.join(store.uri, name) for name in names]
