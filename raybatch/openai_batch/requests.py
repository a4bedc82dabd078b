"""Lines of a batch file with their numbers, one at a time, and what they ask as plain records."""

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import fsspec
import fsspec.compression
import numpy as np
import pyarrow as pa

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError, encodable
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.json_lines import nesting_depth
from raybatch.inputs.text_blocks import OVER_LINES, not_lines
from raybatch.planning.repeated_ids import id_hashes
from raybatch.records.arrays import Uint64s
from raybatch.records.types import Task

MAX_LINE_BYTES = 64 << 20
# far from what JSON readers of Python bear, wherever in a job they are called
MAX_DEPTH = 100
_CHUNK_BYTES = 8 << 20
# endings of compressed files: the codec, and how they begin
CODECS = {".gz": ("gzip", b"\x1f\x8b"), ".bz2": ("bz2", b"BZh"), ".xz": ("xz", b"\xfd7zXZ\0")}
_KEYS = ("custom_id", "method", "url", "body")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

# by the task of the stage that answers; the others are none of OpenAI's
_ENDPOINTS: Mapping[Task, tuple[str, ...]] = {
    "generate": (CHAT, COMPLETIONS),
    "embed": (EMBEDDINGS,),
}

Kind = Literal["messages", "prompt", "tokens"]


class Form(NamedTuple):
    """What all rows of one job have in common, because a stage has one value for it."""

    kind: Kind  # also the name of the column of prompts
    num_samples: int
    has_logprobs: bool

    @property
    def name(self) -> str:
        """Return the name of its folders."""
        return f"{self.kind}-n{self.num_samples}{'-logprobs' if self.has_logprobs else ''}"


class Reply(NamedTuple):
    """What the answer to a request must say, beside what the rows say."""

    endpoint: str
    model: str
    num_logprobs: int | None = None  # most likely tokens to return per position
    encoding: str = "float"  # of embeddings, or "base64"


class ParsedRequest(NamedTuple):
    """A request that can be asked."""

    form: Form
    prompts: Sequence[Any]  # in the form's kind: JSON texts of messages, texts, or token ids
    sampling: Mapping[str, Any]  # that differ from the defaults; of embeddings those of pooling
    reply: Reply
    template_options: Mapping[str, Any] = MappingProxyType({})


def endpoints_of(task: Task) -> tuple[str, ...]:
    """Return the endpoints whose requests a stage with this task can answer."""
    return _ENDPOINTS.get(task, ())


class Refusal(Exception):  # noqa: N818 - it ends one line, and becomes a line of the error file
    """A line that is no request, or a request that cannot be answered.

    The code is a word for programs, as OpenAI uses them where it has one, and `param` the key of
    the body that is wrong. The status of HTTP is None where there is no request to answer at all.
    """

    def __init__(
        self, message: str, *, code: str, param: str | None = None, status: int | None = 400
    ) -> None:
        super().__init__(encodable(message))
        self.message = encodable(message)
        self.code = code
        self.param = param if param is None else encodable(param)
        self.status = status

    def record(self) -> dict[str, Any]:
        """Return it as plain data, which `Refusal(**record)` takes."""
        return dict(vars(self))


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of an HTTP answer that refuses a request."""
    kind = "server_error" if (refusal.status or 0) >= 500 else "invalid_request_error"
    about = {"param": refusal.param, "code": refusal.code}
    return {"error": {"message": refusal.message, "type": kind, **about}}


def unexecuted(code: str) -> Refusal:
    """Return why a request was left out of a batch that has ended early."""
    ended = {
        "batch_expired": "the completion window ended",
        "batch_cancelled": "the batch was cancelled",
    }
    return Refusal(f"This request was not executed before {ended[code]}.", code=code, status=None)


class Line(NamedTuple):
    """A line that is not blank, without its end."""

    number: int  # from 1, blank lines counted
    data: bytes | None  # None where it is longer than a line may be


class InputId(NamedTuple):
    """What tells one input from another."""

    num_bytes: int
    digest: str


def input_id(path: str) -> InputId:
    """Return the size and the digest of a file; raise ConfigError where it cannot be read."""
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    with error_context(f"{safe_text(path)} cannot be read"), fsspec.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return InputId(num_bytes, digest.hexdigest())


def read_lines(path: str, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the lines of a file, which may be compressed; memory is one line.

    Raises:
        ConfigError: it cannot be read, or is no file of lines in UTF-8 as it begins.
    """
    with (
        error_context(f"{safe_text(path)} cannot be read"),
        fsspec.open(path, "rb") as raw,
        _decompressed(raw) as file,
    ):
        is_begun = False
        for number, data in enumerate(iter(lambda: file.readline(max_bytes + 1), b""), 1):
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if not is_begun and (is_begun := bool(data.strip())):
                _check_first(data, path)
            if len(data) > max_bytes and not data.endswith(b"\n"):
                while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield Line(number, None)
                continue
            if stripped := data.strip():
                yield Line(number, stripped)


def _decompressed(file: Any) -> Any:  # noqa: ANN401 - those of fsspec
    """Return what a file holds, as its first bytes say; one that is uploaded has another name."""
    head = file.read(6)
    file.seek(0)
    for codec, magic in CODECS.values():
        if head.startswith(magic):
            return fsspec.compression.compr[codec](file, mode="rb")
    if head.startswith((b"\x28\xb5\x2f\xfd", b"PK\3\4")):
        raise ConfigError(f"it is compressed; take {', '.join(CODECS)} or none")
    return nullcontext(file)


def _check_first(data: bytes, path: str) -> None:
    """Raise ConfigError where the first line shows that the whole file is something else."""
    reason = not_lines(data)
    # a list in one line may be a wrong request among others
    if reason is not None and not (data.lstrip().startswith(b"[") and data.rstrip().endswith(b"]")):
        raise ConfigError(f"{safe_text(path)} is no batch file: {reason}")


def parse_line(line: Line) -> dict[str, Any]:
    """Return the object of a line, which has a `custom_id`; raise Refusal for anything else."""
    where = f"line {line.number}"
    if line.data is None:
        raise _malformed(f"{where} is longer than {MAX_LINE_BYTES:,} bytes")
    brackets = line.data.count(b"[") + line.data.count(b"{")
    if brackets > MAX_DEPTH and nesting_depth(line.data) > MAX_DEPTH:
        raise _malformed(f"{where} is nested deeper than {MAX_DEPTH} levels")
    try:
        request = json.loads(line.data)
    except ValueError as error:
        told = OVER_LINES if line.data == b"{" else str(error)
        raise _malformed(f"{where} is not valid JSON: {told}") from None
    if isinstance(request, list):
        raise _malformed(f"{where} is a list, and each request is a line; `jq -c '.[]'` makes them")
    if not isinstance(request, dict):
        raise _malformed(f"{where} is not a JSON object with {', '.join(_KEYS)}")
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        told = "is missing" if custom_id is None else f"must be a non-empty text, got {custom_id!r}"
        raise _malformed(f"{where}: custom_id {told}")
    if not is_encodable(custom_id):
        raise _malformed(f"{where}: custom_id holds half of a surrogate pair")
    return request


def _malformed(message: str) -> Refusal:
    return Refusal(message, code="invalid_json_line", status=None)


def is_encodable(text: str) -> bool:
    """Return whether a text is one, and holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def hashes_of(ids: Sequence[str]) -> Uint64s:
    """Return the two hashes of each id, uint64 [R, 2]."""
    return id_hashes(pa.chunked_array([pa.array(ids, pa.string())]))


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
        rows = np.column_stack([hashes_of(ids), np.asarray(lines, np.uint64)])
        first = np.zeros(len(rows), np.uint64)
        for run in self._runs:
            first = np.maximum(first, _lines_in(run, rows))
        earlier: list[int | None] = [int(line) or None for line in first]
        own: dict[str, int] = {}
        for i, (custom_id, line) in enumerate(zip(ids, lines, strict=True)):
            if (known := own.setdefault(custom_id, line)) != line:
                earlier[i] = earlier[i] or known
        new = rows[[line is None for line in earlier]]
        if len(new):
            new = new[np.lexsort((new[:, 1], new[:, 0]))]
            while self._runs and len(self._runs[-1]) <= len(new):
                both = np.concatenate([self._runs.pop(), new])
                new = both[np.lexsort((both[:, 1], both[:, 0]))]
            self._runs.append(new)
        return earlier


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
