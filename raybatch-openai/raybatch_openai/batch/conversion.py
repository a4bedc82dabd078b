"""Converts a batch file to Parquet: a file of rows per form, and one of refused lines."""

import json
import posixpath
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from raybatch.durable.storage import store_of
from raybatch.errors import ConfigError, encodable
from raybatch.inputs.json_lines import nesting_depth
from raybatch.inputs.text_blocks import OVER_LINES
from raybatch_openai.batch.files import (
    MAX_LINE_BYTES,
    InputId,
    Line,
    input_id,
    parquet_writer,
    read_lines,
    temporary_table,
)
from raybatch_openai.batch.requests import BodyRules, Form, ParsedRequest, Refusal, read_request

# well below the recursion limit of Python's JSON parsers, however deep their caller is
MAX_DEPTH = 100
_KEYS = ("custom_id", "method", "url", "body")

RECORD = "batch.json"
ROWS_FILE = "part-000000.parquet"
_LAYOUT = 1
_GROUP_ROWS, _GROUP_BYTES = 2048, 16 << 20

_REFUSED = pa.schema([("line", pa.int64()), ("custom_id", pa.string()), ("refusal", pa.string())])
_COMMON = (
    ("id", pa.string()),
    ("line", pa.int64()),
    ("place", pa.int32()),
    ("num_prompts", pa.int32()),
    ("custom_id", pa.string()),
    ("reply", pa.string()),
    ("sampling", pa.string()),
)
_PROMPTS = {
    "messages": [("messages", pa.string()), ("template_options", pa.string())],
    "prompt": [("prompt", pa.string())],
    "tokens": [("tokens", pa.list_(pa.int32()))],
}


class FormRows(NamedTuple):
    """Number of rows of a form, and the most logprobs that one of them requests."""

    form: Form
    num_rows: int
    num_logprobs: int


class Conversion(NamedTuple):
    """Record of a batch file that was converted to rows for jobs."""

    input: InputId
    rules: str  # digest of the rules it was parsed with
    folder: str  # of the rows, relative to that of the batch
    created: int  # Unix seconds
    num_lines: int
    num_refused: int
    forms: tuple[FormRows, ...]  # of the accepted lines; none is empty

    def to_json(self) -> bytes:
        """Return the record as JSON."""
        return json.dumps({"layout": _LAYOUT, **self._asdict()}).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Self:
        """Parse what `to_json` returned; raise ConfigError for anything else."""
        try:
            values = json.loads(data)
            if values.pop("layout") == _LAYOUT:
                return TypeAdapter(cls).validate_python(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where} is not the record of a batch; choose another output"
            ) from error
        raise ConfigError(
            f"{where} was written by another version of raybatch; choose another output"
        )

    @property
    def refused_file(self) -> str:
        """Path of the file of refused lines, relative to the batch's folder."""
        return f"{self.folder}/refused.parquet"

    def rows_file(self, form: Form) -> str:
        """Return the path of the file with the rows of a form, relative to the batch's folder."""
        return f"{self.folder}/{form.name}/{ROWS_FILE}"


def read_conversion(folder: str) -> Conversion | None:
    """Return the record of a finished conversion in a batch's folder; None if there is none."""
    store = store_of(folder)
    if store.size(RECORD) is None:
        return None
    return Conversion.from_json(store.read(RECORD), where=posixpath.join(folder, RECORD))


def convert(source: str, folder: str, *, rules: BodyRules, digest: str) -> Conversion:
    """Convert the requests of a batch file to rows for jobs, unless an earlier run did.

    Memory is constant. Raises ConfigError if the file cannot be read, or the folder belongs to
    another batch.

    Args:
        source: batch file.
        folder: folder of the batch, for rows and outputs.
        rules: what requests may contain.
        digest: digest of `rules`; it must be the same when a batch is resumed.
    """
    source_id, conversion = input_id(source), read_conversion(folder)
    if conversion is None:
        name = f"requests-{uuid.uuid4().hex[:12]}"
        with ExitStack() as stack:
            rows = _Rows(stack, posixpath.join(folder, name))
            for line, custom_id, request in _requests(source, rules, SeenIds(stack)):
                rows.add(line, custom_id, request)
            about = rows.flush()
        conversion = Conversion(source_id, digest, name, int(time.time()), *about)
        store = store_of(folder)
        if not store.create(RECORD, conversion.to_json()):
            # another run has written its record first, and its rows are used
            conversion = Conversion.from_json(store.read(RECORD), where=RECORD)
    if conversion.input != source_id:
        raise ConfigError(
            f"{folder} belongs to another batch file than {source}, or the file has changed; "
            "choose another output, or set --overwrite to start over"
        )
    if conversion.rules != digest:
        raise ConfigError(
            f"{folder} was started with other model names, default options or chat template; "
            "restore them to resume, or set --overwrite to start over"
        )
    return conversion


def parse_line(line: Line) -> dict[str, Any]:
    """Return a line as a JSON object with a `custom_id`; raise Refusal for anything else."""
    where = f"line {line.number}"
    if line.data is None:
        raise _malformed(f"{where} is longer than {MAX_LINE_BYTES:,} bytes")
    brackets = line.data.count(b"[") + line.data.count(b"{")
    if brackets > MAX_DEPTH and nesting_depth(line.data) > MAX_DEPTH:
        raise _malformed(f"{where} is nested deeper than {MAX_DEPTH} levels")
    try:
        request = json.loads(line.data)
    except ValueError as error:
        reason = OVER_LINES if line.data == b"{" else str(error)
        raise _malformed(f"{where} is not valid JSON: {reason}") from None
    if isinstance(request, list):
        raise _malformed(f"{where} is a list; write one request per line, as `jq -c '.[]'` does")
    if not isinstance(request, dict):
        raise _malformed(f"{where} is not a JSON object with {', '.join(_KEYS)}")
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        is_missing = custom_id is None
        reason = "is missing" if is_missing else f"must be a non-empty string, got {custom_id!r}"
        raise _malformed(f"{where}: custom_id {reason}")
    if encodable(custom_id) != custom_id:
        raise _malformed(f"{where}: custom_id has an unpaired surrogate")
    return request


def _malformed(message: str) -> Refusal:
    return Refusal(message, code="invalid_json_line", status=None)


class SeenIds:
    """Finds repeated custom_ids: `add` the id of each line; `stack` closes its database."""

    def __init__(self, stack: ExitStack) -> None:
        columns = "id TEXT PRIMARY KEY, line INTEGER"
        self._table = stack.enter_context(temporary_table(columns))

    def add(self, custom_id: str, line: int) -> int | None:
        """Add the id of a line; return the number of an earlier line with it, None if it is new."""
        new = "INSERT OR IGNORE INTO rows VALUES (?, ?)"
        if self._table.execute(new, (custom_id, line)).rowcount:
            return None
        known = self._table.execute("SELECT line FROM rows WHERE id = ?", (custom_id,))
        first: int = known.fetchone()[0]
        return first


def _requests(
    source: str, rules: BodyRules, seen: SeenIds
) -> Iterator[tuple[int, str | None, ParsedRequest | Refusal]]:
    for line in read_lines(source):
        try:
            request = parse_line(line)
        except Refusal as refusal:
            yield line.number, None, refusal
            continue
        custom_id = request["custom_id"]
        earlier = seen.add(custom_id, line.number)
        yield line.number, custom_id, _checked(request, rules, line.number, earlier)


def _checked(
    request: Mapping[str, Any], rules: BodyRules, line: int, earlier: int | None
) -> ParsedRequest | Refusal:
    if earlier is not None:
        return Refusal(
            f"line {line}: custom_id {request['custom_id']!r} was already used in line {earlier}; "
            "give each request its own",
            code="duplicate_custom_id",
            status=None,
        )
    try:
        return read_request(request, rules)
    except Refusal as refusal:
        return Refusal(**{**refusal.record(), "message": f"line {line}: {refusal.message}"})


class _Rows:
    """Writes rows to one file per form, and refused lines to another file."""

    def __init__(self, stack: ExitStack, folder: str) -> None:
        self._stack = stack
        self._folder = folder
        self._files: dict[Form, _RowFile] = {}
        self._refused = self._open("refused.parquet", _REFUSED)
        self.num_lines = 0

    def _open(self, name: str, schema: pa.Schema) -> "_RowFile":
        path = posixpath.join(self._folder, name)
        return _RowFile(self._stack.enter_context(parquet_writer(path, schema)), schema)

    def add(self, line: int, custom_id: str | None, request: ParsedRequest | Refusal) -> None:
        self.num_lines += 1
        if isinstance(request, Refusal):
            record = json.dumps(request.record())
            row = {"line": line, "custom_id": custom_id, "refusal": record}
            self._refused.add(row, len(record))
            return
        form = request.form
        if form not in self._files:
            schema = pa.schema([*_COMMON, *_PROMPTS[form.kind]])
            self._files[form] = self._open(f"{form.name}/{ROWS_FILE}", schema)
        file = self._files[form]
        file.num_logprobs = max(file.num_logprobs, request.reply.num_logprobs or 0)
        for place, prompt in enumerate(request.prompts):
            row = {
                # the place comes first, so that no custom_id equals the id of another request's row
                "id": f"{place}:{custom_id}",
                "line": line,
                "place": place,
                "num_prompts": len(request.prompts),
                "custom_id": custom_id,
                "reply": json.dumps(request.reply),
                "sampling": json.dumps(request.sampling),
                form.kind: prompt,
            }
            if form.kind == "messages" and request.template_options:
                row["template_options"] = json.dumps(request.template_options)
            file.add(row, len(prompt) * (4 if form.kind == "tokens" else 1))

    def flush(self) -> tuple[int, int, tuple[FormRows, ...]]:
        """Write buffered rows; return (number of lines, number of refused lines, forms)."""
        for file in (self._refused, *self._files.values()):
            file.flush()
        forms = tuple(
            FormRows(form, file.num_rows, file.num_logprobs)
            for form, file in sorted(self._files.items())
        )
        return self.num_lines, self._refused.num_rows, forms


@dataclass(slots=True, eq=False)
class _RowFile:
    """Buffers the rows of a Parquet file and writes them a row group at a time."""

    writer: pq.ParquetWriter
    schema: pa.Schema
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_bytes: int = 0
    num_rows: int = 0
    num_logprobs: int = 0

    def add(self, row: dict[str, Any], num_bytes: int) -> None:
        self.rows.append(row)
        self.num_bytes += num_bytes
        self.num_rows += 1
        if len(self.rows) >= _GROUP_ROWS or self.num_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.rows:
            self.writer.write_table(pa.Table.from_pylist(self.rows, schema=self.schema))
        self.rows, self.num_bytes = [], 0
