"""A finished output once more, its rows in the order of the input.

Units follow the order in which engines run, and what is written stays as it is. The copy is an
output of its own, whose units are stretches of the input: each of them is written once, whoever
else is at work, a copy that was cut short is gone on with, and `verify` proves it like any other.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.audit import Audit, audit, finish, is_finished
from raybatch.durable.commit import committed
from raybatch.durable.layout import PLAN, part_name, plan_name
from raybatch.durable.leftovers import drop_journal_and_staging
from raybatch.durable.sink import prepare_sink
from raybatch.durable.storage import error_context, is_below, store_of
from raybatch.errors import ConfigError
from raybatch.outputs.row_copy import RowCopy, copy_rows
from raybatch.planning.shards import stretches
from raybatch.planning.store import read_all_units, read_plan, read_plans, read_units, write_plan
from raybatch.planning.stored import PlanSubject, StoredPlan

Ints = npt.NDArray[np.int64]

# names of parts have the order of their numbers up to a million of them
_MAX_PARTS = 500_000
_MAX_UNIT_BYTES = 64 << 20
_DEFAULT_UNIT_ROWS = 1024


def ordered(sink: str, into: str, *, start_ray: Callable[[], None] | None = None) -> Audit:
    """Copy a finished output into a folder of its own, its rows in the order of the input.

    A second call goes on where the first has stopped. `start_ray` is called before Ray is used,
    which small outputs do without.

    Raises:
        ConfigError: the output is not finished, is in that order already, or is partitioned; or
            the folder cannot be used.
    """
    with error_context(f"output {sink!r} cannot be read"):
        plans = _finished_plans(sink)
        below = store_of(sink).uri + "/"
    if not any(stored.is_reordered for stored in plans):
        raise ConfigError(f"the rows in {sink} are in the order of the input already; read them")
    if is_below(into, sink):
        raise ConfigError(
            f"{into} lies below {sink}, whose readers would see every row twice; choose another "
            "folder"
        )
    prepare_sink(into, is_overwrite=False, source_paths=[f"{below}{PLAN}"])
    return restore_order(sink, into, start_ray=start_ray)


def restore_order(
    sink: str,
    into: str,
    *,
    subject: PlanSubject | None = None,
    start_ray: Callable[[], None] | None = None,
) -> Audit:
    """Write the rows of a finished output in the order of the input, each once; return their audit.

    Rows of a plan that came later follow those of the plans before it. Memory: some blocks of rows;
    larger outputs are sorted by Ray, which spills to disk.

    Args:
        sink: of the output, which stays as it is.
        into: folder that is prepared for the copy.
        subject: what the plan of the copy is of and how it is laid out, where that is not as in
            the output.
        start_ray: is called before Ray is used; None leaves its start to Ray.

    Raises:
        ConfigError: the output is not finished, or the folder holds the copy of another one.
        CommitError: the copy does not hold every row once.
    """
    with error_context(f"output {sink!r} cannot be read"):
        plans = _finished_plans(sink)
    first_unit = 0
    for stored in plans:
        wanted = replace(stored, first_unit=first_unit)
        if subject is not None:
            wanted = replace(
                wanted,
                fingerprint=subject.fingerprint,
                partition_by=subject.partition_by,
                partition_types=subject.partition_types,
            )
        copy = _open(sink, into, stored, wanted)
        first_unit += copy.target.num_units
        if copy.is_todo.any():
            copy_rows(copy, start_ray)
    store, units = store_of(into), read_all_units(into, read_plans(into))
    result = audit(store, units)
    finish(store, units, result)
    drop_journal_and_staging(store)
    return result


def _finished_plans(sink: str) -> tuple[StoredPlan, ...]:
    if store_of(sink).size(PLAN) is None:
        raise ConfigError(f"{sink}: there is no output of a job to bring into order")
    plans = read_plans(sink)
    if plans[0].partition_by:
        raise ConfigError(
            f"the output in {sink} is partitioned, and its files do not say where their rows stand "
            "in the input; run the job with output_order=input from the start"
        )
    if not is_finished(store_of(sink), read_all_units(sink, plans)):
        raise ConfigError(f"the output in {sink} is not finished; run the job again to the end")
    return plans


def _open(sink: str, into: str, stored: StoredPlan, wanted: StoredPlan) -> RowCopy:
    """Return what there is to copy of a plan, after writing the plan of the copy."""
    first = pq.ParquetFile(pa.BufferReader(store_of(sink).read(part_name(stored.first_unit))))
    table = first.read(use_threads=False)
    row_bytes = table.nbytes / max(1, table.num_rows)
    about = json.dumps([stored.hash, wanted.partition_by]).encode()
    name = hashlib.blake2b(about, digest_size=8, person=b"input order").hexdigest()
    if store_of(into).size(plan_name(stored.number)) is None:
        units = stretches(name, _unit_rows(stored, row_bytes))
        target = replace(
            wanted, hash=name, num_units=units.num_units, is_reordered=False, shards=()
        )
        target = write_plan(into, target, units)
    else:
        target = read_plan(into, stored.number)
    if target.hash != name:
        raise ConfigError(f"{into} holds rows of another output than {sink}; choose another folder")
    done = committed(store_of(into), read_all_units(into, read_plans(into)))
    return RowCopy(
        source=sink,
        sink=into,
        stored=stored,
        target=target,
        unit_rows=read_units(into, target).unit_rows,
        is_todo=~done[target.first_unit : target.first_unit + target.num_units],
        schema=first.schema_arrow,
        row_bytes=row_bytes,
    )


def _unit_rows(stored: StoredPlan, row_bytes: float) -> Ints:
    """Return the rows of each unit of the copy: stretches that fit memory, not too many."""
    wanted = int(stored.options.get("unit_rows", _DEFAULT_UNIT_ROWS))
    most = max(1, int(_MAX_UNIT_BYTES / max(1.0, row_bytes)))
    size = max(min(wanted, most), -(-stored.num_rows // _MAX_PARTS), 1)
    full, rest = divmod(stored.num_rows, size)
    return np.array([size] * full + [rest] * (rest > 0 or not full), np.int64)
