"""Removes temporary files of runs from an output."""

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np

from raybatch.durable.audit import is_finished
from raybatch.durable.commit import listed_units
from raybatch.durable.journal import leftovers
from raybatch.durable.layout import BELOW
from raybatch.durable.run_log import live_runs
from raybatch.durable.sink import is_marked, unused_source_files
from raybatch.durable.storage import Store, error_context, open_store, store_of
from raybatch.errors import ConfigError
from raybatch.pictures.wording import printable
from raybatch.planning.store import read_all_units, read_plans

WEEK_S = 7 * 24 * 3600.0
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_NUM_NAMES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """The files that `clean` has removed from an output.

    `num_young` further files were kept, as they are not old enough or `live_runs` may need them.
    """

    sink: str
    names: tuple[str, ...]
    num_bytes: int
    num_young: int
    is_dry_run: bool
    live_runs: tuple[str, ...] = ()

    def __str__(self) -> str:
        did = "would remove" if self.is_dry_run else "removed"
        lines = [f"{did} {len(self.names)} files ({self.num_bytes} bytes) from {self.sink}"]
        lines += [f"  {name}" for name in self.names[:_NUM_NAMES]]
        if len(self.names) > _NUM_NAMES:
            lines.append(f"  and {len(self.names) - _NUM_NAMES} more")
        if self.num_young:
            why = "are younger than --older-than"
            if self.live_runs:
                why = f"may be needed: {self.live_runs[0]}"
            lines.append(f"kept {self.num_young} files that {why}")
        return "\n".join(printable(line) for line in lines)


def clean(sink: str | Path, *, older_than_s: float = WEEK_S, is_dry_run: bool = False) -> Cleaned:
    """Remove staged files, probes, journals and plans that are no longer needed; never data.

    Removed at any age: journals of units that are in the output; for a complete output also other
    journals and staged files. Other files are removed once they are old and no run is active that
    may need them.

    Args:
        older_than_s: age from which files count as abandoned.
        is_dry_run: only list the files.

    Raises:
        ConfigError: no job has written to the folder, or it cannot be read or written.
    """
    sink = str(sink)
    store = open_store(sink)
    with error_context(f"output {sink!r} cannot be cleaned"):
        if not is_marked(store):
            raise ConfigError(f"{sink} is not the output of a raybatch job; nothing is removed")
        outputs = {"": store}
        for folder in BELOW:
            below = store_of(f"{sink.rstrip('/')}/{folder}")
            if is_marked(below):
                outputs[f"{folder}/"] = below
        runs = [run for one in outputs.values() for run in live_runs(one, time.time())]
        live = tuple(map(str, runs))
        chosen, num_young = list[str](), 0
        for prefix, one in outputs.items():
            names, num_kept = _chosen(sink + f"/{prefix}", one, math.inf if live else older_than_s)
            chosen += [prefix + name for name in names]
            num_young += num_kept
        num_bytes = sum(store.size(name) or 0 for name in chosen)
        for name in [] if is_dry_run else chosen:
            store.remove(name)
    return Cleaned(
        sink=sink,
        names=tuple(chosen),
        num_bytes=num_bytes,
        num_young=num_young,
        is_dry_run=is_dry_run,
        live_runs=live,
    )


def parse_age(age: str) -> float:
    """Return the seconds of an age such as "30m", "12h" or "7d"; ConfigError: it is malformed.

    Example:
        >>> parse_age("2h")
        7200.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", age.strip())
    if match is None:
        raise ConfigError(f"--older-than {age!r} must be a number with s, m, h or d, such as 12h")
    return float(match[1]) * _SECONDS[match[2]]


def _chosen(sink: str, store: Store, older_than_s: float) -> tuple[list[str], int]:
    plans, is_done, is_complete = read_plans(sink), np.zeros(0, bool), False
    if plans:
        units = read_all_units(sink, plans)
        is_done, _ = listed_units(store, units)
        is_complete = is_finished(store, units)
    files = list(
        leftovers(
            store,
            plans=frozenset(stored.hash for stored in plans),
            is_committed=lambda unit: unit < len(is_done) and bool(is_done[unit]),
            is_finished=is_complete,
        )
    )
    files += [(name, True) for name in unused_source_files(store)]
    chosen = [n for n, is_needed in files if not is_needed or _age_s(sink, n) >= older_than_s]
    return chosen, len(files) - len(chosen)


def _age_s(sink: str, name: str) -> float:
    """Return the age of a file in seconds; 0 if its store has no times."""
    fs, root = fsspec.core.url_to_fs(sink)
    try:
        return time.time() - float(fs.modified(f"{root.rstrip('/')}/{name}").timestamp())
    except (NotImplementedError, FileNotFoundError):
        return 0.0
