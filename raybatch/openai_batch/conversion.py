"""From a batch file to Parquet: the rows of each form, and the lines that are refused."""

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
from raybatch.openai_batch.files import (
    MAX_LINE_BYTES,
    InputId,
    Line,
    input_id,
    parquet_writer,
    read_lines,
    temporary_table,
)
from raybatch.openai_batch.requests import BodyRules, Form, ParsedRequest, Refusal, read_request

# far from what JSON readers of Python bear, wherever in a job they are called
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
    """The rows of one form, and the most log probabilities that one of them asks for."""

    form: Form
    num_rows: int
    num_logprobs: int


class Conversion(NamedTuple):
    """A batch file that has been converted."""

    input: InputId
    rules: str  # digest of the rules by which it was read
    folder: str  # with the rows, below that of the batch
    created: int  # seconds since 1970
    num_lines: int
    num_refused: int
    forms: tuple[FormRows, ...]  # of the lines that are not refused, at least one row each

    def to_json(self) -> bytes:
        """Return it as the bytes of a record."""
        return json.dumps({"layout": _LAYOUT, **self._asdict()}).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Self:
        """Return what `to_json` has written; raise ConfigError for anything else."""
        try:
            values = json.loads(data)
            if values.pop("layout") == _LAYOUT:
                return TypeAdapter(cls).validate_python(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where} is no record of a batch; choose other files") from error
        raise ConfigError(f"{where} is of another version of raybatch; choose other files")

    @property
    def refused_file(self) -> str:
        """Return the file with the lines that are refused, below the batch's folder."""
        return f"{self.folder}/refused.parquet"

    def rows_file(self, form: Form) -> str:
        """Return the file with the rows of a form, below the batch's folder."""
        return f"{self.folder}/{form.name}/{ROWS_FILE}"


def read_conversion(folder: str) -> Conversion | None:
    """Return what has been converted in the folder of a batch; None where nothing has, wholly."""
    store = store_of(folder)
    if store.size(RECORD) is None:
        return None
    return Conversion.from_json(store.read(RECORD), where=posixpath.join(folder, RECORD))


def convert(source: str, folder: str, *, rules: BodyRules, digest: str) -> Conversion:
    """Write the requests of a batch file as rows, unless that has been done.

    Memory is flat. Raises ConfigError for a file that cannot be read, or the folder of another
    batch.
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
            # another run was there first, and its rows are those that count
            conversion = Conversion.from_json(store.read(RECORD), where=RECORD)
    if conversion.input != source_id:
        raise ConfigError(
            f"{folder} belongs to another batch file than {source}, or the file has changed; "
            "choose another output, or set --overwrite to begin again"
        )
    if conversion.rules != digest:
        raise ConfigError(
            f"{folder} was begun with other names of the model, other default options or another "
            "chat template; restore them to go on, or set --overwrite to begin again"
        )
    return conversion


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
    if encodable(custom_id) != custom_id:
        raise _malformed(f"{where}: custom_id holds half of a surrogate pair")
    return request


def _malformed(message: str) -> Refusal:
    return Refusal(message, code="invalid_json_line", status=None)


class SeenIds:
    """Takes the custom_id of one line after another, to find those that are repeated."""

    def __init__(self, stack: ExitStack) -> None:
        columns = "id TEXT PRIMARY KEY, line INTEGER"
        self._table = stack.enter_context(temporary_table(columns))

    def add(self, custom_id: str, line: int) -> int | None:
        """Take an id; return the line that had it first, None where this one has."""
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
            "each request needs its own",
            code="duplicate_custom_id",
            status=None,
        )
    try:
        return read_request(request, rules)
    except Refusal as refusal:
        return Refusal(**{**refusal.record(), "message": f"line {line}: {refusal.message}"})


class _Rows:
    """Writes the rows of each form to a file of its own, and what is refused to another."""

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
                # the count goes first, so that no custom_id looks like the id of another's row
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
        """Write what is left; return the numbers of lines and of refused ones, and the forms."""
        for file in (self._refused, *self._files.values()):
            file.flush()
        forms = tuple(
            FormRows(form, file.num_rows, file.num_logprobs)
            for form, file in sorted(self._files.items())
        )
        return self.num_lines, self._refused.num_rows, forms


@dataclass(slots=True, eq=False)
class _RowFile:
    """Rows on their way to one Parquet file, a row group at a time."""

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
