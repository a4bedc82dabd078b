"""The list of planted bugs, and how one is planted: by a text that occurs once, not by a line."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

__all__ = ["AnchorGoneError", "Area", "Bug", "Plan", "count_lines", "find_anchor", "plant"]


class AnchorGoneError(LookupError):
    """The lines that a bug replaces do not occur exactly once in the tree any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """A part of the package that gets bugs, and the tests that run on them in three rounds.

    Args:
        files: glob patterns of the files that get bugs.
        first: test files and folders to run first, the likeliest to fail.
        then: test files and folders to run if the first pass, without tests that need Ray.
        last: tests to run at the end; they may start Ray.
    """

    name: str
    files: tuple[str, ...]
    first: tuple[str, ...]
    then: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A bug to plant: it replaces some lines of a function.

    Args:
        name: area and number.
        area: name of its area.
        file: path of the file in which it was chosen.
        function: qualified name of the function.
        kind: kind of the edit.
        anchor: the lines to replace, which the file has once.
        replacement: the lines to write instead.
        left_out: why it is not planted, such as that it changes no behaviour; "" if it is planted.
    """

    name: str
    area: str
    file: str
    function: str
    kind: str
    anchor: str
    replacement: str
    left_out: str = ""

    @property
    def edit(self) -> str:
        """Return an id of the edit, since another choice of bugs may reuse the name."""
        return sha256(f"{self.anchor}\0{self.replacement}".encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The chosen bugs, and the areas that they are in.

    Args:
        heavy: modules that many tests import; they are imported once, before all runs.
    """

    areas: tuple[Area, ...]
    bugs: tuple[Bug, ...] = ()
    heavy: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Read a plan from a JSON file."""
        read = json.loads(path.read_text(encoding="utf-8"))
        areas = tuple(_area(one) for one in read["areas"])
        bugs = tuple(_bug(one) for one in read["bugs"])
        return cls(areas=areas, bugs=bugs, heavy=tuple(read["heavy"]))

    def save(self, path: Path) -> None:
        """Write the plan to a JSON file."""
        values = {
            "heavy": self.heavy,
            "areas": [_fields(area) for area in self.areas],
            "bugs": [_with_lines(bug) for bug in self.bugs],
        }
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def area(self, name: str) -> Area:
        """Return the area with this name."""
        return next(area for area in self.areas if area.name == name)


def find_anchor(root: Path, bug: Bug) -> Path:
    """Return the file in which to plant a bug: its own, or the one to which its lines have moved.

    Raises:
        AnchorGoneError: no file has the lines, or they occur more than once.
    """
    home = root / bug.file
    if home.is_file() and _count(home, bug.anchor) == 1:
        return home
    package = root / bug.file.partition("/")[0]
    counts = {path: _count(path, bug.anchor) for path in sorted(package.rglob("*.py"))}
    found = [path for path, count in counts.items() if count]
    if len(found) != 1 or counts[found[0]] != 1:
        raise AnchorGoneError(
            f"bug {bug.name} cannot be planted: the lines that it replaces occur "
            f"{sum(counts.values())} times in the package instead of once"
        )
    return found[0]


def plant(root: Path, bug: Bug) -> tuple[Path, str]:
    """Plant a bug in a tree; return the changed file and its earlier text.

    Raises:
        AnchorGoneError: the lines that it replaces do not occur exactly once.
    """
    path = find_anchor(root, bug)
    before = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(_pattern(bug.anchor), lambda _: bug.replacement, before), encoding="utf-8"
    )
    return path, before


def count_lines(text: str, lines: str) -> int:
    """Return how often some whole lines occur in a text."""
    return len(re.findall(_pattern(lines), text))


def _pattern(lines: str) -> str:
    # two places may be neighbours, so neither takes the end of a line
    return rf"(?m)^{re.escape(lines)}$"


def _count(path: Path, lines: str) -> int:
    return count_lines(path.read_text(encoding="utf-8"), lines)


def _area(read: dict[str, Any]) -> Area:
    lists = {name: tuple(value) for name, value in read.items() if name != "name"}
    return Area(name=read["name"], **lists)


def _bug(one: dict[str, Any]) -> Bug:
    lines = {name: "\n".join(one[name]) for name in ("anchor", "replacement")}
    return Bug(**{**one, **lines})


def _with_lines(bug: Bug) -> dict[str, Any]:
    values = _fields(bug)
    return {**values, **{name: values[name].split("\n") for name in ("anchor", "replacement")}}


def _fields(record: Area | Bug) -> dict[str, Any]:
    names: Sequence[str] = type(record).__slots__
    # empty fields are left out
    return {name: value for name in names if (value := getattr(record, name))}
