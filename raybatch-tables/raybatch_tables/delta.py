"""Tables of Delta Lake, by the library deltalake.

An addition is named by an application transaction, which Delta keeps beside the data for this: a
commit fails if one of the same name was made since its table was read (Delta protocol, "Transaction
identifiers").
"""

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, DeltaProtocolError

from raybatch_tables.base import Addition, Commit

_KEY, _CHECKSUM = "raybatch.addition", "raybatch.checksum"


class DeltaLakeTable:
    """A table at a path or URI."""

    def __init__(self, place: str, storage_options: dict[str, str] | None) -> None:
        self._place, self._options = place, storage_options

    def schema(self) -> pa.Schema | None:
        table = self._newest()
        return None if table is None else pa.schema(table.schema().to_arrow())

    def create(self, schema: pa.Schema) -> None:
        # a repeated commit of one that came late would be a second creation
        once = CommitProperties(max_commit_retries=0)
        try:
            DeltaTable.create(
                self._place,
                schema,
                mode="ignore",
                storage_options=self._options,
                commit_properties=once,
            )
        except DeltaError:
            if self._newest() is None:
                raise

    def commits(self, addition_id: str) -> list[Commit]:
        table = self._newest()
        if table is None or table.transaction_version(_app(addition_id)) is None:
            return []
        found = [
            Commit(
                version=str(entry["version"]),
                num_rows=entry.get("operationMetrics", {}).get("num_added_rows"),
                checksum=entry.get(_CHECKSUM),
            )
            for entry in table.history()
            if entry.get(_KEY) == addition_id
        ]
        return found[::-1] or [Commit(version=None, num_rows=None, checksum=None)]

    def append(self, addition: Addition) -> None:
        append_to(DeltaTable(self._place, storage_options=self._options), addition)

    def open(self, version: str | None) -> tuple[str, pa.RecordBatchReader]:
        number = None if version is None else int(version)
        table = DeltaTable(self._place, version=number, storage_options=self._options)
        try:
            # file by file, so that two reads have one order
            rows = table.to_pyarrow_dataset().scanner().to_reader()
        except DeltaProtocolError:  # deletion vectors, or columns that were renamed
            scanned = pa.RecordBatchReader.from_stream(table.scan())
            # the engine behind `scan` has views in place of texts, which few readers know
            rows = scanned.cast(pa.schema(table.schema().to_arrow()))
        return str(table.version()), rows

    def _newest(self) -> DeltaTable | None:
        if not DeltaTable.is_deltatable(self._place, self._options):
            return None
        return DeltaTable(self._place, storage_options=self._options)


def append_to(table: DeltaTable, addition: Addition) -> None:
    """Add rows to a version of a table; CommitFailedError: a later one has the addition."""
    if table.transaction_version(_app(addition.id)) is not None:
        return
    write_deltalake(
        table,
        addition.rows,
        mode="append",
        commit_properties=CommitProperties(
            custom_metadata={_KEY: addition.id, _CHECKSUM: addition.checksum},
            app_transactions=[Transaction(_app(addition.id), 1)],
        ),
    )


def _app(addition_id: str) -> str:
    return f"raybatch-{addition_id}"
