"""Brings answers of batch files back to the rows of the dataset, with the columns of a stage."""

import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa

from raybatch.actors.wire.arrow_arrays import vector_lists
from raybatch.durable.storage import told_as
from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.openai_batch.answer_index import Answer, AnswerIndex
from raybatch.openai_batch.files import parquet_writer
from raybatch.rows.identity import column_row_ids
from raybatch.rows.prompt_inputs import column_of
from raybatch.rows.schema import ERROR_COLUMN, NUMBERS, OutputSchema, describe_error

_ROW_ID = "__rb_custom_id__"
_ROWS_PER_FILE = 1 << 17
_NOT_THERE = Answer((), (), {}, "BatchError: no line of the batch is about this row")


class Collected(NamedTuple):
    """What was written.

    Args:
        num_failed: rows with an error, those that no line is about among them.
    """

    num_rows: int
    num_answered: int
    num_failed: int
    num_unknown: int


def collect_answers(
    paths: Sequence[str], *, source: str, sink: str, id_column: str | None = None
) -> Collected:
    """Write every row of a dataset once, with its answer or its error.

    Memory: a few thousand rows, and 32 bytes for every line.

    Args:
        paths: files of answers and errors.
        source: the dataset that the batch was made of.
        sink: folder for Parquet; it must be empty or not there.
        id_column: as when the batch was made.

    Raises:
        ConfigError: a file cannot be read or written, or the folder is not empty.
    """
    _check_empty(sink)
    index = AnswerIndex(paths)
    if index.has_texts and index.has_vectors:
        raise ConfigError(
            f"{', '.join(paths)}: some answers are texts and some embeddings, which are columns of "
            "different outputs; give the files of one batch"
        )
    output = OutputSchema(
        num_samples=index.num_samples, task="embed" if index.has_vectors else "generate"
    )
    rows = answered = found = 0
    with index:
        tables = _answered(index, output, source, id_column)
        waiting = next(tables, None)
        number = 0
        while waiting is not None:
            path = posixpath.join(sink, f"part-{number:06d}.parquet")
            written, number = 0, number + 1
            with parquet_writer(path, waiting.table.schema) as writer:
                while waiting is not None and written < _ROWS_PER_FILE:
                    writer.write_table(waiting.table)
                    written += waiting.table.num_rows
                    answered += waiting.num_answered
                    found += waiting.num_found
                    waiting = next(tables, None)
            rows += written
    return Collected(rows, answered, rows - answered, index.num_lines - found)


class _Part(NamedTuple):
    table: pa.Table
    num_answered: int
    num_found: int


def _answered(
    index: AnswerIndex, output: OutputSchema, source: str, id_column: str | None
) -> Iterator[_Part]:
    files = scan_source(source)
    output.check_collisions(files.schema, id_column=id_column)
    row_id_column = _ROW_ID if id_column is None else None
    for table in files.read(range(len(files.slices)), row_id_column=row_id_column):
        ids, _ = column_row_ids(column_of(table, row_id_column or id_column or ""))
        names = [name or "" for name in ids]
        found = index.find(names)
        answers = [answer or _NOT_THERE for answer in found]
        user = table if row_id_column is None else table.drop_columns([row_id_column])
        columns = _columns(names, answers, output)
        num_answered = sum(not answer.error for answer in answers)
        num_found = sum(answer is not None for answer in found)
        yield _Part(output.attach(user, columns), num_answered, num_found)


def _columns(ids: Sequence[str], answers: Sequence[Answer], output: OutputSchema) -> dict[str, Any]:
    num_samples = output.num_samples

    def per_sample(values: Sequence[Sequence[Any]], absent: object) -> list[Any]:
        whole = [[*v, *[absent] * (num_samples - len(v))] for v in values]
        return whole if num_samples > 1 else [v[0] for v in whole]

    usages = [answer.usage for answer in answers]
    counts = [usage.get("completion_tokens", 0) for usage in usages]
    reasons = [["error"] * num_samples if a.error else a.reasons for a in answers]
    return {
        "row_id": list(ids),
        **_made(answers, per_sample, output),
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


def _made(
    answers: Sequence[Answer],
    per_sample: Callable[[Sequence[Sequence[Any]], object], list[Any]],
    output: OutputSchema,
) -> dict[str, Any]:
    if output.task != "generate":
        name, _ = NUMBERS[output.task]
        return {name: vector_lists([answer.vector for answer in answers])}
    return {
        "generated_text": per_sample([answer.texts for answer in answers], None),
        # servers tell no tokens
        "generated_tokens": per_sample([[]] * len(answers), None),
    }


def _check_empty(sink: str) -> None:
    with told_as(f"{sink} cannot be used"):
        fs, root = fsspec.core.url_to_fs(sink)
        if fs.exists(root) and fs.find(root):
            raise ConfigError(f"{sink} holds files; choose another folder")
