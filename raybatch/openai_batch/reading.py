"""Lines of a batch file with their numbers, one at a time."""

import codecs
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.durable.storage import error_context
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.json_lines import nesting_depth
from raybatch.openai_batch.requests import Refusal
from raybatch.planning.repeated_ids import id_hashes

MAX_LINE_BYTES = 64 << 20
# far from what JSON readers of Python bear, wherever in a job they are called
MAX_DEPTH = 100
_CHUNK_BYTES = 8 << 20
_KEYS = ("custom_id", "method", "url", "body")
Uint64s = npt.NDArray[np.uint64]


class Line(NamedTuple):
    """A line that is not blank.

    Args:
        number: from 1, blank lines counted.
        data: without the end of the line; None where it is longer than a line may be.
    """

    number: int
    data: bytes | None


class InputId(NamedTuple):
    """What tells one input from another."""

    num_bytes: int
    digest: str


def input_id(path: str) -> InputId:
    """Return the size and the digest of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    with error_context(f"{safe_text(path)} cannot be read"), fsspec.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return InputId(num_bytes, digest.hexdigest())


def read_lines(path: str, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the lines of a file, which may be compressed as its name says.

    Memory: one line.

    Raises:
        ConfigError: the file cannot be read.
    """
    with (
        error_context(f"{safe_text(path)} cannot be read"),
        fsspec.open(path, "rb", compression="infer") as file,
    ):
        number = 0
        while data := file.readline(max_bytes + 1):
            number += 1
            if len(data) > max_bytes and not data.endswith(b"\n"):
                _skip_line(file)
                yield Line(number, None)
                continue
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if stripped := data.strip():
                yield Line(number, stripped)


def parse_line(line: Line) -> dict[str, Any]:
    """Return the object of a line, which has the keys of a request and a `custom_id`.

    Raises:
        Refusal: it is no such object.
    """
    where = f"line {line.number}"
    if line.data is None:
        raise _malformed(f"{where} is longer than {MAX_LINE_BYTES:,} bytes")
    brackets = line.data.count(b"[") + line.data.count(b"{")
    if brackets > MAX_DEPTH and nesting_depth(line.data) > MAX_DEPTH:
        raise _malformed(f"{where} is nested deeper than {MAX_DEPTH} levels")
    try:
        request = json.loads(line.data)
    except ValueError as error:
        raise _malformed(f"{where} is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise _malformed(f"{where} is no JSON object; a request is one with {', '.join(_KEYS)}")
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _malformed(f"{where}: custom_id must be a text that is not empty, got {custom_id!r}")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise _malformed(f"{where}: custom_id holds half of a surrogate pair") from None
    return request


def _malformed(message: str) -> Refusal:
    return Refusal(message, code="invalid_json_line", status=None)


def _skip_line(file: IO[bytes]) -> None:
    while (data := file.readline(_CHUNK_BYTES)) and not data.endswith(b"\n"):
        pass


class SeenIds:
    """Takes ids in the order of their lines, some at a time.

    Sorted runs of hashes are merged with those that are no longer than they are, so that there are
    few of them and each id is moved a few times alone.
    """

    def __init__(self) -> None:
        self._runs: list[Uint64s] = []

    def add(self, ids: Sequence[str], lines: Sequence[int]) -> list[int | None]:
        """Take ids; return per id the line that had it first, None where this one has.

        Complexity: O(log R) per id and run, R being the ids so far.
        """
        if not ids:
            return []
        hashes = id_hashes(pa.chunked_array([pa.array(ids, pa.string())]))
        rows = np.column_stack([hashes, np.asarray(lines, np.uint64)])
        first = np.zeros(len(rows), np.uint64)
        for run in self._runs:
            first = np.maximum(first, _lines_in(run, rows))
        order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))
        rows_sorted = rows[order]
        is_same = np.zeros(len(rows), np.bool_)
        is_same[1:] = (rows_sorted[1:, :2] == rows_sorted[:-1, :2]).all(axis=1)
        starts = np.maximum.accumulate(np.where(is_same, 0, np.arange(len(rows))))
        own_first = np.zeros(len(rows), np.uint64)
        own_first[order] = np.where(is_same, rows_sorted[starts, 2], 0)
        first = np.where(first > 0, first, own_first)
        new = rows_sorted[~is_same & (first[order] == 0)]
        if len(new):
            self._keep(new)
        return [int(line) or None for line in first]

    def _keep(self, run: Uint64s) -> None:
        while self._runs and len(self._runs[-1]) <= len(run):
            both = np.concatenate([self._runs.pop(), run])
            run = both[np.lexsort((both[:, 1], both[:, 0]))]
        self._runs.append(run)


def _lines_in(run: Uint64s, rows: Uint64s) -> Uint64s:
    """Return the line of each row whose hashes are in a sorted run, 0 for the others.

    Hashes that agree in their first half alone are looked through one by one; there are next to
    none.
    """
    begin = np.searchsorted(run[:, 0], rows[:, 0], side="left")
    end = np.searchsorted(run[:, 0], rows[:, 0], side="right")
    lines = np.zeros(len(rows), np.uint64)
    for row in np.flatnonzero(end > begin).tolist():
        for place in range(int(begin[row]), int(end[row])):
            if run[place, 1] == rows[row, 1]:
                lines[row] = run[place, 2]
    return lines
