"""Joins the answers of batch files to the rows of their dataset, with the columns of a stage."""

import itertools
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from typing import IO, Any, NamedTuple

import fsspec
import pyarrow as pa

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError, encodable, error_text
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.source import scan_source
from raybatch.records.types import Completion, FinishReason, Task
from raybatch.rows.finish import RowSample, answer_columns
from raybatch.rows.schema import OutputSchema, describe_error
from raybatch_openai.batch.files import parquet_writer, rows_with_ids, seekable, temporary_table
from raybatch_openai.endpoint.body import BadAnswer, read_vector, text_of, with_usage

_ROWS_PER_FILE = 1 << 17
_REASONS: Mapping[str, FinishReason] = {"length": "length", "content_filter": "filtered"}


def _failed(kind: str, message: str, attempts: int = 1) -> RowSample:
    return RowSample(None, None, "error", describe_error(kind, message), attempts)


_NO_LINE = _failed("BatchError", "the batch files have no line for this row", 0)


class AnswerIndex:
    """Finds answers by custom_id in batch output and error files, open until `stack` closes.

    Raises ConfigError if a file cannot be read, or has a line that is not an answer.
    """

    def __init__(self, paths: Sequence[str], stack: ExitStack) -> None:
        columns = "id TEXT PRIMARY KEY, file INTEGER, offset INTEGER"
        self._table = stack.enter_context(temporary_table(columns))
        self._files: list[IO[bytes]] = []
        self.num_samples = 1
        self.has_texts = self.has_vectors = False
        self.num_lines = self.num_ids = self.num_repeated = 0
        for path in paths:
            with error_context(f"{safe_text(path)} cannot be read"):
                file = stack.enter_context(seekable(path))
                for custom_id, offset in self._lines(file, safe_text(path)):
                    row = (custom_id, len(self._files), offset)
                    new = self._table.execute("INSERT OR IGNORE INTO rows VALUES (?, ?, ?)", row)
                    self.num_ids += new.rowcount
                    self.num_repeated += 1 - new.rowcount
                self._files.append(file)

    def find(self, custom_id: str) -> list[RowSample] | None:
        """Return the samples of a request; None if no line has its custom_id."""
        known = self._table.execute("SELECT file, offset FROM rows WHERE id = ?", (custom_id,))
        place = known.fetchone()
        if place is None:
            return None
        number, offset = place
        self._files[number].seek(offset)
        return read_answer(json.loads(self._files[number].readline()))

    def _lines(self, file: IO[bytes], name: str) -> Iterator[tuple[str, int]]:
        """Yield custom_id and offset of each line that has one."""
        offset = 0
        for line_number, data in enumerate(iter(file.readline, b""), 1):
            if data.strip():
                custom_id = self._check(data, f"{name}, line {line_number}")
                if custom_id is not None:
                    yield custom_id, offset
            offset += len(data)

    def _check(self, data: bytes, where: str) -> str | None:
        """Count a line and return its custom_id; None if that is no valid string."""
        try:
            line = json.loads(data)
            custom_id = line["custom_id"]
            is_answer = isinstance(line.get("error") or line["response"], dict)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_answer = False
        if not is_answer:
            raise ConfigError(f"{where} is not a line of a batch output or error file")
        samples = read_answer(line)
        self.num_lines += 1
        self.num_samples = max(self.num_samples, len(samples))
        answers = [sample.answer for sample in samples if sample.answer is not None]
        self.has_texts |= any(answer.text is not None for answer in answers)
        self.has_vectors |= any(answer.vector is not None for answer in answers)
        is_name = isinstance(custom_id, str) and encodable(custom_id) == custom_id
        return custom_id if is_name else None


def read_answer(line: Mapping[str, Any]) -> list[RowSample]:
    """Return the samples in a parsed line of a batch output or error file.

    A line with an error, or that is not an answer, gives one sample with this error.
    """
    try:
        return _samples(line)
    except BadAnswer as error:
        reason = str(error)
    except UnicodeEncodeError:
        reason = "the text has an unpaired surrogate"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"not an answer of OpenAI's API: {error_text(error)}"
    # a bad line fails its row, not the file
    return [_failed("BadAnswer", reason)]


def _samples(line: Mapping[str, Any]) -> list[RowSample]:
    if error := line.get("error"):
        return [_failed("BatchError", f"{error.get('code')}: {error.get('message')}")]
    response = line["response"]
    body = response["body"] or {}
    if response["status_code"] != 200:
        error = body.get("error") or {}
        is_long = error.get("code") == "context_length_exceeded"
        kind = "PromptTooLong" if is_long else f"BatchError: HTTP {response['status_code']}"
        return [_failed(kind, str(error.get("message")))]
    completions = [_embedded(body["data"])] if "data" in body else _texts(body["choices"])
    return [
        RowSample(
            text=completion.text,
            token_ids=None,  # servers return no token ids
            finish_reason=completion.finish_reason,
            attempts=1,
            num_cached_tokens=completion.num_cached_tokens,
            answer=completion,
        )
        for completion in with_usage(completions, body.get("usage"))
    ]


def _embedded(data: Sequence[Mapping[str, Any]]) -> Completion:
    if len(data) != 1:
        raise BadAnswer(f"the line has {len(data)} embeddings, expected 1")
    return Completion(request_id=0, vector=read_vector(data[0]["embedding"]))


def _texts(choices: Sequence[Mapping[str, Any]]) -> list[Completion]:
    if not choices:
        raise BadAnswer("the line has no choices")
    completions = []
    for choice in sorted(choices, key=itemgetter("index")):
        text = text_of(choice["message"]) if "message" in choice else str(choice["text"])
        text.encode()
        completions.append(
            Completion(
                request_id=0,
                sample_idx=choice["index"],
                text=text,
                finish_reason=_REASONS.get(str(choice.get("finish_reason")), "stop"),
            )
        )
    return completions


class Collected(NamedTuple):
    """Counts of rows of a dataset, and of lines of batch files; a row without a line is failed."""

    num_rows: int
    num_answered: int
    num_failed: int
    num_unknown: int  # lines without a row
    num_repeated: int  # lines whose custom_id an earlier line has


def collect_answers(
    paths: Sequence[str], *, source: str, sink: str, id_column: str | None = None
) -> Collected:
    """Write every row of a dataset with its answer or error as Parquet to an empty folder.

    Holds a few thousand rows in memory. Raises ConfigError if a file cannot be read or written, or
    has a line that is not an answer.

    Args:
        paths: batch output and error files.
        source: dataset from which the batch was made.
        sink: folder to write.
        id_column: column with the custom_ids; None for those made of file and position.
    """
    with error_context(f"{sink} cannot be used"):
        fs, root = fsspec.core.url_to_fs(sink)
        if fs.exists(root) and fs.find(root):
            raise ConfigError(f"{sink} is not empty; choose another folder")
    with ExitStack() as stack:
        index = AnswerIndex(paths, stack)
        if index.has_texts and index.has_vectors:
            raise ConfigError(
                f"{', '.join(paths)}: the files mix texts and embeddings, which have different "
                "output columns; pass the files of one batch"
            )
        parts = _answered(index, source, id_column)
        waiting = next(parts, None)
        # with a wrong id column no id matches, and the output would have only error rows
        if index.num_ids and (waiting is None or not waiting.num_found):
            if not any(part.num_found for part in parts):
                raise ConfigError(
                    f"no custom_id matches a row of {source}; set --id-column to the column that "
                    "the batch was made with"
                )
            # read again from the first row: the rows before the first answer may not fit in memory
            parts = _answered(index, source, id_column)
            waiting = next(parts, None)
        return _write(index, sink, waiting, parts)


class _Part(NamedTuple):
    table: pa.Table
    num_answered: int
    num_found: int


def _write(
    index: AnswerIndex, sink: str, waiting: _Part | None, parts: Iterator[_Part]
) -> Collected:
    rows = answered = num_matched = 0
    for number in itertools.count():
        if waiting is None:
            break
        path = posixpath.join(sink, f"part-{number:06d}.parquet")
        end = rows + _ROWS_PER_FILE
        with parquet_writer(path, waiting.table.schema) as writer:
            while waiting is not None and rows < end:
                writer.write_table(waiting.table)
                rows += waiting.table.num_rows
                answered += waiting.num_answered
                num_matched += waiting.num_found
                waiting = next(parts, None)
    unknown = max(0, index.num_lines - index.num_repeated - num_matched)
    return Collected(rows, answered, rows - answered, unknown, index.num_repeated)


def _answered(index: AnswerIndex, source: str, id_column: str | None) -> Iterator[_Part]:
    files = scan_source(source)
    task: Task = "embed" if index.has_vectors else "generate"
    output = OutputSchema(num_samples=index.num_samples, task=task)
    output.check_collisions(files.schema, id_column=id_column)
    for table, ids, _ in rows_with_ids(files, id_column):
        matches = [index.find(custom_id) for custom_id in ids]
        samples = [_padded(match, index.num_samples) for match in matches]
        firsts = [row[0].answer for row in samples]
        num_input = [None if first is None else first.num_input_tokens for first in firsts]
        columns = answer_columns(ids, num_input, samples, output)
        yield _Part(
            table=output.attach(table, {**columns, "group_id": [None] * len(ids)}),
            num_answered=sum(not row[0].error for row in samples),
            num_found=sum(match is not None for match in matches),
        )


def _padded(samples: Sequence[RowSample] | None, num_samples: int) -> list[RowSample]:
    """Return `num_samples` samples of a row; an error is repeated."""
    samples = [_NO_LINE] if samples is None else samples
    rest = samples[0] if samples and samples[0].error else RowSample(None, None, "stop")
    return [*samples, *[rest] * (num_samples - len(samples))]
