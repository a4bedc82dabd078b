"""Plant bugs in a copy of the tree one at a time, and write down which test finds each.

Run from the repository's root: `python -m raybatch_lab.planted_bugs run --out FILE`; a run that was
cut off continues where it was. `choose` draws the list again.
"""

import argparse
import importlib
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from raybatch_lab.planted_bugs.choosing import choose_bugs
from raybatch_lab.planted_bugs.measuring import Measurement, table_of
from raybatch_lab.planted_bugs.records import Bug, Plan
from raybatch_lab.planted_bugs.running import import_heavy

ROOT = Path(__file__).parents[3]
LIST = Path(__file__).parent / "bugs.json"


def main() -> None:
    """Run the subcommand given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", type=Path, default=LIST, help="areas and bugs")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout that is copied")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="plant bugs and ask the tests")
    run.add_argument("--out", type=Path, required=True, help="results as JSON, kept after each bug")
    run.add_argument("--bugs", default="*", help="pattern of names, such as 'queue-*'")
    run.add_argument("--anew", action="store_true", help="ask again about bugs that survived")
    run.add_argument("--test-timeout-s", type=float, default=60.0, help="of one test")
    choose = commands.add_parser("choose", help="draw new bugs; notes on equal ones stay")
    choose.add_argument("--seed", type=int, default=1)
    choose.add_argument("--per-area", type=int, default=12)
    options = parser.parse_args()
    plan = Plan.load(options.list)
    if options.command == "choose":
        bugs = choose_bugs(options.tree, plan.areas, per_area=options.per_area, seed=options.seed)
        replace(plan, bugs=_with_notes(bugs, plan)).save(options.list)
        return
    _run(plan, options)


def _run(plan: Plan, options: argparse.Namespace) -> None:
    measurement = Measurement(
        plan, options.out, _conditions(options.tree), test_timeout_s=options.test_timeout_s
    )
    edits = {bug.name: bug.edit for bug in plan.bugs}
    known = {
        name
        for name, result in measurement.found["bugs"].items()
        if result.get("edit", edits.get(name)) == edits.get(name)
        and not (options.anew and result["outcome"] == "survived")
    }
    wanted = [b for b in plan.bugs if fnmatch(b.name, options.bugs) and b.name not in known]
    import_heavy(plan.heavy)
    for bug, result in measurement.run(options.tree, wanted):
        detail = result.get("by") or result.get("why") or ""
        print(f"{bug.name:<18} {result['outcome']:<12} {detail}", flush=True)
    print(table_of(measurement.summary()))


def _conditions(tree: Path) -> dict[str, Any]:
    # the benchmark's modules are scripts beside each other, not a package
    sys.path.append(str(ROOT / "benchmarks"))
    gather = importlib.import_module("conditions").gather
    # a result may be of several runs, each for some of the bugs
    return {**gather(tree, ()), "command": "python -m raybatch_lab.planted_bugs run"}


def _with_notes(bugs: list[Bug], plan: Plan) -> tuple[Bug, ...]:
    notes = {(bug.anchor, bug.replacement): bug.left_out for bug in plan.bugs}
    return tuple(
        replace(bug, left_out=notes.get((bug.anchor, bug.replacement), "")) for bug in bugs
    )


if __name__ == "__main__":
    main()
