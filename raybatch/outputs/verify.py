"""Verifies that an output has every row of its plan exactly once, and reports problems.

A deep check reads every part: one schema, readable values, unique ids, counts as in the footers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.audit import Audit, audit, read_success
from raybatch.durable.commit import files_of, is_of_units, joined_ranges, listed_units
from raybatch.durable.layout import DATA, PLAN, PLAN_ORDER, PUBLISHED, SUCCESS, UNITS
from raybatch.durable.parts import read_footer
from raybatch.durable.sink import how_to_resume, is_marked
from raybatch.durable.storage import Store, error_context, open_store
from raybatch.durable.units import UnitCounts, UnitPlan, sum_counts
from raybatch.errors import CommitError, ConfigError, MissingDependency, error_text
from raybatch.inputs.tables import tables
from raybatch.pictures.wording import printable
from raybatch.planning.fingerprint import compare_files, output_columns
from raybatch.planning.source_checks import RepeatedIds, id_hashes
from raybatch.planning.store import (
    StoredPlan,
    covered_files,
    damage_of,
    is_joining,
    read_all_units,
    read_plans,
)
from raybatch.planning.tally import unit_counts
from raybatch.records.arrays import Uint64s
from raybatch.rows.schema import OutputSchema

_THREADS = 4
_FILES_AT_ONCE = 64
_WAY_OUT = f"move the file away, with {SUCCESS} if it exists, and run the job again"
# folders with the rows of an output that is not complete yet
_BELOW = {
    PLAN_ORDER: f"these rows are in {PLAN_ORDER}/, not in input order yet",
    UNITS: f"the files of some of these rows are in {UNITS}/, not joined yet",
}
_ANEW = "remove it and run the job again, which recounts the parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepCheck:
    """The result of reading all values of an output.

    `repeated_rows` is the number of rows whose row_id occurred before. `problems` are the first of
    `num_problems` problems, each with the file and what to do.
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
            # check types first: values of another type must not be read
            is_like_others = file.schema_arrow.equals(self.schema, check_metadata=True)
            columns = None
            if not is_like_others:
                differing = {f"{f.name}: {f.type}" for f in file.schema_arrow}
                differing ^= {f"{f.name}: {f.type}" for f in self.schema}
                difference = ", ".join(sorted(differing)[:5]) or "order of columns, or metadata"
                problems = [
                    f"{where} has another schema than the first part ({difference}); {_WAY_OUT}"
                ]
                columns = self._stage_columns(file.schema_arrow)
            # a file that many parts were joined into is large
            groups = range(file.num_row_groups)
            tables = (file.read_row_group(i, columns, use_threads=False) for i in groups)
            if self.output is not None and (is_like_others or columns):
                problems += self._problems_of_rows(where, name, tables, self.output)
            elif is_like_others:
                for _ in tables:
                    pass
        except (CommitError, FileNotFoundError):  # reported by the audit
            pass
        except (ValueError, KeyError, OSError, NotImplementedError) as error:
            problems.append(f"{where} cannot be read in full: {error_text(error)}; {_WAY_OUT}")
        return problems

    def _stage_columns(self, schema: pa.Schema) -> list[str]:
        """Return the columns of the stage, or none if one has another type."""
        fields = list(self.output.arrow()) if self.output else []
        return [f.name for f in fields] if all(_has(schema, f) for f in fields) else []

    def _problems_of_rows(
        self, where: str, name: str, tables: Iterable[pa.Table], output: OutputSchema
    ) -> list[str]:
        num_nulls, counts = 0, []
        for table in tables:
            ids = table.column(output.prefix + "row_id")
            num_nulls += ids.null_count
            if not num_nulls:
                self.ids.add(ids)
                counts.append(unit_counts(table, output))
        if num_nulls:
            return [f"{where} has {num_nulls} rows without a row_id; {_WAY_OUT}"]
        footer_counts, row_counts = read_footer(self.store, name).counts, sum_counts(counts)
        if _without_examples(footer_counts) == _without_examples(row_counts):
            return []
        return [
            f"{where} has statuses {dict(row_counts.statuses)} or other counts that differ from "
            f"its footer, {dict(footer_counts.statuses)}; {_WAY_OUT}"
        ]


def _part_files(store: Store, plan: UnitPlan) -> Iterator[tuple[int, list[str]]]:
    is_done, _ = listed_units(store, plan)
    for units in joined_ranges(store):  # the parts of these units were removed
        is_done[units.start : units.stop] = False
    for unit in np.flatnonzero(is_done).tolist():
        with suppress(CommitError, FileNotFoundError):  # reported by the audit
            yield unit, files_of(store, unit, is_partitioned=plan.is_partitioned)


def check_parts(
    store: Store, plan: UnitPlan, output: OutputSchema | None, *, max_problems: int = 10
) -> DeepCheck:
    """Read every part of an output and check schemas, values, row ids and counts.

    It uses memory for a few files, and 24 bytes of disk per row. `output` are the columns of the
    stage; without them ids and counts are not compared. At most `max_problems` are described.
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
    """Return a message with repeated ids and their units; reads the ids of all parts again."""
    wanted = {tuple(pair): (set[str](), set[int]()) for pair in examples.tolist()}
    column = output.prefix + "row_id"
    for unit, names in _part_files(store, plan):
        for name in names:
            try:
                table = pq.read_table(pa.BufferReader(store.read(name)), columns=[column])
            except (ValueError, OSError):  # reported when the part was read in full
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
        f"{num_repeated} rows have the row_id of another row ({places}); the files are not from "
        "one job: choose a new folder and run it again"
    )


def _has(schema: pa.Schema, field: pa.Field) -> bool:
    return field.name in schema.names and schema.field(field.name).type == field.type


def _without_examples(counts: UnitCounts) -> UnitCounts:
    """Return counts without example rows of errors, which depend on the run."""
    errors = {name: replace(error, row_ids=(), message="") for name, error in counts.errors.items()}
    # parts do not store the number of special tokens
    return replace(
        counts, errors=errors, statuses=dict(counts.statuses), special_rows=0, special_tokens=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of `verify`: print it, or use `to_json`.

    Args:
        plan: hash of the plan; "" if a run died before it wrote one.
        is_deep: the values of all parts were read; otherwise only names and footers.
        has_success: a run has marked the output as complete.
        lost_rows: rows whose part cannot be read, or is missing from a complete output; with
            `is_deep` also rows replaced by another one.
        duplicated_rows: rows written more than once; by row id only if `is_deep`.
        rows_to_do: rows of units that are not written yet.
    """

    sink: str
    plan: str
    is_deep: bool
    has_success: bool
    num_units: int = 0
    num_units_missing: int = 0
    expected_rows: int = 0
    written_rows: int = 0
    lost_rows: int = 0
    duplicated_rows: int = 0
    rows_to_do: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    resume: str = "run the job again"

    @property
    def is_clean(self) -> bool:
        """Return whether there are no problems; the output may be unfinished."""
        return not (self.problems or self.lost_rows or self.duplicated_rows)

    @property
    def is_complete(self) -> bool:
        """Return whether there are no problems and no row is missing."""
        is_whole = self.has_success and self.written_rows == self.expected_rows
        return self.is_clean and is_whole and not self.num_units_missing

    def exit_code(self) -> int:
        """Return 0 for a clean and complete output, else 1."""
        return 0 if self.is_complete else 1

    def __str__(self) -> str:
        done = self.num_units - self.num_units_missing
        facts = [
            ("output", self.sink),
            ("plan", self.plan or "none"),
            ("rows", f"{self.expected_rows:,} expected, {self.written_rows:,} written"),
            ("", f"{self.lost_rows:,} lost, {self.duplicated_rows:,} duplicated"),
            ("", f"{self.rows_to_do:,} still to do"),
            ("units", f"{done:,} of {self.num_units:,}"),
            ("status", ", ".join(f"{n:,} {name}" for name, n in self.statuses.items()) or "-"),
            ("_SUCCESS", "yes" if self.has_success else "no"),
            ("checked", "every value" if self.is_deep else "names and footers"),
        ]
        verdict = f"not complete, no problems so far; {self.resume} to resume"
        if not self.is_clean:
            verdict = "problems found, see above"
        elif self.is_complete:
            verdict = "complete, every row exactly once"
        lines = [f"{name:<10} {value}" for name, value in facts]
        lines += [f"problem: {text}" for text in self.problems]
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join(printable(line) for line in [*lines, f"verdict: {verdict}"])

    def to_json(self) -> str:
        """Return every field and the verdict as a JSON object."""
        values = asdict(self)
        values.update(is_clean=self.is_clean, is_complete=self.is_complete)
        return json.dumps(values, indent=2, sort_keys=True)


def verify(sink: str | Path, *, deep: bool = False) -> Verification:
    """Compare an output with the plan of its job; read only, without Ray.

    Args:
        sink: output folder of a job, local or with a protocol.
        deep: read every part: one schema, all values, unique row ids, counts as in the footers.

    Raises:
        ConfigError: the folder is not the output of a job, or cannot be read.
    """
    sink = str(sink)
    store = open_store(sink)
    with error_context(f"output {sink!r} cannot be read"):
        if store.size(PLAN) is None:
            for folder, note in _BELOW.items():
                if store.size(f"{folder}/{PLAN}") is not None:
                    result = verify(f"{sink.rstrip('/')}/{folder}", deep=deep)
                    return replace(
                        result,
                        sink=sink,
                        has_success=False,
                        problems=(*result.problems, *_parts_without_plan(store)),
                        notes=(*result.notes, note),
                    )
            return _without_plan(sink, store, is_deep=deep)
        if is_joining(sink):
            units = verify(f"{sink.rstrip('/')}/{UNITS}", deep=deep)
            return _with_units(_verified(sink, store, deep=deep), units)
        return _verified(sink, store, deep=deep)


def _with_units(joined: Verification, units: Verification) -> Verification:
    """Return the result of an output whose parts are joined: all rows are known to its units."""
    left = (_BELOW[UNITS],) if joined.written_rows < units.written_rows else ()
    return replace(
        units,
        sink=joined.sink,
        has_success=False,
        lost_rows=units.lost_rows + joined.lost_rows,
        duplicated_rows=units.duplicated_rows + joined.duplicated_rows,
        problems=tuple(dict.fromkeys((*units.problems, *joined.problems))),
        notes=tuple(dict.fromkeys((*units.notes, *joined.notes, *left))),
    )


def _verified(sink: str, store: Store, *, deep: bool) -> Verification:
    with error_context(f"output {sink!r} cannot be read"):
        plans = read_plans(sink)
        plan = read_all_units(sink, plans)
        result = audit(store, plan)
        success = None if is_of_units(store) else read_success(store)
        output = output_columns(plans[0].fingerprint)
        look = check_parts(store, plan, output) if deep else DeepCheck()
        damaged = [damage_of(sink, stored, is_deep=deep) for stored in plans]
        resume = how_to_resume(store)
    if success is not None and plan.extends(success.get("plan")):
        success = None  # valid for the input before it grew
    has_success = success is not None
    problems = list(result.foreign)
    if result.num_foreign > len(problems):
        problems.append(f"{result.num_foreign - len(problems)} more such files")
    if success is not None:
        problems += _untrue(sink, success, plan, result, resume)
    problems += look.problems
    if look.num_problems > len(look.problems):
        problems.append(f"{look.num_problems - len(look.problems)} more such problems")
    changed, notes = _compare_input(plans)
    # shards are only needed to resume
    (notes if has_success else problems).extend([*changed, *filter(None, damaged)])
    # a part has as many rows as its unit: a duplicated row replaces another one
    replaced = max(0, look.repeated_rows - result.duplicated_rows)
    verification = Verification(
        sink=sink,
        plan=plan.hash,
        is_deep=deep,
        has_success=has_success,
        num_units=result.num_units,
        num_units_missing=result.num_missing,
        expected_rows=result.expected_rows,
        written_rows=result.written_rows,
        lost_rows=(result.lost_rows if has_success else result.unreadable_rows) + replaced,
        duplicated_rows=max(result.duplicated_rows, look.repeated_rows),
        rows_to_do=0 if has_success else result.missing_rows,
        statuses=dict(sorted(result.counts.statuses.items(), key=lambda one: (-one[1], one[0]))),
        problems=tuple(problems),
        notes=tuple(notes),
        resume=resume,
    )
    if not (deep and verification.is_complete and store.names(PUBLISHED)):
        return verification
    try:
        found, more = tables("a check of the tables with these rows").check_output(sink)
    except MissingDependency as error:
        return replace(verification, notes=(*notes, str(error)))
    return replace(verification, problems=tuple(found), notes=(*notes, *more))


def _parts_without_plan(store: Store) -> tuple[str, ...]:
    names = store.names(DATA)
    if not names:
        return ()
    return (
        f"{store.uri}/{PLAN} is missing, but there are {len(names)} files, such as {names[0]}; "
        "without it missing rows are unknown and no run can resume: restore it from a copy, or "
        "choose another folder",
    )


def _without_plan(sink: str, store: Store, *, is_deep: bool) -> Verification:
    if not is_marked(store):
        raise ConfigError(f"{sink} is not the output of a raybatch job; name the sink of one")
    problems = _parts_without_plan(store)
    note = "a run ended before it wrote its plan; nothing is lost"
    return Verification(
        sink=sink,
        plan="",
        is_deep=is_deep,
        has_success=store.size(SUCCESS) is not None,
        problems=problems,
        notes=() if problems else (note,),
    )


def _untrue(
    sink: str, success: Mapping[str, object], plan: UnitPlan, result: Audit, resume: str
) -> list[str]:
    """Return the statements of `_SUCCESS` that the output contradicts."""
    where = f"{sink.rstrip('/')}/{SUCCESS}"
    if "plan" not in success:
        return [f"{where} was not written by a run; {_ANEW}"]
    true = {"plan": plan.hash, "units": result.num_units, "rows": result.expected_rows}
    wrong = [
        f"{name} is {success.get(name)!r}, but {value!r} in the plan"
        for name, value in true.items()
        if success.get(name) != value
    ]
    counts = success.get("counts")
    statuses = counts.get("statuses") if isinstance(counts, dict) else None
    if not wrong and not result.lost_rows and statuses != dict(result.counts.statuses):
        wrong.append(f"statuses are {statuses}, but {dict(result.counts.statuses)} in the footers")
    problems = [f"{where}: {'; '.join(wrong)}; {_ANEW}"] if wrong else []
    gone = [f"{where}: {result.gone_message(resume)}"] if result.num_missing else []
    return [*problems, *gone]


def _compare_input(plans: Sequence[StoredPlan]) -> tuple[list[str], list[str]]:
    files = covered_files(plans)
    root = plans[0].source
    if not root or not files:
        return [], []
    changed, unreadable = compare_files(root, files)
    problems, notes = [], []
    if changed:
        problems.append(
            f"{len(changed)} input files have changed since the plan was made, such as "
            f"{root}/{changed[0]}; the output is for their old content"
        )
    if unreadable:
        notes.append(
            f"{len(unreadable)} of {len(files)} input files cannot be read here, such as "
            f"{root}/{unreadable[0]}, and were not compared"
        )
    return problems, notes
