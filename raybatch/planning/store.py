"""The stored plan below the sink: written once, before the first row runs.

    _raybatch/plan/<hash>/rows-<first row>.arrow   unit, pos, group_id, prefix_len, expected_len
    _raybatch/plan/<hash>/units.arrow              number and checksum of the rows of each unit
    _raybatch/plan.json                            created last; it decides which plan is in effect

Rows are numbered in the order of files and positions. Shards are in a folder named by the hash of
the whole plan, so that two drivers with different plans never mix theirs.
"""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa

from raybatch.durable.audit import read_success
from raybatch.durable.commit import is_of_units, open_plan
from raybatch.durable.layout import PLAN, UNITS, plan_name
from raybatch.durable.storage import error_context, store_of
from raybatch.durable.units import UnitPlan, join_plans, row_sums
from raybatch.errors import ConfigError
from raybatch.planning.fingerprint import InputFile
from raybatch.planning.shards import SHARD_SCHEMA, rows_in_stretches

_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSubject:
    """What a plan is made for: input files, plan options and fingerprint of the job."""

    options: Mapping[str, Any]  # plan options
    files: tuple[InputFile, ...]  # name, rows and digest of each file of the source, in order
    fingerprint: Mapping[str, str]  # see `raybatch.planning.fingerprint`
    # folder that file names are relative to, when the plan was made; for people, and to check
    # whether the files have changed
    source: str = ""
    model: str = ""  # as the user named it; for people
    partition_by: tuple[str, ...] = ()  # source columns that partition the output
    partition_types: tuple[str, ...] = ()  # Arrow names of their types
    number: int = 1  # of the plan in the output; above 1 for a rest, or input added later
    first_unit: int = 0  # number in the output of its first unit
    # of a head: the files of the rest of the input, which the next plan will have
    files_left: tuple[InputFile, ...] = ()
    # name and reason of skipped, unreadable files of the source
    skipped: tuple[tuple[str, str], ...] = ()

    def hash_of(self, shards: Sequence[str], contents: Sequence[str]) -> str:
        """Return the hash of a whole plan.

        `shards` are digests of its shards; `contents` are digests of the requests of each piece
        (prompts, options and seeds), see `contents_digest`.
        """
        options, fingerprint = dict(self.options), dict(self.fingerprint)
        parts = [list(shards), list(contents), options, list(self.files), fingerprint]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def stored(self, **planned: Any) -> "StoredPlan":  # noqa: ANN401 - fields of StoredPlan
        """Return the content of `plan.json`: this subject, and its other fields from `planned`."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return StoredPlan(**known, **planned)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan(PlanSubject):
    """The content of `plan.json`."""

    hash: str  # of all shards
    num_rows: int
    num_units: int
    num_groups: int
    is_reordered: bool  # rows run in another order than the input
    logical_tokens: int  # prompt tokens of requested rows
    computed_tokens: int  # of them, tokens that engines compute when every shared prefix runs once
    block_size: int
    # name and first row of each shard, in order; none if units are stretches of the input, which
    # `units.arrow` describes
    shards: tuple[tuple[str, int], ...]
    version: int = _VERSION

    def __hash__(self) -> int:
        """Return a hash for caches; equal plans have one `hash`."""
        return hash(self.hash)


def covered_files(plans: Sequence[StoredPlan], left: Sequence[InputFile] = ()) -> list[InputFile]:
    """Return the files of all plans, and those of `left`, each once, with the sum of its rows."""
    rows, digests = Counter[str](), dict[str, str]()
    for name, num_rows, digest in (*(file for one in plans for file in one.files), *left):
        rows[name] += num_rows
        digests[name] = digest
    return [(name, rows[name], digest) for name, digest in digests.items()]


def parse_plan(data: bytes, path: str) -> StoredPlan:
    """Parse the content of a plan file; `path` is for messages.

    Raises:
        ConfigError: it is not a plan, or has another version.
    """
    way_out = "restore it from a copy, or choose another folder"
    with error_context(f"{path} is not a plan of this version of raybatch; {way_out}"):
        values = json.loads(data)
        version = values.get("version", _VERSION)
        if version != _VERSION:
            raise ConfigError(f"{path} has version {version}, expected {_VERSION}; {way_out}")
        kinds = get_type_hints(StoredPlan)
        typed = {name: _typed(name, value, kinds.get(name)) for name, value in values.items()}
        return StoredPlan(**typed)


def _typed(name: str, value: Any, kind: Any) -> Any:  # noqa: ANN401 - data of a file
    """Return a value as a field of type `kind`; ValueError: it has another type."""
    kinds = get_args(kind)
    if get_origin(kind) is tuple and isinstance(value, list):
        if Ellipsis in kinds:
            kinds = (kinds[0],) * len(value)
        return tuple(_typed(name, one, k) for one, k in zip(value, kinds, strict=True))
    if get_origin(kind) in (dict, Mapping) and isinstance(value, dict):
        return {key: _typed(name, one, kinds[1]) for key, one in value.items()}
    is_number = kind is int and type(value) is int and value >= 0
    if kind is Any or is_number or (kind in (str, bool) and type(value) is kind):
        return value
    raise ValueError(f"{name} is {value!r}")


logger = logging.getLogger(__name__)

# message about an output with a corrupt plan
_WAY_OUT = (
    "and without it the output cannot be resumed; restore it from a copy, or choose another folder"
)
# last bytes of an Arrow file, missing if it is truncated
_MAGIC = b"ARROW1"


def shard_name(stored: StoredPlan, name: str) -> str:
    """Return the path of a shard of a plan, relative to the sink."""
    return f"_raybatch/plan/{stored.hash}/{name}"


def write_shard(sink: str, plan: str, first_row: int, shard: pa.Table) -> str:
    """Write the shard that begins with row `first_row`, unless it exists; return its name."""
    name = f"rows-{first_row:012d}.arrow"
    _create(sink, f"_raybatch/plan/{plan}/{name}", _as_bytes(shard))
    return name


def write_plan(sink: str, stored: StoredPlan, units: UnitPlan) -> StoredPlan:
    """Write units and `plan.json` of a plan whose shards are written; return the plan in effect.

    `plan.json` is written last. If another driver has written it first, its plan is returned.

    Raises:
        ConfigError: the folder cannot be written, or the other plan belongs to another job.
    """
    table = pa.table({"num_rows": units.unit_rows, "row_sum": units.row_sums})
    _create(sink, f"_raybatch/plan/{stored.hash}/units.arrow", _as_bytes(table))
    text = json.dumps(dataclasses.asdict(stored), indent=1, sort_keys=True)
    name = plan_name(stored.number)
    with error_context(f"{sink.rstrip('/')}/{name} cannot be written"):
        written = open_plan(store_of(sink), text.encode, name=name)
    holding = parse_plan(written, f"{sink.rstrip('/')}/{name}")
    if (holding.files, holding.fingerprint) != (stored.files, stored.fingerprint):
        raise ConfigError(
            f"another run has just begun a job with other input files or options in {sink}; choose "
            "another folder for this job"
        )
    if holding.hash != stored.hash:
        logger.info("another run planned %s first; using its plan", sink)
    return holding


def read_plan(sink: str, number: int = 1) -> StoredPlan:
    """Return the plan below the sink with this number.

    Raises:
        ConfigError: it does not exist, or has another version.
    """
    name = plan_name(number)
    path = f"{sink.rstrip('/')}/{name}"
    with error_context(f"{path} cannot be read"):
        return parse_plan(store_of(sink).read(name), path)


def read_plans(sink: str) -> tuple[StoredPlan, ...]:
    """Return all plans of an output in the order of their creation."""
    store, plans = store_of(sink), list[StoredPlan]()
    while store.size(plan_name(len(plans) + 1)) is not None:
        plans.append(read_plan(sink, len(plans) + 1))
    return tuple(plans)


def is_joining(sink: str) -> bool:
    """Return whether parts of units below `UNITS` are still being joined into an output."""
    units = f"{sink.rstrip('/')}/{UNITS}"
    if store_of(units).size(PLAN) is None:
        return False
    plans, success = read_plans(sink), read_success(store_of(sink))
    if success is None or len(read_plans(units)) > len(plans):
        return True
    # it grew, and its plan does too
    return "+".join(stored.hash for stored in plans).startswith(f"{success.get('plan')}+")


def read_all_units(sink: str, plans: Sequence[StoredPlan]) -> UnitPlan:
    return join_plans([read_units(sink, stored) for stored in plans])


def read_units(sink: str, stored: StoredPlan) -> UnitPlan:
    """Return the units of a stored plan: their sizes and the checksums of their row numbers."""
    name = f"_raybatch/plan/{stored.hash}/units.arrow"
    path = f"{sink.rstrip('/')}/{name}"
    with error_context(f"{path} cannot be read, {_WAY_OUT}"):
        table = _read_table(sink, name)
        units = UnitPlan(
            hash=stored.hash,
            unit_rows=table.column("num_rows").to_numpy(),
            row_sums=table.column("row_sum").to_numpy(),
            # parts of units are partitioned when they are joined
            is_partitioned=bool(stored.partition_by) and not is_of_units(store_of(sink)),
            first_unit=stored.first_unit,
            rows_left=sum(num_rows for _, num_rows, _ in stored.files_left),
        )
        if (units.num_units, units.num_rows) != (stored.num_units, stored.num_rows):
            raise ValueError(
                f"the file has {units.num_units} units and {units.num_rows} rows, but the plan has "
                f"{stored.num_units} and {stored.num_rows}"
            )
        return units


def read_shards(sink: str, stored: StoredPlan, start: int, stop: int) -> pa.Table:
    """Return the shard of rows `start` to `stop` (exclusive) of the source, in input order."""
    if not stored.shards:
        return rows_in_stretches(read_units(sink, stored).unit_rows, np.arange(start, stop))
    firsts = [first for _, first in stored.shards] + [stored.num_rows]
    parts = []
    for (name, first), end in zip(stored.shards, firsts[1:], strict=True):
        if first < stop and start < end:
            shard = _read_shard(sink, stored, name, end - first)
            parts.append(shard.slice(max(start - first, 0), min(stop, end) - max(start, first)))
    return pa.concat_tables([SHARD_SCHEMA.empty_table(), *parts])


def _read_shard(sink: str, stored: StoredPlan, name: str, num_rows: int) -> pa.Table:
    path = shard_name(stored, name)
    with error_context(f"{sink.rstrip('/')}/{path} cannot be read, {_WAY_OUT}"):
        shard = _read_table(sink, path)
        if shard.schema != SHARD_SCHEMA or shard.num_rows != num_rows:
            raise ValueError(f"the file has {shard.num_rows} rows, but the plan has {num_rows}")
        unit, pos = (shard.column(column).to_numpy() for column in ("unit", "pos"))
        if num_rows and (min(unit.min(), pos.min()) < 0 or unit.max() >= stored.num_units):
            raise ValueError("the file has unit numbers that are not in the plan")
        return shard


def log_plan(stored: StoredPlan, seconds: float, *, can_change_layout: bool) -> None:
    """Log the plan; if little is shared, hint at other orders of fields if `can_change_layout`."""
    order = f"{stored.num_groups} prefix groups" if stored.is_reordered else "in input order"
    saved = max(0.0, 1 - stored.computed_tokens / max(1, stored.logical_tokens))
    figures = (stored.num_rows, seconds, order, 100 * saved, stored.logical_tokens)
    logger.info(
        "planned %d rows in %.1f s: %s; prefix sharing saves %.1f %% of %d prompt tokens", *figures
    )
    if can_change_layout and not stored.is_reordered:
        logger.info(
            "prefix sharing saves too little to reorder rows; `raybatch explain` checks whether "
            "another order of the template's fields would share more"
        )


def _create(sink: str, name: str, data: bytes) -> bool:
    with error_context(f"{sink.rstrip('/')}/{name} cannot be written"):
        return store_of(sink).create(name, data)


def _read_table(sink: str, name: str) -> pa.Table:
    return pa.ipc.open_file(pa.py_buffer(store_of(sink).read(name))).read_all()


def _as_bytes(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(buffer, table.schema, options=options) as out:
        out.write_table(table)
    return bytes(buffer.getvalue())


def damage_of(sink: str, stored: StoredPlan, *, is_deep: bool) -> str | None:
    """Return the first problem of the shards of a plan, and what to do; None if there is none.

    `is_deep` reads all shards and compares the checksums of units; else only the ends of files are
    read.
    """
    store = store_of(sink)
    if not (is_deep and stored.shards):
        for name, _ in stored.shards:
            path = shard_name(stored, name)
            try:
                if store.tail(path, len(_MAGIC)) != _MAGIC:
                    return f"{store.uri}/{path} is truncated, {_WAY_OUT}"
            except FileNotFoundError:
                return f"{store.uri}/{path} is missing, {_WAY_OUT}"
        return None
    units = read_units(sink, stored)
    ends = [*(first for _, first in stored.shards[1:]), stored.num_rows]
    sums = np.zeros(units.num_units, np.uint64)
    for (_, first), end in zip(stored.shards, ends, strict=True):
        try:
            shard = read_shards(sink, stored, first, end)
        except ConfigError as error:
            return str(error)
        sums += row_sums(shard.column("unit").to_numpy(), np.arange(first, end), units.num_units)
    if np.array_equal(sums, units.row_sums):
        return None
    number = stored.first_unit + int(np.argmax(sums != units.row_sums))
    folder = f"{sink.rstrip('/')}/{shard_name(stored, '').rstrip('/')}"
    return f"{folder} has other rows in unit {number} than planned, {_WAY_OUT}"
