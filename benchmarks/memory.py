"""Reads the memory of engines from outside: their private memory and the memory that they share.

Rss counts a page in every process that maps it, Pss splits it among them. If engines map the same
weights, a second engine adds only its private memory to the total Pss, and the total Pss of the
weights stays the size of one file.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import meters

# folder and suffix of prepared weights, see raybatch/engine/weights/loading.py
WEIGHTS = re.compile(r"/weights/[^/]+\.safetensors$")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(?P<path>.*)$")
_SIZE = re.compile(r"^(?P<name>Rss|Pss): +(?P<kb>\d+) kB$")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes of one engine's process, and of the weights among them.

    Args:
        rss: pages that the process maps and that are in memory.
        pss: the same, with shared pages divided by the number of processes that map them.
        weights_rss: rss of the mapped weights alone.
        weights_pss: pss of the mapped weights alone.
        weights_file: size of the file that is mapped.
    """

    rss: int
    pss: int
    weights_rss: int
    weights_pss: int
    weights_file: int


def engines_of(pid: int) -> list[EngineMemory]:
    """Return the engines among a process and its descendants: those that map prepared weights."""
    found = []
    for process in meters.tree(pid):
        try:
            lines = Path(f"/proc/{process.pid}/smaps").read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended after it was listed
        memory = parse(lines)
        if memory is not None:
            found.append(memory)
    return found


def parse(lines: Iterable[str]) -> EngineMemory | None:
    """Sum up the lines of /proc/PID/smaps; None for a process that maps no prepared weights."""
    total, weights = {"Rss": 0, "Pss": 0}, {"Rss": 0, "Pss": 0}
    file, is_weights = None, False
    for line in lines:
        if size := _SIZE.match(line):
            num_bytes = 1024 * int(size["kb"])
            total[size["name"]] += num_bytes
            weights[size["name"]] += num_bytes if is_weights else 0
        elif mapping := _MAPPING.match(line):
            is_weights = WEIGHTS.search(mapping["path"]) is not None
            file = Path(mapping["path"]) if is_weights else file
    if file is None:
        return None
    return EngineMemory(
        rss=total["Rss"],
        pss=total["Pss"],
        weights_rss=weights["Rss"],
        weights_pss=weights["Pss"],
        weights_file=file.stat().st_size,
    )
