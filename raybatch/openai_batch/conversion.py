"""From a batch file to Parquet: the rows of each form, and the lines that are refused."""

import json
import posixpath
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.storage import store_of
from raybatch.errors import ConfigError
from raybatch.openai_batch.bodies import BodyRules, read_request
from raybatch.openai_batch.files import parquet_writer
from raybatch.openai_batch.requests import (
    Form,
    InputId,
    Line,
    ParsedRequest,
    Refusal,
    SeenIds,
    input_id,
    parse_line,
    read_lines,
)

RECORD = "batch.json"
ROWS_FILE = "part-000000.parquet"
_LAYOUT = 1
_LINES_AT_ONCE = 512
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
                forms = tuple(FormRows(Form(*form), *rest) for form, *rest in values.pop("forms"))
                return cls(**{**values, "input": InputId(*values["input"]), "forms": forms})
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

    Memory is some hundred lines, and 24 bytes for each line before. Raises ConfigError for a file
    that cannot be read, or the folder of another batch.
    """
    source_id, conversion = input_id(source), read_conversion(folder)
    if conversion is None:
        name = f"requests-{uuid.uuid4().hex[:12]}"
        with ExitStack() as stack:
            rows = _Rows(stack, posixpath.join(folder, name))
            for line, custom_id, request in _requests(source, rules):
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


def _requests(
    source: str, rules: BodyRules
) -> Iterator[tuple[int, str | None, ParsedRequest | Refusal]]:
    seen, waiting = SeenIds(), read_lines(source)
    while lines := list(islice(waiting, _LINES_AT_ONCE)):
        parsed = [_parsed(line) for line in lines]
        good = [i for i, request in enumerate(parsed) if not isinstance(request, Refusal)]
        ids = [parsed[i]["custom_id"] for i in good]
        earlier = dict(zip(good, seen.add(ids, [lines[i].number for i in good]), strict=True))
        for i, (line, request) in enumerate(zip(lines, parsed, strict=True)):
            if isinstance(request, Refusal):
                yield line.number, None, request
            else:
                checked = _checked(request, rules, line.number, earlier[i])
                yield line.number, request["custom_id"], checked


def _parsed(line: Line) -> Any:  # noqa: ANN401 - an object of JSON, or a Refusal
    try:
        return parse_line(line)
    except Refusal as refusal:
        return refusal


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
