"""Proves that an output holds every row of its plan exactly once, or says what is wrong with it.

A deep check opens every part: one schema, every value readable, ids unique, counts as said.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.audit import Audit, audit, read_success
from raybatch.durable.commit import listed_units, read_record
from raybatch.durable.layout import DATA, PLAN, PLAN_ORDER, SUCCESS, part_name
from raybatch.durable.parts import read_footer
from raybatch.durable.sink import is_marked
from raybatch.durable.storage import Store, error_context, open_store
from raybatch.durable.units import UnitCounts, UnitPlan
from raybatch.errors import CommitError, ConfigError, error_text
from raybatch.pictures.wording import printable
from raybatch.planning.fingerprint import compare_files, output_columns
from raybatch.planning.repeated_ids import RepeatedIds, id_hashes
from raybatch.planning.store import damage_of, read_all_units, read_plans
from raybatch.planning.stored import StoredPlan
from raybatch.planning.tally import unit_counts
from raybatch.records.arrays import Uint64s
from raybatch.rows.schema import OutputSchema

_THREADS = 4
_FILES_AT_ONCE = 64
_WAY_OUT = f"move the file away, with {SUCCESS} if it is there, and run the job again"
_ANEW = "remove it and run the job again, which counts the parts anew"


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
                differing = {f"{f.name}: {f.type}" for f in file.schema_arrow}
                differing ^= {f"{f.name}: {f.type}" for f in self.schema}
                difference = ", ".join(sorted(differing)[:5]) or "order of columns, or metadata"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What is in an output beside what should be; `print` it, or take `to_json`.

    Args:
        plan: hash of its plan; "" where a run died before there was one.
        is_deep: values of all parts were read too, not names and footers alone.
        has_success: a run has marked the output as complete.
        lost_rows: whose part cannot be read, or is gone although the output was complete; with
            `is_deep` also those in whose place another row stands.
        duplicated_rows: written more than once; of row ids alone when `is_deep`.
        rows_to_do: whose units no run has written yet.
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

    @property
    def is_clean(self) -> bool:
        """Return whether nothing is wrong with what is there; it may be unfinished."""
        return not (self.problems or self.lost_rows or self.duplicated_rows)

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is wrong and every row is there."""
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
            ("looked at", "every value" if self.is_deep else "names and footers"),
        ]
        verdict = "not complete, nothing is wrong so far; run the job again to go on"
        if not self.is_clean:
            verdict = "something is wrong, see above"
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
    """Compare an output with the plan of its job; changes nothing, and needs no Ray.

    Args:
        sink: folder that a job has written to, local or with a protocol.
        deep: read every part: one schema, all values, unique row ids, counts as the footers say.

    Raises:
        ConfigError: no job has written there, or it cannot be read.
    """
    sink = str(sink)
    store = open_store(sink)
    with error_context(f"output {sink!r} cannot be read"):
        if store.size(PLAN) is None:
            if store.size(f"{PLAN_ORDER}/{PLAN}") is None:
                return _without_plan(sink, store, is_deep=deep)
            result = verify(f"{sink.rstrip('/')}/{PLAN_ORDER}", deep=deep)
            note = f"these rows lie in {PLAN_ORDER}/, and are not in the order of the input yet"
            return replace(
                result,
                sink=sink,
                has_success=False,
                problems=(*result.problems, *_parts_without_plan(store)),
                notes=(*result.notes, note),
            )
        plans = read_plans(sink)
        plan = read_all_units(sink, plans)
        audited, success = audit(store, plan), read_success(store)
        output = output_columns(plans[0].fingerprint)
        look = check_parts(store, plan, output) if deep else None
        damaged = [damage_of(sink, stored, is_deep=deep) for stored in plans]
    return _verification(sink, plans, plan, audited, success, look, damaged)


def _verification(
    sink: str,
    plans: Sequence[StoredPlan],
    plan: UnitPlan,
    result: Audit,
    success: Mapping[str, object] | None,
    look: DeepCheck | None,
    damaged: Sequence[str | None],
) -> Verification:
    if success is not None and plan.extends(success.get("plan")):
        success = None  # true of the input before it grew
    has_success = success is not None
    problems = list(result.foreign)
    if result.num_foreign > len(problems):
        problems.append(f"{result.num_foreign - len(problems)} more files are like these")
    if success is not None:
        problems += _untrue(sink, success, plan, result)
    if look is not None:
        problems += look.problems
        if look.num_problems > len(look.problems):
            problems.append(f"{look.num_problems - len(look.problems)} more such findings")
    changed, notes = _compare_input(plans)
    # what only a run that goes on needs
    (notes if has_success else problems).extend([*changed, *filter(None, damaged)])
    repeated = 0 if look is None else look.repeated_rows
    # a part has the rows of its unit: one that is there twice stands where another should
    replaced = max(0, repeated - result.duplicated_rows)
    return Verification(
        sink=sink,
        plan=plan.hash,
        is_deep=look is not None,
        has_success=has_success,
        num_units=result.num_units,
        num_units_missing=result.num_missing,
        expected_rows=result.expected_rows,
        written_rows=result.written_rows,
        lost_rows=(result.lost_rows if has_success else result.unreadable_rows) + replaced,
        duplicated_rows=max(result.duplicated_rows, repeated),
        rows_to_do=0 if has_success else result.missing_rows,
        statuses=dict(sorted(result.counts.statuses.items(), key=lambda one: (-one[1], one[0]))),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _parts_without_plan(store: Store) -> tuple[str, ...]:
    names = store.names(DATA)
    if not names:
        return ()
    return (
        f"{store.uri}/{PLAN} is gone, and {len(names)} files are there, such as {names[0]}; without"
        " it nobody can tell what is missing, and no run goes on: bring it back from a copy, or "
        "choose another folder",
    )


def _without_plan(sink: str, store: Store, *, is_deep: bool) -> Verification:
    if not is_marked(store):
        raise ConfigError(f"{sink}: no job of raybatch has written here; name the sink of one")
    problems = _parts_without_plan(store)
    note = "a run began here and ended before its plan was written; nothing is lost"
    return Verification(
        sink=sink,
        plan="",
        is_deep=is_deep,
        has_success=store.size(SUCCESS) is not None,
        problems=problems,
        notes=() if problems else (note,),
    )


def _untrue(sink: str, success: Mapping[str, object], plan: UnitPlan, result: Audit) -> list[str]:
    """Return what `_SUCCESS` says and the output does not bear out."""
    where = f"{sink.rstrip('/')}/{SUCCESS}"
    if "plan" not in success:
        return [f"{where} is not what a run writes; {_ANEW}"]
    true = {"plan": plan.hash, "units": result.num_units, "rows": result.expected_rows}
    wrong = [
        f"{name} is {success.get(name)!r}, the plan says {value!r}"
        for name, value in true.items()
        if success.get(name) != value
    ]
    counts = success.get("counts")
    statuses = counts.get("statuses") if isinstance(counts, dict) else None
    if not wrong and not result.lost_rows and statuses != dict(result.counts.statuses):
        wrong.append(f"it counts {statuses}, the footers {dict(result.counts.statuses)}")
    problems = [f"{where}: {'; '.join(wrong)}; {_ANEW}"] if wrong else []
    return [*problems, f"{where}: {result.gone_message}"] if result.num_missing else problems


def _compare_input(plans: Sequence[StoredPlan]) -> tuple[list[str], list[str]]:
    files = [file for stored in plans for file in stored.files]
    root = plans[0].source
    if not root or not files:
        return [], []
    changed, unreadable = compare_files(root, files)
    problems, notes = [], []
    if changed:
        problems.append(
            f"{len(changed)} input files have changed since the plan was made, such as "
            f"{root}/{changed[0]}; the output belongs to what they were"
        )
    if unreadable:
        notes.append(
            f"{len(unreadable)} of {len(files)} input files cannot be read from here, such "
            f"as {root}/{unreadable[0]}, and were not compared"
        )
    return problems, notes
