"""Adds the rows of finished outputs to tables, each plan in one commit that is made once."""

import hashlib
import json
import logging
from dataclasses import dataclass
from importlib.metadata import version

import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import PUBLISHED, published_name
from raybatch.durable.storage import error_context, store_of
from raybatch.errors import ConfigError, RaybatchError
from raybatch.planning.stored import StoredPlan
from raybatch.redaction import redacted
from raybatch_tables.address import Address, errors_of
from raybatch_tables.base import Addition, Commit, Table
from raybatch_tables.output import FinishedOutput, addition_id, signed

logger = logging.getLogger(__name__)

# kinds with the types of SQL
_SIGNED = ("delta", "iceberg")


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Rows of an output in a table: their number, and the versions that added them."""

    table: str
    num_rows: int
    versions: tuple[str, ...]
    is_new: bool

    def __str__(self) -> str:
        did = "added" if self.is_new else "has"
        at = f" (version {', '.join(self.versions)})" if self.versions else ""
        if self.is_new:
            return f"added {self.num_rows} rows to {self.table}{at}"
        return f"{self.table} {did} these {self.num_rows} rows{at}; nothing was added"


def publish(sink: str, table: str) -> Publication:
    """Add the rows of a finished output to a table, those of each plan in one commit.

    A second call adds nothing. A call that was killed is completed by the next one.

    Args:
        sink: folder of the output.
        table: its address, such as delta:s3://bucket/answers; it is created if it does not exist.

    Raises:
        ConfigError: the output is not finished, or the table has other columns or cannot be
            written.
        MissingDependency: the library of the table is not installed.
    """
    address = Address.parse(table)
    if address.version is not None:
        raise ConfigError(f"{table!r} names a version, but rows are added to the newest one")
    output = FinishedOutput.of(sink)
    with errors_of(address):
        target = address.table()
    schema = schema_for(address, output.schema)
    check_columns(address, target, schema)
    with errors_of(address):
        if target.schema() is None:
            target.create(schema)
    commits, is_new = list[Commit](), False
    for stored in output.plans:
        with errors_of(address):
            made, is_added = _commit_once(target, _addition(output, stored, schema))
        commits.append(made)
        is_new = is_new or is_added
    reach("after_table")
    record = {"table": str(address), "additions": [addition_id(one) for one in output.plans]}
    token = hashlib.blake2b(str(address).encode(), digest_size=8).hexdigest()
    with error_context(f"output {sink!r} cannot be written"):
        output.store.replace(published_name(token), json.dumps(record).encode())
    result = Publication(
        table=redacted(str(address)),
        num_rows=sum(stored.num_rows for stored in output.plans),
        versions=tuple(one.version for one in commits if one.version is not None),
        is_new=is_new,
    )
    logger.info("%s", result)
    return result


def schema_for(address: Address, schema: pa.Schema) -> pa.Schema:
    """Return the columns with types that the kind of table has."""
    if address.kind not in _SIGNED:
        return schema
    return pa.schema([field.with_type(signed(field.type)) for field in schema])


def check_columns(address: Address, target: Table, schema: pa.Schema) -> None:
    """Raise ConfigError if a table exists and has other columns."""
    with errors_of(address):
        existing = target.schema()
    if existing is None:
        return
    new, old = (
        ", ".join(name for name in one.names if name not in other.names)
        for one, other in ((schema, existing), (existing, schema))
    )
    if new or old:
        what = [f"lacks {new}" if new else "", f"has {old} as well" if old else ""]
        raise ConfigError(
            f"{address} {' and '.join(filter(None, what))}, so the rows of this job do not fit; "
            "choose another table, or change its columns"
        )


def check_output(sink: str) -> tuple[list[str], list[str]]:
    """Return what is wrong with the tables to which an output was added, and what is right."""
    store, problems, notes = store_of(sink), list[str](), list[str]()
    output = FinishedOutput.of(sink)
    for name in store.names(PUBLISHED):
        record = json.loads(store.read(name))
        address, of_table = Address.parse(record["table"]), list[str]()
        try:
            with errors_of(address):
                target = address.table()
                for stored in output.plans:
                    if addition_id(stored) in record["additions"]:
                        of_table += _problems(target.commits(addition_id(stored)), stored.num_rows)
        except RaybatchError as error:
            of_table.append(str(error))
        problems += [f"{redacted(str(address))}: {text}" for text in of_table]
        if not of_table:
            notes.append(f"{redacted(str(address))} has every row once")
    return problems, notes


def _problems(found: list[Commit], num_rows: int) -> list[str]:
    """Return what is wrong with the commits of rows that are in a table once."""
    if not found:
        return [f"{num_rows} rows of this output were not added, or the table is another one"]
    if len(found) > 1:
        versions = ", ".join(str(one.version) for one in found)
        return [f"{num_rows} rows of this output were added more than once, in {versions}"]
    if found[0].num_rows not in (None, num_rows):
        return [f"version {found[0].version} added {found[0].num_rows} of {num_rows} rows"]
    return []


def _commit_once(target: Table, addition: Addition) -> tuple[Commit, bool]:
    """Add rows unless the table has them; return the commit, and whether it is new."""
    is_new = not target.commits(addition.id)
    reach("before_table")
    try:
        target.append(addition)
    except Exception:
        # another process was faster, or the answer of the store was lost
        if found := target.commits(addition.id):
            return found[0], False
        raise
    return target.commits(addition.id)[0], is_new


def _addition(output: FinishedOutput, stored: StoredPlan, schema: pa.Schema) -> Addition:
    rows = pa.RecordBatchReader.from_batches(schema, output.rows(stored, schema))
    about = {
        "model": stored.model,
        "task": stored.fingerprint.get("task", ""),
        "plan": stored.hash,
        "raybatch": version("raybatch"),
    }
    return Addition(id=addition_id(stored), schema=schema, rows=rows, about=about)
