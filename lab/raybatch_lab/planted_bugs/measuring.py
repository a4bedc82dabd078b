"""Plants one bug after the other and runs the tests: which find it, and which bugs survive."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raybatch_lab.planted_bugs.records import AnchorGoneError, Area, Bug, Plan, plant
from raybatch_lab.planted_bugs.running import WITH_RAY, WITHOUT_RAY, TestRun, copy_tree, run_tests

__all__ = ["Measurement", "table_of"]

# later than any file that is copied, so that files that differ in nothing else differ in it
_FIRST_MTIME_S = 4_000_000_000

Found = dict[str, Any]


class Measurement:
    """Measures which bugs of a plan the tests find: `run` it; results are saved after each bug.

    Args:
        plan: bugs, and the tests to run.
        out: JSON file of results, of earlier runs too.
        conditions: facts of this run to store with the results, with the key `commit`.
        test_timeout_s: seconds after which a test fails.

    Raises:
        ValueError: the file has results of another commit.
    """

    def __init__(
        self, plan: Plan, out: Path, conditions: Mapping[str, Any], *, test_timeout_s: float = 60.0
    ) -> None:
        self._test_timeout_s = test_timeout_s
        self._plan = plan
        self._out = out
        self._num_planted = 0
        self.found: Found = {"conditions": dict(conditions), "clean": {}, "bugs": {}}
        if out.exists():
            known = json.loads(out.read_text(encoding="utf-8"))
            if known["conditions"]["commit"] != conditions["commit"]:
                raise ValueError(
                    f"{out} has results of another commit; name another file with --out"
                )
            self.found = {**known, "conditions": dict(conditions)}

    def run(self, tree: Path, bugs: Iterable[Bug]) -> Iterator[tuple[Bug, Found]]:
        """Run the tests on each bug in a temporary copy of the tree; yield (bug, result)."""
        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            copy = Path(folder) / "tree"
            copy_tree(tree, copy)
            for bug in bugs:
                result = {"outcome": "left out", "why": bug.left_out}
                if not bug.left_out:
                    result = self._ask(copy, bug)
                about = {"kind": bug.kind, "function": bug.function, "edit": bug.edit}
                self.found["bugs"][bug.name] = {**about, **result}
                self._save()
                yield bug, result

    def summary(self) -> dict[str, dict[str, int]]:
        """Return the number of bugs by area and outcome: `{area: {outcome: number}}`."""
        areas = {bug.name: bug.area for bug in self._plan.bugs}
        counts: dict[str, Counter[str]] = {area.name: Counter() for area in self._plan.areas}
        for name, result in self.found["bugs"].items():
            if name in areas:
                counts[areas[name]][result["outcome"]] += 1
        return {area: dict(sorted(count.items())) for area, count in counts.items() if count}

    def _ask(self, copy: Path, bug: Bug) -> Found:
        area = self._plan.area(bug.area)
        seconds = 0.0
        try:
            for number, tests, marks in _rounds(area):
                clean = self._clean(copy, area, number)
                with self._planted(copy, bug):
                    run = run_tests(
                        copy,
                        tests,
                        marks=marks,
                        deselected=clean["red"],
                        timeout_s=max(120.0, 4 * clean["seconds"]),
                        test_timeout_s=self._test_timeout_s,
                    )
                seconds += run.seconds
                if run.is_red:
                    return _killed(run, number, seconds)
        except AnchorGoneError as error:
            return {"outcome": "anchor gone", "why": str(error)}
        return {"outcome": "survived", "seconds": round(seconds, 1)}

    def _clean(self, copy: Path, area: Area, number: int) -> Found:
        """Return which tests fail without any bug, and how long all take."""
        name = f"{area.name} {number}"
        known: Found | None = self.found["clean"].get(name)
        _, tests, marks = _rounds(area)[number]
        if known is None or known["tests"] != list(tests):
            run = run_tests(copy, tests, marks=marks, stop_at_first=False, timeout_s=1800.0)
            if run.is_timeout or (run.is_red and not run.failed):
                raise RuntimeError(
                    f"round '{name}': its tests cannot run even without a planted bug:\n"
                    f"{run.output}"
                )
            known = {
                "tests": list(tests),
                "red": sorted(set(run.failed)),
                "seconds": round(run.seconds, 1),
            }
            self.found["clean"][name] = known
            self._save()
        return known

    @contextmanager
    def _planted(self, copy: Path, bug: Bug) -> Iterator[None]:
        path, before = plant(copy, bug)
        stat = path.stat()
        self._num_planted += 1
        # compiled files are known by size and second, and many bugs change neither
        os.utime(path, (stat.st_atime, _FIRST_MTIME_S + self._num_planted))
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")
            self._num_planted += 1
            os.utime(path, (stat.st_atime, _FIRST_MTIME_S + self._num_planted))

    def _save(self) -> None:
        values = {**self.found, "summary": self.summary()}
        self._out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _rounds(area: Area) -> Sequence[tuple[int, tuple[str, ...], str]]:
    """Return number, tests and marks of the rounds, which run one after the other."""
    rounds = ((area.first, WITHOUT_RAY), (area.then, WITHOUT_RAY), (area.last, WITH_RAY))
    return [(number, tests, marks) for number, (tests, marks) in enumerate(rounds)]


def _killed(run: TestRun, number: int, seconds: float) -> Found:
    by = "timeout" if run.is_timeout else (run.failed or ("the run itself",))[0]
    return {"outcome": "killed", "by": by, "round": number, "seconds": round(seconds, 1)}


def table_of(summary: Mapping[str, Mapping[str, int]]) -> str:
    """Return a summary as a text table, with a line for each area and for their sum."""
    outcomes = ("killed", "survived", "left out", "anchor gone")
    lines = [f"{'area':<16}" + "".join(f"{name:>12}" for name in outcomes)]
    total = Counter[str]()
    for area, counts in summary.items():
        total.update(counts)
        lines.append(f"{area:<16}" + "".join(f"{counts.get(name, 0):>12}" for name in outcomes))
    lines.append(f"{'all':<16}" + "".join(f"{total[name]:>12}" for name in outcomes))
    return "\n".join(lines)
