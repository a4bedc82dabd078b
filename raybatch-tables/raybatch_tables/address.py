"""Addresses of tables, such as delta:s3://bucket/answers?version=3."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from raybatch.durable.storage import absolute
from raybatch.errors import ConfigError, MissingDependency, RaybatchError, error_text, one_line
from raybatch.inputs.tables import TABLE_KINDS
from raybatch.redaction import redacted
from raybatch_tables.base import Table

_PARAMETER = re.compile(r"\?\w+=.*")
_VERSION = re.compile(r"\?version=(\d+)$")
# of a message of a library
_MAX_CHARS = 400
# kinds whose places are paths or URIs
_OF_FILES = ("delta", "lance")
_FORMS: Mapping[str, str] = {
    "delta": "delta:s3://bucket/table",
    "iceberg": "iceberg:catalog.namespace.table",
    "lance": "lance:s3://bucket/table.lance",
    "hub": "hub:organization/dataset",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The kind of a table, its place as its library names it, and a version to read."""

    kind: str
    place: str
    version: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address.

        Raises:
            ConfigError: the kind is unknown, or the place is empty or malformed.

        Example:
            >>> Address.parse("delta:s3://bucket/answers?version=3")
            Address(kind='delta', place='s3://bucket/answers', version='3')
        """
        if redacted(text) != text:  # it would be in records and logs
            raise ConfigError(
                f"{redacted(text)!r} has a secret; set it in the environment, such as "
                "AWS_SECRET_ACCESS_KEY"
            )
        kind, _, place = text.partition(":")
        found = _VERSION.search(place)
        if found:
            place = place[: found.start()]
        if unknown := _PARAMETER.search(place):
            raise ConfigError(f"{text!r}: {unknown[0]!r} is no version; write ?version=3")
        if kind not in TABLE_KINDS:
            raise ConfigError(f"{text!r} is no table; write one as {', '.join(_FORMS.values())}")
        dots = place.count(".") if kind == "iceberg" else 2
        is_name = kind != "hub" or re.fullmatch(r"[\w.-]+/[\w.-]+", place)
        if not place.strip("./") or dots < 2 or not is_name:
            raise ConfigError(f"{text!r} names no table; write it as {_FORMS[kind]}")
        return cls(kind=kind, place=place, version=found[1] if found else None)

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" + (f"?version={self.version}" if self.version else "")

    @property
    def shown(self) -> str:
        """Return the address for messages, without secrets."""
        return redacted(str(self))

    def absolute(self) -> "Address":
        """Return the same address for any working folder."""
        return replace(self, place=absolute(self.place)) if self.kind in _OF_FILES else self

    def table(self) -> Table:
        """Return the table; MissingDependency: the library of its kind is not installed."""
        try:
            return _OPENERS[self.kind](self.place)
        except ImportError as error:
            raise MissingDependency(
                f"{self.shown}: {error_text(error)}; install the extra {self.kind}: "
                f"pip install -e './raybatch-tables[{self.kind}]'"
            ) from error


def _delta(place: str) -> Table:
    from raybatch_tables.delta import DeltaLakeTable  # libraries of other kinds may be missing

    return DeltaLakeTable(place, storage_options())


def _iceberg(place: str) -> Table:
    from raybatch_tables.iceberg import IcebergTable

    catalog, _, name = place.partition(".")
    return IcebergTable(catalog, name)


def _lance(place: str) -> Table:
    from raybatch_tables.lance import LanceTable

    return LanceTable(place, storage_options())


def _hub(place: str) -> Table:
    from raybatch_tables.hub import HubDataset

    return HubDataset(place)


_OPENERS: Mapping[str, Callable[[str], Table]] = {
    "delta": _delta,
    "iceberg": _iceberg,
    "lance": _lance,
    "hub": _hub,
}


@contextmanager
def errors_of(address: Address) -> Iterator[None]:
    """Raise errors of a table's library as ConfigError, with the address of the table."""
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each library raises its own errors
        # libraries add backtraces and tables of text
        what = one_line(error_text(error), _MAX_CHARS)
        raise ConfigError(f"table {address.shown}: {what}") from error


def storage_options() -> dict[str, str] | None:
    """Return what Delta Lake and Lance do not read from the environment by themselves.

    They read `AWS_*`, but refuse an endpoint without TLS unless an option allows it.
    """
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        return {"allow_http": "true"}
    return None
