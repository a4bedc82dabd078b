"""Adds the rows of finished outputs to tables, each plan in one commit that is made once."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from posixpath import basename
from typing import Any

import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import PUBLISHED, published_name
from raybatch.durable.storage import Store, error_context
from raybatch.errors import ConfigError, RaybatchError, error_text
from raybatch.planning.store import StoredPlan
from raybatch_tables.address import Address, errors_of
from raybatch_tables.base import Addition, Commit, Table
from raybatch_tables.columns import fitted, sql_type
from raybatch_tables.output import FinishedOutput, addition_id

logger = logging.getLogger(__name__)

# to commit, each of which writes the rows
_MAX_TRIES = 3
# kinds with the types of SQL
_OF_SQL = ("delta", "iceberg")


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Rows of an output in a table: their number, and the versions that added them.

    Args:
        num_added: rows that this call has added; the table had the others.
    """

    table: str
    num_rows: int
    num_added: int
    versions: tuple[str, ...]

    def __str__(self) -> str:
        at = f" (version {', '.join(self.versions)})" if self.versions else ""
        if not self.num_added:
            return f"{self.table} got these {self.num_rows} rows before{at}; nothing was added"
        return f"added {self.num_added} rows to {self.table}{at}"


def publish(sink: str, table: str) -> Publication:
    """Add the rows of a finished output to a table, those of each plan in one commit.

    A second call adds nothing. A call that was killed is completed by the next one.

    Args:
        sink: folder of the output.
        table: its address, such as delta:s3://bucket/answers; it is created if it does not exist.

    Raises:
        ConfigError: the output is not finished, or the table has other columns, other rows of the
            same job, or cannot be written.
        MissingDependency: the library of the table is not installed.
    """
    address, output = _target(table), FinishedOutput.of(sink)
    if "statuses" in output.plans[0].fingerprint:  # see FailedRows.choice
        logger.warning(
            "%s has the rows of a retry: a table that has those of the first run too has rows with "
            "the same row_id as these",
            sink,
        )
    record = _read_record(output.store, address)
    target, schema = prepared(address, output.schema)
    commits, num_added = list[Commit](), 0
    for stored in output.plans:
        name = addition_id(stored)
        checksum = record.get(name) or output.checksum(stored)
        make = partial(_addition, output, stored, schema, checksum)
        with errors_of(address):
            commit, is_new = _commit_once(target, make)
        if commit.checksum not in (None, checksum):
            raise ConfigError(
                f"{address.shown} has other rows of this job"
                f"{f', of version {commit.version}' if commit.version else ''}: its input or its "
                "answers have changed since; add these rows to another table"
            )
        commits.append(commit)
        num_added += stored.num_rows if is_new else 0
        record[name] = checksum
    reach("after_table")
    content = {"table": str(address), "additions": record}
    with error_context(f"output {sink!r} cannot be written"):
        output.store.replace(_record_name(address), json.dumps(content).encode())
    return Publication(
        table=address.shown,
        num_rows=sum(stored.num_rows for stored in output.plans),
        num_added=num_added,
        versions=tuple(one.version for one in commits if one.version is not None),
    )


def prepared(address: Address, schema: pa.Schema) -> tuple[Table, pa.Schema]:
    """Return a table, which is created if it is missing, and the schema of rows to add to it.

    Raises:
        ConfigError: it cannot be created, or columns of `schema` do not fit.
    """
    if address.kind in _OF_SQL:
        schema = pa.schema([field.with_type(sql_type(field.type)) for field in schema])
    with errors_of(address):
        target = address.table()
        existing = target.schema()
        if existing is None:
            target.create(schema)
            existing = target.schema()
    return target, schema if existing is None else fitted(schema, existing, address.shown)


def prepare(table: str, schema: pa.Schema) -> None:
    """Create a table if it is missing, before the rows for it are made; errors are those above."""
    prepared(_target(table), schema)


def check_output(sink: str) -> tuple[list[str], list[str]]:
    """Return what is wrong with the tables to which an output was added, and what is right."""
    problems, notes = list[str](), list[str]()
    output = FinishedOutput.of(sink)
    for name in output.store.names(PUBLISHED):
        shown = f"{output.store.uri}/{name}"
        try:
            content = json.loads(output.store.read(name))
            address, known = Address.parse(content["table"]), dict(content["additions"])
            shown = address.shown
            with errors_of(address):
                target, found = address.table(), list[str]()
                for stored in output.plans:
                    checksum = known.get(addition_id(stored))
                    found += _problems(target.commits(addition_id(stored)), stored, checksum)
        except RaybatchError as error:
            found = [str(error)]
        except (ValueError, KeyError, TypeError) as error:
            found = [f"the record is damaged ({error}); run `raybatch publish` again"]
        problems += [f"{shown}: {text}" for text in found]
        if not found:
            notes.append(f"the rows were added to {shown} once")
    return problems, notes


def _problems(found: list[Commit], stored: StoredPlan, checksum: str | None) -> list[str]:
    """Return what is wrong with the commits of a plan's rows in one table."""
    num_rows = stored.num_rows
    if not found:
        return [f"{num_rows} rows of this output were not added; run `raybatch publish` again"]
    if len(found) > 1:
        versions = ", ".join(str(one.version) for one in found)
        return [
            f"{num_rows} rows of this output were added more than once, in versions {versions}; "
            "run `raybatch publish` again, which takes later ones back"
        ]
    if found[0].num_rows not in (None, num_rows):
        return [f"version {found[0].version} added {found[0].num_rows} of {num_rows} rows"]
    if None not in (found[0].checksum, checksum) and found[0].checksum != checksum:
        return [f"version {found[0].version} added other rows of this job"]
    return []


def _commit_once(target: Table, make: Callable[[], Addition]) -> tuple[Commit, bool]:
    """Add rows unless the table has them; return the commit, and whether it is new."""
    addition = make()
    found = target.commits(addition.id)
    reach("before_table")
    if found and found[0].checksum not in (None, addition.checksum):
        return found[0], False
    for tries_left in reversed(range(_MAX_TRIES)):
        try:
            target.append(addition)
            break
        except RaybatchError:
            raise
        except Exception as error:
            # other writers were faster all the time, or the answer of the store was lost; if the
            # rows were added, the next call adds nothing, but notes the commit
            if not tries_left:
                raise
            logger.info("trying again: %s", error_text(error))
            addition = make()
    return target.commits(addition.id)[0], not found


def _addition(
    output: FinishedOutput, stored: StoredPlan, schema: pa.Schema, checksum: str
) -> Addition:
    rows = pa.RecordBatchReader.from_batches(schema, output.batches(stored, schema))
    about = {
        # others need not know the folders of a host
        "model": basename(stored.model.rstrip("/")),
        "plan": stored.hash,
        "raybatch": version("raybatch"),
    }
    return Addition(
        id=addition_id(stored), checksum=checksum, schema=schema, rows=rows, about=about
    )


def _target(table: str) -> Address:
    address = Address.parse(table)
    if address.version is not None:
        raise ConfigError(f"{table!r} names a version, but rows are added to the newest one")
    return address.absolute()


def _record_name(address: Address) -> str:
    return published_name(hashlib.blake2b(str(address).encode(), digest_size=8).hexdigest())


def _read_record(store: Store, address: Address) -> dict[str, str]:
    """Return the checksums of additions that were made before, by id."""
    try:
        content: Mapping[str, Any] = json.loads(store.read(_record_name(address)))
        return {str(name): str(checksum) for name, checksum in content["additions"].items()}
    except (FileNotFoundError, ValueError, KeyError, AttributeError):
        return {}
