"""What raybatch calls: tables as sources, and checks of tables before a job and in `verify`."""

from collections.abc import Sequence

import pyarrow as pa

from raybatch_tables.address import Address, errors_of
from raybatch_tables.publishing import check_columns, check_output, publish, schema_for
from raybatch_tables.source import TableSource


class Tables:
    """The functions of this distribution, by the protocol `raybatch.inputs.tables.TableLibrary`."""

    def open(self, table: str) -> TableSource:
        return TableSource(Address.parse(table))

    def check_target(self, table: str, schema: pa.Schema) -> None:
        address = Address.parse(table)
        with errors_of(address):
            target = address.table()
        check_columns(address, target, schema_for(address, schema))

    def publish(self, sink: str, table: str) -> None:
        publish(sink, table)

    def check_output(self, sink: str) -> tuple[Sequence[str], Sequence[str]]:
        return check_output(sink)


LIBRARY = Tables()
