"""What raybatch calls: tables as sources, as places for rows, and in `verify`."""

import logging
from collections.abc import Sequence

import pyarrow as pa

from raybatch_tables.address import Address
from raybatch_tables.publishing import check_output, prepare, publish
from raybatch_tables.source import TableSource

logger = logging.getLogger(__name__)


class Tables:
    """The functions of this distribution, by the protocol `raybatch.inputs.tables.TableLibrary`."""

    def open(self, table: str) -> TableSource:
        return TableSource(Address.parse(table))

    def prepare(self, table: str, schema: pa.Schema) -> None:
        prepare(table, schema)

    def publish(self, sink: str, table: str) -> None:
        logger.info("%s", publish(sink, table))

    def check_output(self, sink: str) -> tuple[Sequence[str], Sequence[str]]:
        return check_output(sink)


LIBRARY = Tables()
