"""What must hold of an output at every moment, decided from its bytes and not by the protocol."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import pyarrow as pa
import pyarrow.parquet as pq


class Oracle:
    """Watches every change of the files below a sink.

    Args:
        rows: ids of all rows of the input.
        later: ids of rows that come to it at some time.
        is_exclusive: the store never replaces a file, so parts must keep their bytes.
    """

    def __init__(
        self, rows: Iterable[str], *, later: Iterable[str] = (), is_exclusive: bool
    ) -> None:
        self.violations: list[str] = []
        self.num_commits = 0
        self.num_late = 0
        self.num_joined = 0
        self.is_foreign = False
        self._first = Counter(rows)
        self._later = Counter(later)
        self._is_exclusive = is_exclusive
        self._written: Counter[str] = Counter()

    @property
    def may_grow(self) -> bool:
        """Return whether rows come to the input at some time."""
        return bool(self._later)

    def changed(self, name: str, old: bytes | None, new: bytes | None) -> None:
        """Take note of a file that is written (`new`) or removed (None)."""
        if name.startswith("data/"):
            self._part_changed(name, old, new)
        if name.startswith("_units/data/") and new is None and old is not None:
            self.num_joined += 1
            if any(not self._written[row] for row in rows_in(old)):
                self._say(f"{name} was removed, and its rows are not in the output")
        if name == "_SUCCESS" and new is not None:
            self._check_success(new)

    def found_written(self, name: str) -> None:
        """Take note of a create that left a file as it was."""
        self.num_late += name.startswith("data/")

    def plant(self, data: bytes) -> None:
        """Take note of a part of another job that somebody has put among the parts."""
        self.is_foreign = True
        self._written.update(rows_in(data))

    def finished(self, failure: Exception | None, files: Mapping[str, bytes]) -> None:
        """Check what a run without faults has left."""
        if self.is_foreign:
            if failure is None:
                self._say("a run over a foreign part succeeded")
            return
        if failure is not None:
            self._say(f"a run without faults failed: {failure!r}")
        elif "_SUCCESS" not in files:
            self._say("a run without faults ended and there is no _SUCCESS")
        elif (num_rows := _rows_of(files["_SUCCESS"])) != self._wanted.total():
            self._say(f"_SUCCESS speaks of {num_rows} rows of {self._wanted.total()}")
        self._check_complete("a run without faults ended", self._wanted)

    @property
    def _wanted(self) -> Counter[str]:
        return self._first + self._later

    def _check_success(self, content: bytes) -> None:
        """Check that the rows are there of which it speaks: those before or after the growth."""
        speaks_of_all = _rows_of(content) > self._first.total()
        self._check_complete("_SUCCESS is there", self._wanted if speaks_of_all else self._first)

    def _part_changed(self, name: str, old: bytes | None, new: bytes | None) -> None:
        if old is not None:
            if new is None:
                self._say(f"{name} was removed")
            elif new != old and self._is_exclusive:
                self._say(f"the bytes of {name} changed")
            self._written.subtract(rows_in(old))
        if new is None:
            return
        self.num_commits += 1
        self._written.update(rows_in(new))
        if "/half=" in name:
            halves = {"odd" if int(row[1:]) % 2 else "even" for row in rows_in(new)}
            if halves != {name.partition("/half=")[2].partition("/")[0]}:
                self._say(f"{name} has rows of another folder")
        for row in rows_in(new):
            if self._written[row] > 1 and not self.is_foreign:
                self._say(f"row {row} is in the output {self._written[row]} times")
                return

    def _check_complete(self, when: str, wanted: Counter[str]) -> None:
        lost = wanted - self._written
        extra = self._written - self._wanted
        if lost or extra:
            self._say(f"{when}, lost rows {sorted(lost)}, too often {sorted(extra)}")

    def _say(self, violation: str) -> None:
        self.violations.append(violation)


@lru_cache(maxsize=65536)
def rows_in(part: bytes) -> tuple[str, ...]:
    """Return the ids in a part, read like any Parquet file."""
    return tuple(pq.read_table(pa.BufferReader(part), columns=["id"]).column("id").to_pylist())


def _rows_of(success: bytes) -> int:
    """Return of how many rows a `_SUCCESS` speaks."""
    return int(json.loads(success)["rows"])
