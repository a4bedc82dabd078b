"""Opens every part of an output: one schema, every value readable, ids unique, counts as said."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.commit import listed_units
from raybatch.durable.layout import SUCCESS, part_name
from raybatch.durable.partitioned import read_record
from raybatch.durable.parts import read_footer
from raybatch.durable.stores import Store
from raybatch.durable.units import UnitCounts, UnitPlan
from raybatch.errors import CommitError, error_text
from raybatch.planning.repeated_ids import RepeatedIds, id_hashes
from raybatch.planning.tally import unit_counts
from raybatch.records.arrays import Uint64s
from raybatch.rows.schema import OutputSchema

_THREADS = 4
_FILES_AT_ONCE = 64
_WAY_OUT = f"move the file away, with {SUCCESS} if it is there, and run the job again"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepCheck:
    """What the values of all parts say: rows whose row_id another row has too, and what is wrong.

    `problems` are the first ones of all, each with the file and the way out.
    """

    repeated_rows: int = 0
    problems: tuple[str, ...] = ()
    num_problems: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartChecker:
    store: Store
    output: OutputSchema | None
    ids: RepeatedIds
    schema: pa.Schema

    def problems_of(self, name: str) -> list[str]:
        where, problems = f"{self.store.uri}/{name}", list[str]()
        try:
            file = pq.ParquetFile(pa.BufferReader(self.store.read(name)))
            # types first: values of another type are never touched
            is_like_others = file.schema_arrow.equals(self.schema, check_metadata=True)
            columns = None
            if not is_like_others:
                difference = _difference(file.schema_arrow, self.schema)
                problems = [
                    f"{where} has another schema than the first part ({difference}); {_WAY_OUT}"
                ]
                columns = self._stage_columns(file.schema_arrow)
            if self.output is not None and (is_like_others or columns):
                table = file.read(columns, use_threads=False)
                problems += self._problems_of_rows(where, name, table, self.output)
            elif is_like_others:
                file.read(use_threads=False)
        except (CommitError, FileNotFoundError):  # reported by the audit
            pass
        except (ValueError, KeyError, OSError, NotImplementedError) as error:
            problems.append(f"{where} cannot be read in full: {error_text(error)}; {_WAY_OUT}")
        return problems

    def _stage_columns(self, schema: pa.Schema) -> list[str]:
        """Return the columns of the stage, if they have their types; none where one has not."""
        fields = list(self.output.arrow()) if self.output else []
        return [f.name for f in fields] if all(_has(schema, f) for f in fields) else []

    def _problems_of_rows(
        self, where: str, name: str, table: pa.Table, output: OutputSchema
    ) -> list[str]:
        ids = table.column(output.prefix + "row_id")
        if ids.null_count:
            return [f"{where} has {ids.null_count} rows without a row_id; {_WAY_OUT}"]
        self.ids.add(ids)
        footer_counts = read_footer(self.store, name).counts
        row_counts = unit_counts(table, output)
        if _without_examples(footer_counts) == _without_examples(row_counts):
            return []
        return [
            f"{where} says {dict(footer_counts.statuses)} and other counts in its footer, its "
            f"rows say {dict(row_counts.statuses)}; {_WAY_OUT}"
        ]


def files_of(store: Store, plan: UnitPlan, unit: int) -> list[str]:
    return read_record(store, unit)[1] if plan.is_partitioned else [part_name(unit)]


def _part_files(store: Store, plan: UnitPlan) -> Iterator[tuple[int, list[str]]]:
    is_done, _ = listed_units(store, plan)
    for unit in np.flatnonzero(is_done).tolist():
        with suppress(CommitError, FileNotFoundError):  # reported by the audit
            yield unit, files_of(store, plan, unit)


def check_parts(
    store: Store, plan: UnitPlan, output: OutputSchema | None, *, max_problems: int = 10
) -> DeepCheck:
    """Read every part in full; memory does not grow with the output, the disk has 24 bytes a row.

    Where the columns of the stage (`output`) are not known, ids and counts are not compared.
    """
    schema = _first_schema(store, plan)
    if schema is None:
        return DeepCheck()
    unlike = [
        f"{f.name}: {f.type}" for f in (output.arrow() if output else []) if not _has(schema, f)
    ]
    if unlike:
        problem = (
            f"the parts in {store.uri} lack {', '.join(unlike)}, so their values were not read"
        )
        return DeepCheck(problems=(problem,), num_problems=1)
    problems: list[str] = []
    with RepeatedIds(plan.num_rows) as ids, ThreadPoolExecutor(_THREADS) as threads:
        checker = _PartChecker(store=store, output=output, ids=ids, schema=schema)
        names = (name for _, of_unit in _part_files(store, plan) for name in of_unit)
        while share := list(islice(names, _FILES_AT_ONCE)):
            problems += chain.from_iterable(threads.map(checker.problems_of, share))
        repeated = ids.repeated()
    if repeated.num_rows and output is not None:
        problem = _describe_repeated(store, plan, output, repeated.num_rows, repeated.examples)
        problems.append(problem)
    return DeepCheck(
        repeated_rows=repeated.num_rows,
        problems=tuple(problems[:max_problems]),
        num_problems=len(problems),
    )


def _first_schema(store: Store, plan: UnitPlan) -> pa.Schema | None:
    for _, names in _part_files(store, plan):
        for name in names:
            with suppress(CommitError, ValueError, OSError):
                read_footer(store, name)
                return pq.read_schema(pa.BufferReader(store.read(name)))
    return None


def _describe_repeated(
    store: Store, plan: UnitPlan, output: OutputSchema, num_repeated: int, examples: Uint64s
) -> str:
    """Say which ids are repeated and in which units; reads the ids of all parts again."""
    wanted = {tuple(pair): (set[str](), set[int]()) for pair in examples.tolist()}
    column = output.prefix + "row_id"
    for unit, names in _part_files(store, plan):
        for name in names:
            try:
                table = pq.read_table(pa.BufferReader(store.read(name)), columns=[column])
            except (ValueError, OSError):  # reported when it was read in full
                continue
            ids = table.column(column).drop_null()
            hashes = id_hashes(ids)
            for place in np.flatnonzero(np.isin(hashes[:, 0], examples[:, 0])).tolist():
                named = wanted.get(tuple(hashes[place].tolist()))
                if named is not None:
                    named[0].add(str(ids[place]))
                    named[1].add(unit)
    places = "; ".join(
        f"{', '.join(sorted(ids))} in units {', '.join(map(str, sorted(units)))}"
        for ids, units in wanted.values()
    )
    return (
        f"{num_repeated} rows have the row_id of another row ({places}); the files were not "
        "written by one job, so choose a new folder and run it again"
    )


def _has(schema: pa.Schema, field: pa.Field) -> bool:
    return field.name in schema.names and schema.field(field.name).type == field.type


def _without_examples(counts: UnitCounts) -> UnitCounts:
    """Return counts whose errors name no rows: which come first depends on the run."""
    errors = {name: replace(error, row_ids=(), message="") for name, error in counts.errors.items()}
    # the texts that held special tokens are not in the parts
    return replace(
        counts, errors=errors, statuses=dict(counts.statuses), special_rows=0, special_tokens=0
    )


def _difference(schema: pa.Schema, expected: pa.Schema) -> str:
    different = {f"{f.name}: {f.type}" for f in schema} ^ {f"{f.name}: {f.type}" for f in expected}
    return ", ".join(sorted(different)[:5]) or "order of columns, or metadata"
