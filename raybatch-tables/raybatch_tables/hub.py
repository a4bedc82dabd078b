"""Datasets of the Hugging Face hub, as targets.

An addition is a set of files whose names have its id and a record of them, added in one commit on
the newest version of the repository that lacks the record. The newest commit writes the card,
unless a person has written one.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

from raybatch_tables.base import Addition, Commit

_FILE_BYTES = 256 << 20
_ROW_GROUP_ROWS = 64 << 10
_CARD = "README.md"
_MARK = "<!-- written by raybatch -->"
_MAX_TRIES = 5
# the newest version is another one than the commit was made for
_CONFLICTS = (409, 412)


class HubDataset:
    """A dataset repository, named organization/name; its token is that of huggingface_hub."""

    def __init__(self, name: str) -> None:
        self._api, self._name = HfApi(), name

    def schema(self) -> pa.Schema | None:
        """Return None: files of other columns may be beside each other."""
        return None

    def create(self, schema: pa.Schema) -> None:
        self._api.create_repo(self._name, repo_type="dataset", exist_ok=True, private=True)

    def commits(self, addition_id: str) -> list[Commit]:
        try:
            return self._commits_at(self._newest(), addition_id)
        except RepositoryNotFoundError:
            return []

    def append(self, addition: Addition) -> None:
        if self.commits(addition.id):
            return
        with tempfile.TemporaryDirectory() as folder:
            files, num_rows = list[CommitOperationAdd](), 0
            for path, rows in _files(addition, Path(folder)):
                file = CommitOperationAdd(f"data/{path.name}", path)
                # large files go to the store now, small ones with the commit
                self._api.preupload_lfs_files(self._name, [file], repo_type="dataset")
                if file.path_or_fileobj == b"":
                    path.unlink()
                files.append(file)
                num_rows += rows
            for _ in range(_MAX_TRIES):
                try:
                    return self._commit(addition, files, num_rows)
                except HfHubHTTPError as error:
                    if error.response.status_code not in _CONFLICTS:
                        raise
            self._commit(addition, files, num_rows)

    def open(self, version: str | None) -> tuple[str, pa.RecordBatchReader]:
        raise ValueError(
            f"a dataset of the hub is read as files; write source: "
            f"hf://datasets/{self._name}/data/*.parquet"
        )

    def _newest(self) -> str:
        return str(self._api.repo_info(self._name, repo_type="dataset").sha)

    def _commits_at(self, version: str, addition_id: str) -> list[Commit]:
        try:
            text = self._text_of(_record_name(addition_id), version)
        except EntryNotFoundError:
            return []
        facts = json.loads(text)
        return [Commit(version=None, num_rows=facts["rows"], checksum=facts["checksum"])]

    def _commit(self, addition: Addition, files: list[CommitOperationAdd], num_rows: int) -> None:
        version = self._newest()
        if self._commits_at(version, addition.id):
            return
        names = {file.path_in_repo for file in files}
        facts = {**addition.about, "rows": num_rows, "checksum": addition.checksum}
        record = json.dumps({**facts, "files": sorted(names)}, indent=1).encode()
        operations = [*files, CommitOperationAdd(_record_name(addition.id), record)]
        if self._may_write_card(version):
            operations.append(CommitOperationAdd(_CARD, _card(self._name, facts).encode()))
        self._api.create_commit(
            self._name,
            operations,
            commit_message=f"Add {num_rows} rows by raybatch",
            repo_type="dataset",
            parent_commit=version,
        )

    def _may_write_card(self, version: str) -> bool:
        try:
            return _MARK in self._text_of(_CARD, version)
        except EntryNotFoundError:
            return True

    def _text_of(self, name: str, version: str) -> str:
        path = self._api.hf_hub_download(self._name, name, repo_type="dataset", revision=version)
        return Path(path).read_text(encoding="utf-8")


def _record_name(addition_id: str) -> str:
    return f"raybatch/{addition_id}.json"


def _files(addition: Addition, folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield Parquet files of the rows with their numbers of rows, one at a time."""
    number, groups = 0, _row_groups(addition.rows)
    group = next(groups, None)
    while group is not None or number == 0:
        path = folder / f"{addition.id}-{number:05d}.parquet"
        num_rows = 0
        with pq.ParquetWriter(path, addition.schema, compression="zstd") as writer:
            while group is not None and (not num_rows or path.stat().st_size < _FILE_BYTES):
                writer.write_table(group, row_group_size=_ROW_GROUP_ROWS)
                num_rows += group.num_rows
                group = next(groups, None)
        yield path, num_rows
        number += 1


def _row_groups(rows: pa.RecordBatchReader) -> Iterator[pa.Table]:
    held, num_rows = list[pa.RecordBatch](), 0
    for batch in rows:
        held.append(batch)
        num_rows += batch.num_rows
        if num_rows >= _ROW_GROUP_ROWS:
            yield pa.Table.from_batches(held)
            held, num_rows = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _card(name: str, facts: dict[str, object]) -> str:
    lines = "\n".join(f"| {key} | {str(value).replace('|', '/')} |" for key, value in facts.items())
    return f"""---
configs:
- config_name: default
  data_files: data/*.parquet
tags:
- raybatch
- synthetic
---
{_MARK}

# {name}

Answers of a language model to the rows of a dataset, written by raybatch. The newest addition:

| what | value |
|---|---|
{lines}

Each row has the columns of its source, the answer, its status and its numbers of tokens; rows that
failed have an error. To read them: `datasets.load_dataset("{name}")`.
"""
