"""Writes the output file and the error file of a batch from the outputs of its jobs."""

import base64
import hashlib
import heapq
import json
import pickle
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.layout import PLAN, PLAN_ORDER, SUCCESS, part_name
from raybatch.durable.sink import output_files
from raybatch.durable.storage import store_of
from raybatch.planning.fingerprint import output_columns
from raybatch.planning.store import read_plans
from raybatch.records.parsed_text import REASONING, TOOL_CALLS
from raybatch.records.types import TokenCounts
from raybatch.rows.schema import ERROR_COLUMN, error_class, row_status
from raybatch.stages.unit_writer import UnitWriter
from raybatch.text.tokenizer import Tokenizer
from raybatch_openai.batch.conversion import Conversion, FormRows
from raybatch_openai.batch.files import parquet_rows, parquet_schema, published, temporary_table
from raybatch_openai.batch.requests import CHAT, EMBEDDINGS, Form, Refusal, Reply

_REQUEST_COLUMNS = ["line", "place", "num_prompts", "custom_id"]
# output columns of a job that answers contain
_COUNTS = ("num_input_tokens", "num_generated_tokens", "num_cached_tokens")
_MADE = ("generated_text", *_COUNTS, "finish_reason", "logprobs", "embeddings")
_OF_REQUEST = ("line", "place", "num_prompts", "custom_id", "reply")
ANSWER_COLUMNS = (*_OF_REQUEST, *_MADE, REASONING, TOOL_CALLS, ERROR_COLUMN)

_CODES = {"too_long": "context_length_exceeded", "invalid": "invalid_request"}
# OpenAI's value for impossible tokens; JSON has no infinity
_LEAST = -9999.0


class LogprobTexts:
    """Renders logprobs in OpenAI's formats; without a tokenizer, token texts are empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of_chat(
        self, positions: Sequence[Mapping[str, Any]], num_top: int, *, is_stopped: bool
    ) -> dict[str, Any]:
        """Return the object `logprobs` of a chat's choice.

        Args:
            positions: for each position a dict of `token_ids` and `logprobs`: first of the
                generated token, then of the most likely ones.
            num_top: number of most likely tokens to return.
            is_stopped: the model stopped by itself, so a last position with a special token is
                left out.
        """
        content = [
            {**_of_token(token, logprob), "top_logprobs": [_of_token(*each) for each in top]}
            for token, logprob, top in self._positions(positions, num_top, is_stopped)
        ]
        return {"content": content, "refusal": None}

    def of_completion(
        self, positions: Sequence[Mapping[str, Any]], num_top: int, *, is_stopped: bool
    ) -> dict[str, Any]:
        """Return the object `logprobs` of a completion's choice; see `of_chat`."""
        places = self._positions(positions, num_top, is_stopped)
        tokens = [token for token, _, _ in places]
        return {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob, _ in places],
            "top_logprobs": [dict(top) for _, _, top in places] if num_top else None,
            "text_offset": [0, *accumulate(map(len, tokens))][: len(tokens)],
        }

    def _positions(
        self, positions: Sequence[Mapping[str, Any]], num_top: int, is_stopped: bool
    ) -> list[tuple[str, float, list[tuple[str, float]]]]:
        """Return text and log probability of each token, and those of the most likely ones."""
        if is_stopped and positions and self._is_special(positions[-1]["token_ids"][0]):
            positions = positions[:-1]
        places = []
        for place in positions:
            texts = map(self._text, place["token_ids"])
            values = [max(value, _LEAST) for value in place["logprobs"]]
            pairs = list(zip(texts, values, strict=True))
            places.append((*pairs[0], sorted(pairs, key=lambda pair: -pair[1])[:num_top]))
        return places

    def _is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and token_id in self._tokenizer.special_ids

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            text = ""
            if self._tokenizer is not None:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return self._texts[token_id]


def _of_token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


class Written(NamedTuple):
    """A line to write to the output file or, if `is_error`, to the error file."""

    data: bytes
    is_error: bool
    # tokens: prompt, cached ones of it, generated
    usage: tuple[int, int, int] = (0, 0, 0)


class _Sample(NamedTuple):
    text: str
    reason: str
    logprobs: Any
    reasoning: str | None
    tool_calls: list[Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerWriter:
    """Renders the lines of a batch's output and error files; equal rows give equal lines."""

    name: str  # of the batch; ids of answers derive from it
    created: int  # Unix seconds, in every answer
    logprobs: LogprobTexts

    def answered(self, rows: Sequence[Mapping[str, Any]]) -> Written:
        """Return the line of a request, given the results of its rows in the order of its prompts.

        It is an error line if one of the rows failed.
        """
        first = rows[0]
        if failure := next(filter(None, map(_failure, rows)), None):
            return self.refused(first["line"], first["custom_id"], failure)
        reply = Reply(*json.loads(first["reply"]))
        prompt = sum(row["num_input_tokens"] or 0 for row in rows)
        cached = sum(row["num_cached_tokens"] for row in rows)
        generated = sum(map(_num_generated, rows))
        if reply.endpoint == EMBEDDINGS:
            body = _embeddings(rows, reply, prompt)
        else:
            is_chat = reply.endpoint == CHAT
            samples = [sample for row in rows for sample in _samples(row)]
            body = {
                "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._id(first['line'], 24)}",
                "object": "chat.completion" if is_chat else "text_completion",
                "created": self.created,
                "model": reply.model,
                "choices": [self._choice(i, sample, reply) for i, sample in enumerate(samples)],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": generated,
                    "total_tokens": prompt + generated,
                    "prompt_tokens_details": {"cached_tokens": cached},
                },
            }
        line = self._line(first["line"], first["custom_id"], status=200, body=body)
        return Written(line, False, (prompt, cached, generated))

    def refused(self, line: int, custom_id: str | None, refusal: Refusal) -> Written:
        """Return the error line of a request that is refused; `line` is its line number."""
        if refusal.status is None:
            error = {"code": refusal.code, "message": refusal.message}
            return Written(self._line(line, custom_id, error=error), True)
        data = self._line(line, custom_id, status=refusal.status, body=refusal.body())
        return Written(data, True)

    def _line(
        self,
        line: int,
        custom_id: str | None,
        *,
        status: int = 0,
        body: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> bytes:
        response = {"status_code": status, "request_id": self._id(line, 32), "body": body}
        line_object = {
            "id": f"batch_req_{self._id(line, 24)}",
            "custom_id": custom_id,
            "response": None if body is None else response,
            "error": error,
        }
        # ASCII: some readers break lines at other characters
        return json.dumps(line_object).encode() + b"\n"

    def _id(self, line: int, length: int) -> str:
        return hashlib.blake2b(f"{self.name}\0{line}".encode(), digest_size=length // 2).hexdigest()

    def _choice(self, index: int, sample: _Sample, reply: Reply) -> dict[str, Any]:
        is_chat, logprobs = reply.endpoint == CHAT, None
        if reply.num_logprobs is not None and sample.logprobs is not None:
            describe = self.logprobs.of_chat if is_chat else self.logprobs.of_completion
            is_stopped = sample.reason == "stop"
            logprobs = describe(sample.logprobs, reply.num_logprobs, is_stopped=is_stopped)
        answer: dict[str, Any] = {"index": index, "finish_reason": sample.reason}
        if not is_chat:
            return {**answer, "text": sample.text, "logprobs": logprobs}
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        if sample.reasoning is not None:
            message["reasoning"] = sample.reasoning
        if sample.tool_calls:
            message |= {"content": sample.text or None, "tool_calls": sample.tool_calls}
            answer["finish_reason"] = "tool_calls"
        return {**answer, "message": message, "logprobs": logprobs}


def _samples(row: Mapping[str, Any]) -> list[_Sample]:
    columns = ("generated_text", "finish_reason", "logprobs", REASONING, TOOL_CALLS)
    values: list[Any] = [row.get(name) for name in columns]
    texts = row["generated_text"]
    if not isinstance(texts, list):
        return [_Sample(*values)]
    lists = [[None] * len(texts) if value is None else value for value in values]
    return [_Sample(*sample) for sample in zip(*lists, strict=True)]


def _num_generated(row: Mapping[str, Any]) -> int:
    counts = row.get("num_generated_tokens", 0)
    return sum(counts) if isinstance(counts, list) else int(counts)


def _embeddings(rows: Sequence[Mapping[str, Any]], reply: Reply, num_tokens: int) -> dict[str, Any]:
    def encode(numbers: Sequence[float]) -> list[float] | str:
        if reply.encoding == "base64":
            return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()
        return list(numbers)

    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(row["embeddings"])}
            for index, row in enumerate(rows)
        ],
        "model": reply.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _failure(row: Mapping[str, Any]) -> Refusal | None:
    """Return the error of a row as an HTTP error; None if it has an answer."""
    error, reasons = row[ERROR_COLUMN], row["finish_reason"]
    if not error and "filtered" in (reasons if isinstance(reasons, list) else [reasons]):
        message = "the prompt does not fit in the context, and the job skips such rows"
        return Refusal(message, code=_CODES["too_long"])
    if not error:
        return None
    status = row_status(None, error)
    where = f"line {row['line']}: {error}"
    if status in _CODES:
        return Refusal(where, code=_CODES[status])
    return Refusal(where, code=error_class(error), status=500)


class BatchFiles(NamedTuple):
    """Paths of a batch: batch file, output file, error file, and a folder to resume from.

    The folder has the rows and the outputs of jobs.
    """

    source: str
    output: str
    errors: str
    folder: str

    def answers(self, form: Form) -> str:
        """Return the output folder of the job of a form."""
        return posixpath.join(self.folder, "answers", form.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts(TokenCounts):
    """Numbers of requests and tokens of a batch; `stopped` is why jobs stopped early, or ""."""

    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    stopped: str = ""

    def exit_code(self) -> int:
        """Return 0 if all requests are answered, 2 if some failed, 1 if some are unfinished."""
        if self.num_completed + self.num_failed < self.num_requests:
            return 1
        return 2 if self.num_failed else 0

    def to_text(self) -> str:
        """Return a one-line summary."""
        if self.stopped:
            return f"{self.num_requests} requests, not all done: {self.stopped}"
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
    """Write the output file and the error file, in the order of the requests; memory is constant.

    `missing` is the error for requests with unfinished rows; None if all jobs have finished.
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
    """Yield the rows of one form; an unfinished one has only the columns of its request."""
    sink = files.answers(rows.form)
    if is_whole:
        yield from _finished_rows(sink)
        return
    path = posixpath.join(files.folder, conversion.rows_file(rows.form))
    is_done = store_of(sink).size(SUCCESS) is not None
    done = _finished_rows(sink) if is_done else _rows_so_far(sink, parquet_schema(path))
    columns = "line INTEGER, place INTEGER, row BLOB, PRIMARY KEY (line, place)"
    with temporary_table(columns) as table:
        for row in done:
            values = row["line"], row["place"], pickle.dumps(row)
            table.execute("INSERT INTO rows VALUES (?, ?, ?)", values)
        in_order = table.execute("SELECT row FROM rows ORDER BY line, place")
        answered = (pickle.loads(data) for (data,) in in_order)
        key = itemgetter("line", "place")
        # of a row with an answer, the answer comes before the request
        rows_of = heapq.merge(answered, parquet_rows(path, _REQUEST_COLUMNS), key=key)
        for _, same in groupby(rows_of, key=key):
            yield next(same)


def _finished_rows(sink: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a complete output, which has the order of the input."""
    for path in output_files(sink):
        yield from parquet_rows(path, ANSWER_COLUMNS)


def _rows_so_far(sink: str, requests: pa.Schema) -> Iterator[dict[str, Any]]:
    """Yield the finished rows of an incomplete job with `output_order="input"`."""
    folder = posixpath.join(sink, PLAN_ORDER)
    store = store_of(folder)
    if store.size(PLAN) is None:
        return
    for stored in read_plans(folder):
        output = output_columns(stored.fingerprint)
        assert output is not None, "a job on rows of a batch has a stage"
        schema = pa.schema([*requests, *output.arrow()], metadata=requests.metadata)
        writer = UnitWriter(
            sink=folder, store=store, stored=stored, schema=schema, output=output, attempt="reading"
        )
        for unit in range(stored.num_units):
            yield from _unit_rows(writer, unit).to_pylist()


def _unit_rows(writer: UnitWriter, unit: int) -> pa.Table:
    """Return the rows of a committed unit, else the finished rows of its journal."""
    if writer.receipt_of(unit) is None:
        rows = writer.journal_of(unit)
    else:
        number = writer.stored.first_unit + unit
        part = pa.BufferReader(writer.store.read(part_name(number)))
        rows = pq.read_table(part, use_threads=False)
    return rows.select([name for name in ANSWER_COLUMNS if name in rows.column_names])
