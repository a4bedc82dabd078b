"""The error rows of a finished output as the source of a job that retries them.

Outputs are never modified, so the new answers go to another folder.
"""

import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self, get_args

import pyarrow as pa

from raybatch.durable.commit import files_of
from raybatch.durable.layout import DATA
from raybatch.durable.parts import read_footer
from raybatch.durable.storage import Store, error_context, open_store
from raybatch.durable.units import UnitPlan
from raybatch.errors import ConfigError, did_you_mean
from raybatch.inputs.file_slices import FileSlice, joined
from raybatch.inputs.source import Source, scan_source
from raybatch.outputs.ordered import read_finished
from raybatch.planning.fingerprint import output_columns
from raybatch.planning.store import StoredPlan
from raybatch.planning.tally import row_statuses
from raybatch.rows.batches import as_movable
from raybatch.rows.schema import GOOD_STATUSES, OutputSchema, Status

logger = logging.getLogger(__name__)

ERROR_STATUSES = tuple(name for name in get_args(Status) if name not in GOOD_STATUSES)
_RETRIED = tuple(name for name in get_args(Status) if name != "ok")
_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRows(Source):
    """The rows of an output that have one of `statuses`, as the source of a job.

    `slices` only count these rows; `parts` are the same slices with all rows and columns.
    """

    parts: Source
    output: OutputSchema
    statuses: frozenset[str]

    @property
    def choice(self) -> Mapping[str, str]:
        """The statuses that select rows; they are part of the job's fingerprint."""
        return {"statuses": ",".join(sorted(self.statuses))}

    def within(self, portions: Mapping[str, range]) -> Self:
        """Return the rows of some files, which must be whole."""
        wholes = dict.fromkeys(portions, range(sys.maxsize))
        return replace(Source.within(self, wholes), parts=self.parts.within(wholes))

    def read(self, task: range, *, row_id_column: str | None = None) -> Iterator[pa.Table]:
        """Yield the rows of the slices with the indices `task`, without the columns of the stage.

        The rows have an id column, so `row_id_column` is ignored.
        """
        for index in task:
            for table in self.parts.read(range(index, index + 1), row_id_column=row_id_column):
                is_wanted = [one in self.statuses for one in row_statuses(table, self.output)]
                chosen = as_movable(table).filter(pa.array(is_wanted, pa.bool_()))
                if not chosen.num_rows:
                    continue
                # columns from folder names are texts
                yield chosen.select(self.schema.names).cast(self.schema)


def failed_rows(
    sink: str, output: OutputSchema, *, id_column: str, statuses: Collection[str]
) -> FailedRows:
    """Return the rows of a finished output that have one of `statuses`.

    `output` and `id_column` are those of the stage that will retry the rows.

    Raises:
        ConfigError: a status is unknown, the output is not finished, or the new answers would have
            other columns.
    """
    for name in statuses:
        if name not in _RETRIED:
            raise ConfigError(
                f"status {name!r} cannot be retried{did_you_mean(name, _RETRIED)}; choose from "
                f"{', '.join(_RETRIED)}"
            )
    if not statuses:
        raise ConfigError(f"there is no status to retry; choose from {', '.join(_RETRIED)}")
    store = open_store(sink)
    plans, plan = read_finished(sink, ", then its error rows")
    with error_context(f"output {sink!r} cannot be read"):
        _check_columns(sink, output_columns(plans[0].fingerprint), output)
        partitions = _partitions(sink, plans[0])
        parts = scan_source(f"{store.uri}/{DATA}")
        numbers = _rows_of_parts(store, plan, frozenset(statuses))
    # one slice per file: failed rows are counted per file
    wholes, slices = list[FileSlice](), list[FileSlice]()
    for part in joined(parts.slices):
        if number := numbers.get(f"{DATA}/{part.name}"):
            num_bytes = part.num_bytes * number // max(1, part.num_rows)
            wholes.append(part)
            slices.append(replace(part, num_rows=number, num_bytes=num_bytes))
    dropped = set(output.arrow().names) - {id_column}
    num_rows = sum(part.num_rows for part in slices)
    if num_rows != sum(numbers.values()):
        raise ConfigError(
            f"{sum(numbers.values()) - num_rows} rows of {sink} are in folders whose names begin "
            "with _ or ., which readers skip; error rows of such outputs cannot be retried"
        )
    dropped.update(field.name for field in partitions)
    fields = [field for field in parts.schema if field.name not in dropped]
    logger.info("retrying %d rows of %s", num_rows, sink)
    return FailedRows(
        schema=pa.schema([*fields, *partitions], parts.schema.metadata),
        slices=tuple(slices),
        num_rows=num_rows,
        parts=replace(parts, slices=tuple(wholes)),
        output=output,
        statuses=frozenset(statuses),
    )


def _check_columns(sink: str, before: OutputSchema | None, now: OutputSchema) -> None:
    if before is None:
        raise ConfigError(
            f"the output in {sink} was written by write_parquet; only error rows of a job can be "
            "retried"
        )
    if before != now:
        raise ConfigError(
            f"the new answers would have other columns than those in {sink}, so they could not be "
            f"read together; set output_prefix={before.prefix!r}, task={before.task!r}, "
            f"sampling.n={before.num_samples}, "
            f"sampling.logprobs {'as before' if before.has_logprobs else 'to None'}, and backend "
            f"options such that answers have, besides the text, "
            f"{', '.join(before.parsed) or 'nothing'}"
        )


def _rows_of_parts(store: Store, plan: UnitPlan, statuses: frozenset[str]) -> dict[str, int]:
    def count(unit: int) -> dict[str, int]:
        names = files_of(store, unit, is_partitioned=plan.is_partitioned)
        counts = {name: read_footer(store, name).counts.statuses for name in names}
        return {
            name: sum(of[status] for status in statuses & of.keys()) for name, of in counts.items()
        }

    with ThreadPoolExecutor(_THREADS) as threads:
        counted = list(threads.map(count, range(plan.num_units)))
    return {name: number for unit in counted for name, number in unit.items() if number}


def _partitions(sink: str, stored: StoredPlan) -> tuple[pa.Field, ...]:
    if len(stored.partition_types) != len(stored.partition_by):
        raise ConfigError(
            f"the plan of {sink}, written by an earlier version, lacks the types of "
            f"{', '.join(stored.partition_by)}; its error rows cannot be retried"
        )
    columns = zip(stored.partition_by, stored.partition_types, strict=True)
    return tuple(pa.field(name, pa.type_for_alias(kind)) for name, kind in columns)
