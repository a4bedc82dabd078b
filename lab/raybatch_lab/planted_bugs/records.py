"""The list of planted bugs, and how one is planted: by a text that is there once, not by a line."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

__all__ = ["AnchorGoneError", "Area", "Bug", "Plan", "count_lines", "find_anchor", "plant"]


class AnchorGoneError(LookupError):
    """The text that a bug replaces is not there any more, or there more than once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Part of the package that has its share of the bugs, and who is asked about them.

    Args:
        name: of the part.
        files: that bugs are chosen in.
        first: tests that are asked first, the likeliest to know.
        then: folders and files whose tests without Ray are asked of survivors.
        last: tests that are asked at the end; they may start Ray.
    """

    name: str
    files: tuple[str, ...]
    first: tuple[str, ...]
    then: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """One bug.

    Args:
        name: area and number.
        area: that it is of.
        file: that it was chosen in.
        function: that it is in.
        kind: of the edit.
        anchor: whole lines that are in the file once.
        replacement: of these lines.
        left_out: why it is not planted, such as that nothing that can be seen changes; "" where it
            is.
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
        """Return what tells this edit from others: after a new choice a name stands for another."""
        return sha256(f"{self.anchor}\0{self.replacement}".encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is planted, and who is asked.

    Args:
        areas: of the package.
        bugs: in them.
        heavy: modules that many tests import, imported once for all runs where they are installed.
    """

    areas: tuple[Area, ...]
    bugs: tuple[Bug, ...] = ()
    heavy: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Read areas and bugs from JSON."""
        read = json.loads(path.read_text(encoding="utf-8"))
        areas = tuple(_area(one) for one in read["areas"])
        bugs = tuple(_bug(one) for one in read["bugs"])
        return cls(areas=areas, bugs=bugs, heavy=tuple(read["heavy"]))

    def save(self, path: Path) -> None:
        """Write areas and bugs as JSON."""
        said = {
            "heavy": self.heavy,
            "areas": [_fields(area) for area in self.areas],
            "bugs": [_with_lines(bug) for bug in self.bugs],
        }
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")

    def area(self, name: str) -> Area:
        """Return the area with this name."""
        return next(area for area in self.areas if area.name == name)


def find_anchor(root: Path, bug: Bug) -> Path:
    """Return the file that a bug goes to: its own, or the one that its lines have moved to.

    Raises:
        AnchorGoneError: no file has the lines, or they are there more than once.
    """
    home = root / bug.file
    if home.is_file() and _count(home, bug.anchor) == 1:
        return home
    package = root / bug.file.partition("/")[0]
    counts = {path: _count(path, bug.anchor) for path in sorted(package.rglob("*.py"))}
    found = [path for path, count in counts.items() if count]
    if len(found) != 1 or counts[found[0]] != 1:
        raise AnchorGoneError(f"{bug.name}: what it replaces is in {sum(counts.values())} places")
    return found[0]


def plant(root: Path, bug: Bug) -> tuple[Path, str]:
    """Write a bug into a tree, and return the file and its text before.

    Raises:
        AnchorGoneError: there is no one place for it.
    """
    path = find_anchor(root, bug)
    before = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(_pattern(bug.anchor), lambda _: bug.replacement, before), encoding="utf-8"
    )
    return path, before


def count_lines(text: str, lines: str) -> int:
    """Return how often a text has these whole lines."""
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
    said = _fields(bug)
    return {**said, **{name: said[name].split("\n") for name in ("anchor", "replacement")}}


def _fields(record: Area | Bug) -> dict[str, Any]:
    names: Sequence[str] = type(record).__slots__
    # what is empty says nothing
    return {name: value for name in names if (value := getattr(record, name))}
