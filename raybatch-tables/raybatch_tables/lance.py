"""Tables of Lance, by the library pylance.

An addition is named by a property of its transaction, then also by an entry in the config of
the table, since transactions of old versions are removed. Lance lets two appends at once
both pass, so the later one of one addition is taken back.
"""

import logging

import lance
import pyarrow as pa

from raybatch_tables.base import Addition, Commit

_KEY = "raybatch.addition"
_MAX_TRIES = 5

logger = logging.getLogger(__name__)


class LanceTable:
    """A table at a path or URI."""

    def __init__(self, place: str, storage_options: dict[str, str] | None) -> None:
        self._place, self._options = place, storage_options

    def schema(self) -> pa.Schema | None:
        table = self._newest()
        return None if table is None else table.schema

    def commits(self, addition_id: str) -> list[Commit]:
        table = self._newest()
        if table is None:
            return []
        if not (known := _versions_of(table, addition_id)):
            is_noted = _property(addition_id) in table.config()
            return [Commit(version=None, num_rows=None)] if is_noted else []
        first, *later = known
        versions = [first, *(one for one in later if self._left_of(table, one))]
        return [
            Commit(version=str(one), num_rows=sum(added.count_rows() for added in self._added(one)))
            for one in versions
        ]

    def create(self, schema: pa.Schema) -> None:
        try:
            lance.write_dataset(
                schema.empty_table(), self._place, mode="create", storage_options=self._options
            )
        except OSError:
            if self._newest() is None:
                raise

    def append(self, addition: Addition) -> None:
        if not self.commits(addition.id):
            lance.write_dataset(
                addition.rows,
                self._place,
                mode="append",
                storage_options=self._options,
                transaction_properties={_KEY: addition.id},
            )
        for _ in range(_MAX_TRIES):
            try:
                return self._settle(addition.id)
            except OSError as error:  # another process does the same
                logger.info("%s: trying again, since %s", self._place, error)
        self._settle(addition.id)

    def open(self, version: str | None) -> tuple[str, pa.RecordBatchReader]:
        table = self._at(None if version is None else int(version))
        return str(table.version), table.scanner().to_reader()

    def _settle(self, addition_id: str) -> None:
        """Take back all commits of an addition but the first, then note it in the config."""
        table = self._at(None)
        if not (versions := _versions_of(table, addition_id)):  # removed after they were noted
            return
        first, *later = versions
        if left := [one for version in later for one in self._left_of(table, version)]:
            undo = lance.LanceOperation.Delete([], left, "true")
            lance.LanceDataset.commit(
                table, undo, read_version=table.version, storage_options=self._options
            )
            table = self._at(None)
        if _property(addition_id) not in table.config():
            table.update_config({_property(addition_id): str(first)})

    def _left_of(self, table: lance.LanceDataset, version: int) -> list[int]:
        """Return those fragments that a version added and that a later one still has."""
        left = {one.fragment_id for one in table.get_fragments()}
        return [one.fragment_id for one in self._added(version) if one.fragment_id in left]

    def _added(self, version: int) -> list[lance.LanceFragment]:
        before = set()
        if version > 1:
            before = {one.fragment_id for one in self._at(version - 1).get_fragments()}
        now = self._at(version).get_fragments()
        return [one for one in now if one.fragment_id not in before]

    def _at(self, version: int | None) -> lance.LanceDataset:
        return lance.dataset(self._place, version=version, storage_options=self._options)

    def _newest(self) -> lance.LanceDataset | None:
        try:
            return self._at(None)
        except ValueError as error:
            if "not found" in str(error):
                return None
            raise


def _property(addition_id: str) -> str:
    return f"{_KEY}.{addition_id}"


def _versions_of(table: lance.LanceDataset, addition_id: str) -> list[int]:
    """Return the versions whose transaction has an addition, oldest first."""
    # newest first; those of versions that were cleaned up are None
    transactions = table.get_transactions(recent_transactions=table.version)
    return sorted(
        table.version - number
        for number, one in enumerate(transactions)
        if one is not None and (one.transaction_properties or {}).get(_KEY) == addition_id
    )
