"""Brings answers of batch files back to the rows of the dataset, with the columns of a stage."""

import itertools
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa

from raybatch.actors.wire.columns import vector_lists
from raybatch.backends.openai.body import BadAnswer, read_vector
from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError, error_text
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.source import scan_source
from raybatch.openai_batch.files import parquet_writer, rows_with_ids
from raybatch.openai_batch.requests import hashes_of
from raybatch.records.types import Task, Vector
from raybatch.rows.schema import ERROR_COLUMN, NUMBERS, OutputSchema, describe_error

_LINES_AT_ONCE = 1024
_ROWS_PER_FILE = 1 << 17
_REASONS = {"length": "length", "content_filter": "filtered"}


class Answer(NamedTuple):
    """What a line says of one request: texts of each sample, or a vector, or an error."""

    texts: Sequence[str | None]
    reasons: Sequence[str]
    usage: Mapping[str, Any]
    error: str = ""
    vector: Vector | None = None


_NOT_THERE = Answer((), (), {}, "BatchError: the batch files hold no line for this row")


class AnswerIndex:
    """Finds answers by custom_id in files that are not compressed; a context holds them open."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._files: list[Any] = []
        self.num_samples = 1
        self.has_texts = self.has_vectors = False
        self.num_lines = 0
        scans = [self._scan(number, path) for number, path in enumerate(paths)]
        rows = np.concatenate([np.empty((0, 4), np.uint64), *scans])
        self._rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        is_repeated = (self._rows[1:, :2] == self._rows[:-1, :2]).all(axis=1)
        self.num_repeated = int(is_repeated.sum())
        self.num_ids = len(rows) - self.num_repeated

    def __enter__(self) -> "AnswerIndex":
        self._files = [fsspec.open(path, "rb").open() for path in self._paths]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def find(self, custom_ids: Sequence[str]) -> list[Answer | None]:
        """Return the answer of each request, None for those that no line is about."""
        if not custom_ids:
            return []
        hashes = hashes_of(custom_ids)[:, 0]
        first = np.searchsorted(self._rows[:, 0], hashes, side="left")
        stop = np.searchsorted(self._rows[:, 0], hashes, side="right")
        return [
            self._answer(custom_id, self._rows[begin:end])
            for custom_id, begin, end in zip(custom_ids, first, stop, strict=True)
        ]

    def _answer(self, custom_id: str, rows: Any) -> Answer | None:  # noqa: ANN401 - uint64 [R, 4]
        for _, _, number, offset in rows.tolist():
            file = self._files[number]
            file.seek(offset)
            line = json.loads(file.readline())
            if line.get("custom_id") == custom_id:
                return read_answer(line)
        return None

    def _scan(self, number: int, path: str) -> Any:  # noqa: ANN401 - uint64 [R, 4]
        rows = [np.empty((0, 4), np.uint64)]
        with error_context(f"{safe_text(path)} cannot be read"), fsspec.open(path, "rb") as file:
            lines = self._lines(file, safe_text(path))
            while some := list(itertools.islice(lines, _LINES_AT_ONCE)):
                ids, offsets = zip(*some, strict=True)
                places = np.array([[number, offset] for offset in offsets], np.uint64)
                rows.append(np.concatenate([hashes_of(ids), places], axis=1))
        return np.concatenate(rows)

    def _lines(self, file: IO[bytes], name: str) -> Iterator[tuple[str, int]]:
        """Yield custom_id and offset of each line that has one."""
        offset = 0
        for line_number, data in enumerate(iter(file.readline, b""), 1):
            if data.strip():
                custom_id = self._look(data, f"{name}, line {line_number}")
                if custom_id is not None:
                    yield custom_id, offset
            offset += len(data)

    def _look(self, data: bytes, where: str) -> str | None:
        try:
            line = json.loads(data)
            answer, custom_id = read_answer(line), line["custom_id"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{where} is not a line of a batch output or error file") from error
        self.num_lines += 1
        self.num_samples = max(self.num_samples, len(answer.texts))
        self.has_texts |= bool(answer.texts)
        self.has_vectors |= answer.vector is not None
        return custom_id if isinstance(custom_id, str) else None


def read_answer(line: Mapping[str, Any]) -> Answer:
    """Return what a line of an output file or of an error file says."""
    if line.get("error"):
        error = line["error"]
        return Answer((), (), {}, f"BatchError: {error.get('code')}: {error.get('message')}")
    response = line["response"]
    body = response["body"]
    if response["status_code"] != 200:
        error = body.get("error") or {}
        is_long = error.get("code") == "context_length_exceeded"
        kind = "PromptTooLong" if is_long else f"BatchError: HTTP {response['status_code']}"
        return Answer((), (), {}, f"{kind}: {error.get('message')}")
    if "data" in body:
        return _embedded(body)
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return Answer(
        texts=[_text(choice) for choice in choices],
        reasons=[_REASONS.get(str(choice.get("finish_reason")), "stop") for choice in choices],
        usage=body.get("usage") or {},
    )


def _embedded(body: Mapping[str, Any]) -> Answer:
    """Return the one vector of a line; what is none costs the row alone, not the file."""
    usage, data = body.get("usage") or {}, body["data"]
    if len(data) != 1:
        error = f"BadAnswer: the line has {len(data)} embeddings, and a row takes one"
        return Answer((), (), usage, error)
    try:
        return Answer((), ("stop",), usage, vector=read_vector(data[0]["embedding"]))
    except BadAnswer as error:
        return Answer((), (), usage, error_text(error))


def _text(choice: Mapping[str, Any]) -> str:
    if "message" not in choice:
        return str(choice["text"])
    message = choice["message"]
    if message.get("content") is None and message.get("tool_calls"):
        return json.dumps(message["tool_calls"])
    return str(message.get("content") or "")


class Collected(NamedTuple):
    """What was written; rows that no line is about have failed."""

    num_rows: int
    num_answered: int
    num_failed: int
    num_unknown: int
    num_repeated: int  # lines about a request that an earlier line answers


def collect_answers(
    paths: Sequence[str], *, source: str, sink: str, id_column: str | None = None
) -> Collected:
    """Write every row of a dataset once, with its answer or its error, to a folder that is empty.

    Memory is a few thousand rows, and 32 bytes for every line of the files of answers and errors.
    Raises ConfigError where a file cannot be read or written, or holds a line that is no answer.
    """
    with error_context(f"{sink} cannot be used"):
        fs, root = fsspec.core.url_to_fs(sink)
        if fs.exists(root) and fs.find(root):
            raise ConfigError(f"{sink} holds files; choose another folder")
    index = AnswerIndex(paths)
    if index.has_texts and index.has_vectors:
        raise ConfigError(
            f"{', '.join(paths)}: some answers are texts and some embeddings, which are columns of "
            "different outputs; give the files of one batch"
        )
    task: Task = "embed" if index.has_vectors else "generate"
    output = OutputSchema(num_samples=index.num_samples, task=task)
    rows = answered = num_matched = 0
    with index:
        parts = _answered(index, output, source, id_column)
        waiting = next(parts, None)
        # where ids do not fit, not one does, and a folder of errors would be in the way
        if index.num_ids and (waiting is None or not waiting.num_found):
            if not any(part.num_found for part in parts):
                raise ConfigError(
                    f"no custom_id matches a row of {source}; give --id-column the column that the "
                    "batch was made with"
                )
            # again from the first row, as what is before an answer may be more than memory holds
            parts = _answered(index, output, source, id_column)
            waiting = next(parts, None)
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


class _Part(NamedTuple):
    table: pa.Table
    num_answered: int
    num_found: int


def _answered(
    index: AnswerIndex, output: OutputSchema, source: str, id_column: str | None
) -> Iterator[_Part]:
    files = scan_source(source)
    output.check_collisions(files.schema, id_column=id_column)
    for table, ids, _ in rows_with_ids(files, id_column):
        matches = index.find(ids)
        answers = [answer or _NOT_THERE for answer in matches]
        num_answered = sum(not answer.error for answer in answers)
        num_found = sum(answer is not None for answer in matches)
        whole = output.attach(table, _columns(ids, answers, output))
        yield _Part(whole, num_answered, num_found)


def _columns(ids: Sequence[str], answers: Sequence[Answer], output: OutputSchema) -> dict[str, Any]:
    num_samples = output.num_samples

    def per_sample(values: Sequence[Sequence[Any]], absent: object) -> list[Any]:
        whole = [[*v, *[absent] * (num_samples - len(v))] for v in values]
        return whole if num_samples > 1 else [v[0] for v in whole]

    if output.task == "generate":
        made = {
            "generated_text": per_sample([answer.texts for answer in answers], None),
            # servers return no token ids
            "generated_tokens": per_sample([[]] * len(answers), None),
        }
    else:
        name, _ = NUMBERS[output.task]
        made = {name: vector_lists([answer.vector for answer in answers])}
    usages = [answer.usage for answer in answers]
    counts = [usage.get("completion_tokens", 0) for usage in usages]
    reasons = [["error"] * num_samples if a.error else a.reasons for a in answers]
    return {
        "row_id": list(ids),
        **made,
        "num_input_tokens": [usage.get("prompt_tokens") for usage in usages],
        # one count for all samples
        "num_generated_tokens": per_sample([[count] for count in counts], 0),
        "num_cached_tokens": [
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages
        ],
        "finish_reason": per_sample(reasons, "stop"),
        "group_id": [None] * len(ids),
        "attempts": [int(answer is not _NOT_THERE) for answer in answers],
        ERROR_COLUMN: [describe_error(*a.error.split(": ", 1)) if a.error else "" for a in answers],
    }
