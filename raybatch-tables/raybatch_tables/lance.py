"""Tables of Lance, by the library pylance.

An addition is named by a property of its transaction, then also by an entry in the config of
the table, since transactions of old versions are removed. Lance lets two appends at once both pass,
so the later one of one addition is taken back.
"""

import logging

import lance
import pyarrow as pa

from raybatch_tables.base import Addition, Commit

_KEY, _CHECKSUM = "raybatch.addition", "raybatch.checksum"
_MAX_TRIES = 5

logger = logging.getLogger(__name__)


class LanceTable:
    """A table at a path or URI."""

    def __init__(self, place: str, storage_options: dict[str, str] | None) -> None:
        self._place, self._options = place, storage_options

    def schema(self) -> pa.Schema | None:
        table = self._newest()
        return None if table is None else table.schema

    def create(self, schema: pa.Schema) -> None:
        try:
            lance.write_dataset(
                schema.empty_table(), self._place, mode="create", storage_options=self._options
            )
        except OSError:
            if self._newest() is None:
                raise

    def commits(self, addition_id: str) -> list[Commit]:
        table = self._newest()
        if table is None:
            return []
        if not (known := _transactions_of(table, addition_id)):
            checksum = table.config().get(_property(addition_id))
            unknown = Commit(version=None, num_rows=None, checksum=checksum)
            return [] if checksum is None else [unknown]
        first, *later = known.items()
        return [
            Commit(
                version=str(version),
                num_rows=sum(fragment.num_rows for fragment in one.operation.fragments),
                checksum=one.transaction_properties.get(_CHECKSUM),
            )
            for version, one in [first, *(item for item in later if _left_of(table, item[1]))]
        ]

    def append(self, addition: Addition) -> None:
        if not self.commits(addition.id):
            lance.write_dataset(
                addition.rows,
                self._place,
                mode="append",
                storage_options=self._options,
                transaction_properties={_KEY: addition.id, _CHECKSUM: addition.checksum},
            )
        for _ in range(_MAX_TRIES):
            try:
                return self._settle(addition)
            except OSError as error:  # another process does the same
                logger.info("%s: trying again, since %s", self._place, error)
        self._settle(addition)

    def open(self, version: str | None) -> tuple[str, pa.RecordBatchReader]:
        table = self._at(None if version is None else int(version))
        return str(table.version), table.scanner().to_reader()

    def _settle(self, addition: Addition) -> None:
        """Take back all commits of an addition but the first, then note it in the config."""
        table = self._at(None)
        _, *later = _transactions_of(table, addition.id).values() or [None]
        if left := [fragment for one in later for fragment in _left_of(table, one)]:
            undo = lance.LanceOperation.Delete([], left, "true")
            lance.LanceDataset.commit(
                table, undo, read_version=table.version, storage_options=self._options
            )
            table = self._at(None)
        if _property(addition.id) not in table.config():
            table.update_config({_property(addition.id): addition.checksum})

    def _at(self, version: int | None) -> lance.LanceDataset:
        return lance.dataset(self._place, version=version, storage_options=self._options)

    def _newest(self) -> lance.LanceDataset | None:
        try:
            return self._at(None)
        except ValueError as error:
            if "not found" in str(error):  # Lance has no class for it
                return None
            raise


def _property(addition_id: str) -> str:
    return f"{_KEY}.{addition_id}"


def _transactions_of(table: lance.LanceDataset, addition_id: str) -> dict[int, lance.Transaction]:
    """Return the transactions that made an addition, by version, oldest first."""
    # newest first; those of versions that were cleaned up are None
    transactions = table.get_transactions(recent_transactions=table.version)
    found = {
        table.version - number: one
        for number, one in enumerate(transactions)
        if one is not None and (one.transaction_properties or {}).get(_KEY) == addition_id
    }
    return dict(sorted(found.items()))


def _left_of(table: lance.LanceDataset, transaction: lance.Transaction) -> list[int]:
    """Return the ids of those fragments that a transaction added and that the table still has."""
    added = {file.path for one in transaction.operation.fragments for file in one.files}
    return [
        fragment.fragment_id
        for fragment in table.get_fragments()
        if added.intersection(file.path for file in fragment.metadata.files)
    ]
