"""Proves that an output holds every row of its plan exactly once, or says what is wrong with it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raybatch.durable.audit import Audit, audit, read_success
from raybatch.durable.layout import DATA, PLAN, PLAN_ORDER, SUCCESS
from raybatch.durable.sink import is_marked
from raybatch.durable.storage import error_context, open_store
from raybatch.durable.stores import Store
from raybatch.durable.units import UnitPlan
from raybatch.errors import ConfigError
from raybatch.outputs.deep import DeepCheck, check_parts
from raybatch.pictures.wording import printable
from raybatch.planning.fingerprint import compare_files, output_columns
from raybatch.planning.store import damage_of, read_all_units, read_plans
from raybatch.planning.stored import StoredPlan

_ANEW = "remove it and run the job again, which counts the parts anew"


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
        values = dataclasses.asdict(self)
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
            return dataclasses.replace(
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
