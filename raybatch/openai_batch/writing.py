"""Writes the output file and the error file of a batch from the outputs of its jobs."""

import heapq
import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.layout import PLAN, PLAN_ORDER, SUCCESS, part_name
from raybatch.durable.sink import output_files
from raybatch.durable.storage import store_of
from raybatch.openai_batch.answering import ANSWER_COLUMNS, AnswerWriter, Written
from raybatch.openai_batch.conversion import Conversion, FormRows
from raybatch.openai_batch.files import parquet_rows, parquet_schema, published
from raybatch.openai_batch.requests import Form, Refusal
from raybatch.planning.fingerprint import output_columns
from raybatch.planning.store import read_plans
from raybatch.records.types import TokenCounts
from raybatch.rows.schema import ERROR_COLUMN
from raybatch.stages.unit_writer import UnitWriter

_KEY = ("line", "place")
_REQUEST_COLUMNS = [*_KEY, "num_prompts", "custom_id"]
_PLACE = itemgetter(*_KEY)
_ROWS_AT_ONCE = 8192


class BatchFiles(NamedTuple):
    """Where a batch lies; a later run goes on with the rows and outputs of jobs in `folder`."""

    source: str
    output: str
    errors: str
    folder: str

    def answers(self, form: Form) -> str:
        """Return the folder for the output of the job that answers the rows of one form."""
        return posixpath.join(self.folder, "answers", form.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts(TokenCounts):
    """What has become of the requests of a batch; `stopped` is why jobs have ended early."""

    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    stopped: str = ""

    def exit_code(self) -> int:
        """Return 0 where every request has an answer, 2 where some have errors, 1 where not all."""
        if self.num_completed + self.num_failed < self.num_requests:
            return 1
        return 2 if self.num_failed else 0

    def to_text(self) -> str:
        """Return it as a line for people."""
        if self.stopped:
            return f"{self.num_requests} requests, not all of them done: {self.stopped}"
        return (
            f"{self.num_requests} requests: {self.num_completed} answered, {self.num_failed} "
            f"failed; {self.prompt_tokens} prompt tokens, "
            f"{self.cached_tokens} of them cached, {self.generated_tokens} generated"
        )


def write_answers(
    files: BatchFiles,
    conversion: Conversion,
    writer: AnswerWriter,
    *,
    missing: Refusal | None = None,
) -> BatchCounts:
    """Write both files, each line in the order of the requests; memory is flat.

    `missing` is the error of requests whose rows are not all there; None where they are.
    """
    completed = failed = 0
    usage = [0, 0, 0]
    with published(files.output) as output, published(files.errors) as errors:
        for written in _lines(files, conversion, writer, missing):
            (errors if written.is_error else output).write(written.data)
            completed += not written.is_error
            failed += written.is_error
            usage = [total + more for total, more in zip(usage, written.usage, strict=True)]
    return BatchCounts(
        num_requests=conversion.num_lines,
        num_completed=completed,
        num_failed=failed,
        prompt_tokens=usage[0],
        cached_tokens=usage[1],
        generated_tokens=usage[2],
    )


def _lines(
    files: BatchFiles, conversion: Conversion, writer: AnswerWriter, missing: Refusal | None
) -> Iterator[Written]:
    path = posixpath.join(files.folder, conversion.refused_file)
    refused = parquet_rows(path, ["line", "custom_id", "refusal"])
    answers = [
        _rows(files, conversion, rows, is_whole=missing is None) for rows in conversion.forms
    ]
    key = itemgetter("line")
    for line, group in groupby(heapq.merge(refused, *answers, key=key), key=key):
        rows = list(group)
        if "refusal" in rows[0]:
            refusal = Refusal(**json.loads(rows[0]["refusal"]))
            yield writer.refused(line, rows[0]["custom_id"], refusal)
        elif missing is not None and any(ERROR_COLUMN not in row for row in rows):
            yield writer.refused(line, rows[0]["custom_id"], missing)
        else:
            yield writer.answered(rows)


def _rows(
    files: BatchFiles, conversion: Conversion, rows: FormRows, *, is_whole: bool
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of one form, those without an answer as they are in the request."""
    sink = files.answers(rows.form)
    if is_whole:
        yield from _finished_rows(sink)
        return
    path = posixpath.join(files.folder, conversion.rows_file(rows.form))
    is_done = store_of(sink).size(SUCCESS) is not None
    done = _finished_rows(sink) if is_done else _rows_so_far(sink, parquet_schema(path))
    answer = next(done, None)
    for row in parquet_rows(path, _REQUEST_COLUMNS):
        if answer is not None and _PLACE(answer) == _PLACE(row):
            yield answer
            answer = next(done, None)
        else:
            yield row


def _finished_rows(sink: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an output that is complete and in the order of the input."""
    for path in output_files(sink):
        yield from parquet_rows(path, ANSWER_COLUMNS)


def _rows_so_far(sink: str, requests: pa.Schema) -> Iterator[dict[str, Any]]:
    """Yield the finished rows of a job with `output_order="input"` that is not complete, in order.

    Memory: one unit and some thousand rows, and 24 bytes for every finished row.
    """
    folder = posixpath.join(sink, PLAN_ORDER)
    if store_of(folder).size(PLAN) is None:
        return
    units = _Units(folder, requests)
    keys = [units.keys(unit) for unit in range(units.num_units)]
    unit = np.repeat(np.arange(len(keys)), [len(key) for key in keys])
    row = np.concatenate([np.arange(len(key)) for key in keys])
    line_and_place = np.concatenate(keys)
    order = np.lexsort((line_and_place[:, 1], line_and_place[:, 0]))
    for first in range(0, len(order), _ROWS_AT_ONCE):
        chosen = order[first : first + _ROWS_AT_ONCE]
        tables = [
            units.rows(int(number), ANSWER_COLUMNS).take(row[chosen[unit[chosen] == number]])
            for number in np.unique(unit[chosen])
        ]
        table = pa.concat_tables(tables).sort_by([(name, "ascending") for name in _KEY])
        for batch in table.to_batches(max_chunksize=256):
            yield from batch.to_pylist()


class _Units:
    """The units of an output: those that are written, and finished rows of those that are not."""

    def __init__(self, folder: str, requests: pa.Schema) -> None:
        self._store = store_of(folder)
        stored, *_ = read_plans(folder)
        self.num_units = stored.num_units
        output = output_columns(stored.fingerprint)
        assert output is not None, "a job on rows of a batch has a stage"
        self._writer = UnitWriter(
            sink=folder,
            store=self._store,
            stored=stored,
            schema=pa.schema([*requests, *output.arrow()], metadata=requests.metadata),
            output=output,
            attempt="reading",
        )
        self.rows = lru_cache(maxsize=1)(self._rows)

    def keys(self, unit: int) -> Any:  # noqa: ANN401 - int64 [R, 2]
        """Return line and place of each finished row of a unit."""
        table = self.rows(unit, _KEY)
        return np.stack([table.column(name).to_numpy().astype(np.int64) for name in _KEY], axis=1)

    def _rows(self, unit: int, columns: tuple[str, ...]) -> pa.Table:
        if self._writer.receipt_of(unit) is None:
            table = self._writer.journal_of(unit)
            return table.select([name for name in columns if name in table.column_names])
        file = pq.ParquetFile(pa.BufferReader(self._store.read(part_name(unit))))
        known = file.schema_arrow.names
        return file.read([name for name in columns if name in known], use_threads=False)
