"""Lines of a batch file with their numbers, one at a time."""

import codecs
import hashlib
import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import fsspec

from raybatch.durable.storage import told_as
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.json_lines import nesting_depth
from raybatch.openai_batch.refusal import Refusal

MAX_LINE_BYTES = 64 << 20
# far from what JSON readers of Python bear, wherever in a job they are called
MAX_DEPTH = 100
_CHUNK_BYTES = 8 << 20
_KEYS = ("custom_id", "method", "url", "body")


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
    with told_as(f"{safe_text(path)} cannot be read"), fsspec.open(path, "rb") as file:
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
        told_as(f"{safe_text(path)} cannot be read"),
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
        found = json.loads(line.data)
    except ValueError as error:
        raise _malformed(f"{where} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise _malformed(f"{where} is no JSON object; a request is one with {', '.join(_KEYS)}")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _malformed(f"{where}: custom_id must be a text that is not empty, got {custom_id!r}")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise _malformed(f"{where}: custom_id holds half of a surrogate pair") from None
    return found


def _malformed(message: str) -> Refusal:
    return Refusal(message, code="invalid_json_line", status=None)


def _skip_line(file: IO[bytes]) -> None:
    while (data := file.readline(_CHUNK_BYTES)) and not data.endswith(b"\n"):
        pass
