"""Folders that `Dataset.save_to_disk` of Hugging Face `datasets` has written.

    state.json         names the data files in order, and what else would change the rows
    dataset_info.json  says what the columns mean
    data-*.arrow       Arrow streams

A `DatasetDict` is a folder of such folders with a `dataset_dict.json`.
"""

import json
import posixpath
from collections.abc import Collection
from typing import Any

import fsspec

from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import safe_text

_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
# names of different versions
_INDICES = ("_indices_files", "_indices_data_files")


def saved_datasets(
    fs: fsspec.AbstractFileSystem, paths: Collection[str], *, has_columns: bool
) -> dict[str, list[str]]:
    """Return the folders of saved datasets among some files, to their data files in order.

    Raises:
        ConfigError: a folder of several splits, a dataset whose rows are not those of its files,
            or one that lacks a file.
    """
    known = set(paths)
    for path in sorted(known):
        if posixpath.basename(path) == _DICT:
            _refuse_splits(fs, path)
    datasets = {}
    for path in sorted(known):
        folder = posixpath.dirname(path)
        if posixpath.basename(path) != _STATE or f"{folder}/{_INFO}" not in known:
            continue
        state = _read_json(fs, path)
        if isinstance(state, dict) and "_data_files" in state:
            _check_rows(state, path, has_columns)
            datasets[folder] = _data_files(state, path, known)
    return datasets


def _refuse_splits(fs: fsspec.AbstractFileSystem, path: str) -> None:
    content = _read_json(fs, path)
    splits = content.get("splits") if isinstance(content, dict) else None
    if isinstance(splits, list):
        folder = safe_text(posixpath.dirname(path))
        names = [safe_text(str(split)) for split in splits]
        example = f": {folder}/{names[0]}" if names else ""
        raise ConfigError(
            f"{folder} is a saved DatasetDict with the splits {', '.join(names)}; take the folder "
            f"of one of them as the source{example}"
        )


def _check_rows(state: dict[str, Any], path: str, has_columns: bool) -> None:
    """Raise ConfigError where the dataset has other rows or columns than its files."""
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


def _data_files(state: dict[str, Any], path: str, known: set[str]) -> list[str]:
    folder = posixpath.dirname(path)
    files = []
    for entry in state["_data_files"] or []:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or f"{folder}/{name}" not in known:
            raise ConfigError(
                f"{safe_text(path)} names the data file {name!r}, which is not in its folder; "
                "copy the whole folder, or save the dataset again"
            )
        files.append(f"{folder}/{name}")
    return files


def _read_json(fs: fsspec.AbstractFileSystem, path: str) -> object:
    """Return the content of a JSON file; None if it is no JSON."""
    try:
        return json.loads(fs.cat_file(path))
    except ValueError:
        return None
