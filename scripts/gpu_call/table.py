"""Formats the final table: how each stage ended, and its main figures, in at most 40 lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_call.plan import Ended

MAX_LINES = 40
# stages with separate files
OWN = ("engine", "kernels", "steps", "bench")
_WIDTH = 118
# most lines of a stage; the first says how it ended
_MOST = {
    "forms": 2,
    "env": 2,
    "ceilings": 3,
    "check": 4,
    "kernel_tests": 2,
    "engine": 7,
    "kernels": 9,
    "steps": 6,
    "bench": 4,
}


def table(ended: Sequence[Ended], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines; the first failure and the first wrong result of a stage come first."""
    lines = []
    for stage in ended:
        of_stage = found.get(stage.name, {})
        notes = [*_notes(stage, of_stage), *of_stage.get("figures", [])] or [""]
        most = _MOST.get(stage.name, 2)
        shown = notes[:most]
        suffix = ""
        if left := len(notes) - len(shown):
            suffix = f" ({left} more in {file_of(stage.name)})"
        head = f"{stage.name:<13}{status(stage, of_stage):<9}{stage.seconds:>5.0f} s  "
        starts = [head, *[" " * len(head)] * (len(shown) - 1)]
        ends = [*[""] * (len(shown) - 1), suffix]
        lines += [_cut(a + text, b) for a, text, b in zip(starts, shown, ends, strict=True)]
    num_ok = sum(status(each, found.get(each.name, {})) == "ok" for each in ended)
    lines.append(f"{num_ok} of {len(ended)} stages are ok")
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines"
    return lines


def status(stage: Ended, found: Mapping[str, Any]) -> str:
    """Return "ok", "timeout", "FAILED", or "WRONG" if a result is wrong."""
    if found.get("wrong"):
        return "WRONG"
    if stage.status == "timeout":
        return "timeout"
    return "FAILED" if stage.status == "failed" or found.get("failed") else "ok"


def _notes(stage: Ended, found: Mapping[str, Any]) -> list[str]:
    notes = []
    for name in ("wrong", "failed"):
        texts = found.get(name, [])
        if texts:
            more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
            notes.append(f"{name}{more}: {texts[0]}")
    if stage.status != "ok" and not notes:
        last = stage.log.strip().splitlines()[-1:] or ["no output"]
        notes.append(f"{stage.status}: {last[0]}")
    if skipped := found.get("skipped"):
        notes.append(f"no time for {len(skipped)}, the first is {skipped[0]}")
    return notes


def file_of(stage: str) -> str:
    """Return the file with all results of a stage."""
    return f"{stage}.json" if stage in OWN else "facts.json"


def _cut(text: str, suffix: str) -> str:
    line, room = " ".join(text.split("\n")).rstrip(), _WIDTH - len(suffix)
    return (line if len(line) <= room else line[: room - 3] + "...") + suffix
