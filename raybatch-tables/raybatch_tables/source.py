"""A version of a table, read as a stream of record batches."""

from functools import cached_property

import pyarrow as pa

from raybatch.inputs.tables import TableRows
from raybatch_tables.address import Address, errors_of


class TableSource(TableRows):
    """The rows of a table for a job, which reads them once; the table is opened by then."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.table = f"{address.kind}:{address.absolute().place}"
        self.pinned_version = address.version

    @property
    def version(self) -> str:
        return self._opened[0]

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._opened[1].__arrow_c_stream__(requested_schema)

    @cached_property
    def _opened(self) -> tuple[str, pa.RecordBatchReader]:
        with errors_of(self._address):
            return self._address.table().open(self._address.version)
