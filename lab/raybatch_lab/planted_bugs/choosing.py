"""Which of all possible bugs are planted: drawn by a seed, over files, functions and kinds."""

import random
from collections.abc import Sequence
from pathlib import Path

from raybatch_lab.planted_bugs.edits import Edit, edited_lines, edits_of
from raybatch_lab.planted_bugs.records import Area, Bug

__all__ = ["choose_bugs"]

_BORDERS = ("<", "<=", ">", ">=")


def choose_bugs(root: Path, areas: Sequence[Area], *, per_area: int, seed: int) -> list[Bug]:
    """Choose bugs to plant in a source tree at random, at most one in a function.

    Args:
        root: folder of the tree.
        areas: parts of the package, each with the same number of bugs.
        per_area: bugs in an area, fewer if it has too few functions.
        seed: seed of the choice; the bugs of an area do not depend on other areas.
    """
    return [bug for area in areas for bug in _of_area(root, area, per_area, seed)]


def _of_area(root: Path, area: Area, count: int, seed: int) -> list[Bug]:
    draw = random.Random(f"{seed} {area.name}")
    paths = sorted({path for pattern in area.files for path in root.glob(pattern)})
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    left: dict[tuple[str, str], list[Edit]] = {}
    for file, source in sources.items():
        for edit in edits_of(source):
            left.setdefault((file, edit.function), []).append(edit)
    kinds = sorted({edit.kind for edits in left.values() for edit in edits})
    draw.shuffle(kinds)
    bugs: list[Bug] = []
    while len(bugs) < count and left:
        kind = kinds[len(bugs) % len(kinds)]
        # files in turn as well: a long one does not get all
        used = {file: sum(bug.file == file for bug in bugs) for file in sources}
        places = [p for p, edits in left.items() if any(e.kind == kind for e in edits)]
        if not places:
            kinds.remove(kind)
            continue
        fewest = min(used[file] for file, _ in places)
        place = draw.choice([p for p in places if used[p[0]] == fewest])
        edits = [e for e in left.pop(place) if e.kind == kind]
        # a border that is off by one is harder to see than a test that is turned round
        edit = draw.choice([e for e in edits if e.text in _BORDERS] or edits)
        anchor, replacement = edited_lines(sources[place[0]], edit)
        bugs.append(
            Bug(
                name=f"{area.name}-{len(bugs) + 1:02d}",
                area=area.name,
                file=place[0],
                function=edit.function,
                kind=kind,
                anchor=anchor,
                replacement=replacement,
            )
        )
    return bugs
