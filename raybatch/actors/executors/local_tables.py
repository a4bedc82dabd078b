"""Request tables of a pool without Ray: they stay with the driver, and engines ask for them."""

import itertools
import weakref
from typing import NamedTuple

from raybatch.actors.wire.records import Requests


class TableName(NamedTuple):
    """What a reference to a table becomes on its way to another process."""

    number: int


class KeptTable:
    """A reference to a request table, which lives as long as this object."""

    def __init__(self, requests: Requests, name: TableName) -> None:
        self.requests = requests
        self._name = name

    def __reduce__(self) -> tuple[type[TableName], tuple[int]]:
        return TableName, (self._name.number,)


class LocalTables:
    """The tables of one pool that somebody still holds a reference to."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._kept: weakref.WeakValueDictionary[TableName, KeptTable] = (
            weakref.WeakValueDictionary()
        )

    def keep(self, requests: Requests) -> KeptTable:
        """Return a reference to a table."""
        name = TableName(next(self._numbers))
        kept = self._kept[name] = KeptTable(requests, name)
        return kept

    def find(self, name: TableName) -> Requests | None:
        """Return a table; None where nobody holds it any more."""
        kept = self._kept.get(name)
        return None if kept is None else kept.requests
