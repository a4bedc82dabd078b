"""Tables of Iceberg, by the library pyiceberg and the catalogs that it knows.

An addition is named by a table property that its snapshot's commit sets, since snapshots expire.
"""

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table as CatalogTable

from raybatch_tables.base import Addition, Commit

_KEY = "raybatch.addition"


class IcebergTable:
    """A table of a catalog that pyiceberg is configured for; `name` has the namespace first."""

    def __init__(self, catalog: str, name: str) -> None:
        self._catalog, self._name = load_catalog(catalog), name

    def schema(self) -> pa.Schema | None:
        table = self._newest()
        return None if table is None else table.schema().as_arrow()

    def create(self, schema: pa.Schema) -> None:
        try:
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            self._catalog.create_table_if_not_exists(self._name, schema)
        except Exception:  # catalogs raise various classes
            if self._newest() is None:
                raise

    def commits(self, addition_id: str) -> list[Commit]:
        table = self._newest()
        checksum = None if table is None else table.properties.get(_property(addition_id))
        if table is None or checksum is None:
            return []
        found = []
        for snapshot in table.metadata.snapshots:
            facts = snapshot.summary.additional_properties if snapshot.summary else {}
            if facts.get(_KEY) == addition_id:
                version, num_rows = str(snapshot.snapshot_id), int(facts.get("added-records", 0))
                found.append(Commit(version=version, num_rows=num_rows, checksum=checksum))
        return found or [Commit(version=None, num_rows=None, checksum=checksum)]

    def append(self, addition: Addition) -> None:
        append_to(self._catalog.load_table(self._name), addition)

    def open(self, version: str | None) -> tuple[str, pa.RecordBatchReader]:
        table = self._catalog.load_table(self._name)
        if version is not None:  # with the columns that it had
            return version, table.scan(snapshot_id=int(version)).to_arrow_batch_reader()
        newest = table.current_snapshot()
        return str(newest.snapshot_id if newest else 0), table.scan().to_arrow_batch_reader()

    def _newest(self) -> CatalogTable | None:
        try:
            return self._catalog.load_table(self._name)
        except NoSuchTableError:
            return None


def append_to(loaded: CatalogTable, addition: Addition) -> None:
    """Add rows to a table as it was loaded; RuntimeError: the newest one has the addition."""
    table = _TableOfAddition(
        loaded.name(),
        loaded.metadata,
        loaded.metadata_location,
        loaded.io,
        loaded.catalog,
        loaded.config,
    )
    table.addition_id = addition.id
    if table.has_addition():
        return
    # pyiceberg sorts rows into partitions only if it has all of them
    is_partitioned = not table.spec().is_unpartitioned()
    rows = addition.rows.read_all() if is_partitioned else addition.rows
    with table.transaction() as transaction:
        transaction.append(rows, snapshot_properties={_KEY: addition.id})
        transaction.set_properties({_property(addition.id): addition.checksum})


class _TableOfAddition(CatalogTable):
    """A table whose commit is not repeated once another process has made the same addition.

    A commit that comes too late is repeated by pyiceberg after `refresh`.
    """

    addition_id = ""

    def has_addition(self) -> bool:
        return _property(self.addition_id) in self.properties

    def refresh(self) -> CatalogTable:
        table = super().refresh()
        if self.has_addition():
            raise RuntimeError(f"another process has added the rows of {self.addition_id}")
        return table


def _property(addition_id: str) -> str:
    return f"{_KEY}.{addition_id}"
