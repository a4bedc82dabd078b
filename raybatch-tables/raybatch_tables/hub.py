"""Datasets of the Hugging Face hub, as targets.

An addition is a set of files whose names have its id, added in one commit of the repository; so a
second commit of the same rows finds them there, and two at once write the same files. The newest
commit writes the card, unless a person has written one.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

from raybatch_tables.base import Addition, Commit

_FILE_BYTES = 256 << 20
_ROW_GROUP_ROWS = 64 << 10
_CARD = "README.md"
_MARK = "<!-- written by raybatch -->"


class HubDataset:
    """A dataset repository, named organization/name; its token is that of huggingface_hub."""

    def __init__(self, name: str) -> None:
        self._api, self._name = HfApi(), name

    def schema(self) -> pa.Schema | None:
        """Return None: files of other columns may be beside each other."""
        return None

    def commits(self, addition_id: str) -> list[Commit]:
        try:
            names = self._api.list_repo_files(self._name, repo_type="dataset")
        except RepositoryNotFoundError:
            return []
        if _facts_name(addition_id) not in names:
            return []
        path = self._api.hf_hub_download(self._name, _facts_name(addition_id), repo_type="dataset")
        facts = json.loads(Path(path).read_text())
        if not set(facts["files"]) <= set(names):  # a person removed some
            return []
        return [Commit(version="main", num_rows=facts["rows"])]

    def create(self, schema: pa.Schema) -> None:
        self._api.create_repo(self._name, repo_type="dataset", exist_ok=True, private=True)

    def append(self, addition: Addition) -> None:
        operations, num_rows = list[CommitOperationAdd](), 0
        with tempfile.TemporaryDirectory() as folder:
            for path, rows in _files(addition, Path(folder)):
                operation = CommitOperationAdd(f"data/{path.name}", path)
                # large files go to the store now, small ones with the commit
                self._api.preupload_lfs_files(self._name, [operation], repo_type="dataset")
                operations.append(operation)
                num_rows += rows
            if self.commits(addition.id):
                return
            names = [operation.path_in_repo for operation in operations]
            facts = {**addition.about, "rows": num_rows, "files": names}
            text = json.dumps(facts, indent=1).encode()
            operations.append(CommitOperationAdd(_facts_name(addition.id), text))
            if self._may_write_card():
                card = _card(self._name, facts).encode()
                operations.append(CommitOperationAdd(_CARD, card))
            self._api.create_commit(
                self._name,
                operations,
                commit_message=f"Add {num_rows} rows by raybatch",
                repo_type="dataset",
            )

    def open(self, version: str | None) -> tuple[str, pa.RecordBatchReader]:
        raise ValueError(
            f"a dataset of the hub is read as files; write source: "
            f"hf://datasets/{self._name}/data/*.parquet"
        )

    def _may_write_card(self) -> bool:
        try:
            path = self._api.hf_hub_download(self._name, _CARD, repo_type="dataset")
        except EntryNotFoundError:
            return True
        return _MARK in Path(path).read_text(encoding="utf-8")


def _facts_name(addition_id: str) -> str:
    return f"raybatch/{addition_id}.json"


def _files(addition: Addition, folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield Parquet files of the rows with their numbers of rows, one at a time."""
    number, batches = 0, iter(addition.rows)
    batch = next(batches, None)
    while batch is not None or number == 0:
        path = folder / f"{addition.id}-{number:05d}.parquet"
        num_bytes = num_rows = 0
        with pq.ParquetWriter(path, addition.schema, compression="zstd") as writer:
            while batch is not None and num_bytes < _FILE_BYTES:
                writer.write_batch(batch, row_group_size=_ROW_GROUP_ROWS)
                num_bytes, num_rows = path.stat().st_size, num_rows + batch.num_rows
                batch = next(batches, None)
        yield path, num_rows
        number += 1


def _card(name: str, facts: dict[str, object]) -> str:
    lines = "\n".join(
        f"| {key} | {str(value).replace('|', '/')} |"
        for key, value in facts.items()
        if key != "files"
    )
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
