"""From the rows of a request to its line in the output file or in the error file."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raybatch.openai_batch.logprobs import LogprobTexts
from raybatch.openai_batch.refusal import Refusal, error_body
from raybatch.openai_batch.requests import CHAT, EMBEDDINGS, Reply
from raybatch.records.parsed_text import REASONING, TOOL_CALLS
from raybatch.rows.schema import ERROR_COLUMN, error_class, row_status

# of the rows of a job, as far as answers are made of them
ANSWER_COLUMNS = [
    "line",
    "place",
    "num_prompts",
    "custom_id",
    "reply",
    "generated_text",
    "num_input_tokens",
    "num_generated_tokens",
    "num_cached_tokens",
    "finish_reason",
    "logprobs",
    "embeddings",
    REASONING,
    TOOL_CALLS,
    ERROR_COLUMN,
]

_CODES = {"too_long": "context_length_exceeded", "invalid": "invalid_request"}


class Written(NamedTuple):
    """A line, and the file that it belongs to.

    Args:
        usage: prompt tokens, those of them that were cached, and generated tokens.
    """

    data: bytes
    is_error: bool
    usage: tuple[int, int, int] = (0, 0, 0)


class _Sample(NamedTuple):
    text: str
    reason: str
    logprobs: Any
    reasoning: str | None
    tool_calls: list[Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerWriter:
    """Makes the lines of one batch; the same rows always make the same lines.

    Args:
        name: of the batch, from which the ids of answers follow.
        created: seconds since 1970 that every answer tells.
        logprobs: makes texts of the tokens that have log probabilities.
    """

    name: str
    created: int
    logprobs: LogprobTexts

    def answered(self, rows: Sequence[Mapping[str, Any]]) -> Written:
        """Return the line of a request whose rows are all there, in the order of its prompts."""
        first = rows[0]
        bad = next((row for row in rows if row[ERROR_COLUMN] or _is_left_out(row)), None)
        if bad is not None:
            return self.refused(first["line"], first["custom_id"], _failure(bad))
        reply = Reply(*json.loads(first["reply"]))
        prompt = sum(row["num_input_tokens"] or 0 for row in rows)
        cached = sum(row["num_cached_tokens"] for row in rows)
        generated = sum(map(_num_generated, rows))
        if reply.endpoint == EMBEDDINGS:
            body = _embeddings(rows, reply, prompt)
        else:
            is_chat = reply.endpoint == CHAT
            body = {
                "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._id(first['line'], 24)}",
                "object": "chat.completion" if is_chat else "text_completion",
                "created": self.created,
                "model": reply.model,
                "choices": self._choices(rows, reply),
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": generated,
                    "total_tokens": prompt + generated,
                    "prompt_tokens_details": {"cached_tokens": cached},
                },
            }
        line = self._line(
            first["line"], first["custom_id"], self._response(first["line"], 200, body)
        )
        return Written(line, False, (prompt, cached, generated))

    def refused(self, line: int, custom_id: str | None, refusal: Refusal) -> Written:
        """Return the line of a request that has no answer."""
        if refusal.status is None:
            error = {"code": refusal.code, "message": refusal.message}
            return Written(self._line(line, custom_id, None, error), True)
        response = self._response(line, refusal.status, error_body(refusal))
        return Written(self._line(line, custom_id, response), True)

    def _response(self, line: int, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"status_code": status, "request_id": self._id(line, 32), "body": body}

    def _line(
        self,
        line: int,
        custom_id: str | None,
        response: Mapping[str, Any] | None,
        error: Mapping[str, Any] | None = None,
    ) -> bytes:
        found = {
            "id": f"batch_req_{self._id(line, 24)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        # ASCII alone: some readers take other characters for the end of a line
        return json.dumps(found).encode() + b"\n"

    def _id(self, line: int, length: int) -> str:
        return hashlib.blake2b(f"{self.name}\0{line}".encode(), digest_size=length // 2).hexdigest()

    def _choices(self, rows: Sequence[Mapping[str, Any]], reply: Reply) -> list[dict[str, Any]]:
        samples = [sample for row in rows for sample in _samples(row)]
        return [self._choice(index, sample, reply) for index, sample in enumerate(samples)]

    def _choice(self, index: int, sample: _Sample, reply: Reply) -> dict[str, Any]:
        common = {"index": index, "finish_reason": sample.reason}
        if reply.endpoint == CHAT:
            told = self._told(sample, reply, self.logprobs.of_chat)
            return {**common, **_message(sample), "logprobs": told}
        told = self._told(sample, reply, self.logprobs.of_completion)
        return {**common, "text": sample.text, "logprobs": told}

    def _told(self, sample: _Sample, reply: Reply, tell: Any) -> Any:  # noqa: ANN401
        if reply.num_logprobs is None or sample.logprobs is None:
            return None
        is_stopped = sample.reason == "stop"
        return tell(sample.logprobs, reply.num_logprobs, is_stopped=is_stopped)


def _message(sample: _Sample) -> dict[str, Any]:
    """Return the message of a choice, and why it ended where that is a call."""
    message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
    if sample.reasoning is not None:
        message["reasoning"] = sample.reasoning
    if not sample.tool_calls:
        return {"message": message}
    message |= {"content": sample.text or None, "tool_calls": sample.tool_calls}
    return {"message": message, "finish_reason": "tool_calls"}


def _samples(row: Mapping[str, Any]) -> list[_Sample]:
    columns = ("generated_text", "finish_reason", "logprobs", REASONING, TOOL_CALLS)
    values = [row.get(name) for name in columns]
    if not isinstance(row["generated_text"], list):
        values = [[value] for value in values]
    else:
        values = [[None] * len(row["generated_text"]) if v is None else v for v in values]
    return [_Sample(*found) for found in zip(*values, strict=True)]


def _num_generated(row: Mapping[str, Any]) -> int:
    counts = row.get("num_generated_tokens", 0)
    return sum(counts) if isinstance(counts, list) else int(counts)


def _embeddings(rows: Sequence[Mapping[str, Any]], reply: Reply, num_tokens: int) -> dict[str, Any]:
    """Return the body of an answer with the vector of each prompt."""
    told = _as_base64 if reply.encoding == "base64" else list[float]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": told(row["embeddings"])}
            for index, row in enumerate(rows)
        ],
        "model": reply.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _as_base64(numbers: Sequence[float]) -> str:
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


def _is_left_out(row: Mapping[str, Any]) -> bool:
    reasons = row["finish_reason"]
    return "filtered" in (reasons if isinstance(reasons, list) else [reasons])


def _failure(row: Mapping[str, Any]) -> Refusal:
    """Return why a row of a request has no answer, as an answer of HTTP."""
    error: str = row[ERROR_COLUMN]
    if not error:
        return Refusal(
            "the prompt leaves no room in the context, and the job leaves out such rows",
            code=_CODES["too_long"],
        )
    status = row_status(None, error)
    where = f"line {row['line']}: {error}"
    if status in _CODES:
        return Refusal(where, code=_CODES[status])
    return Refusal(where, code=error_class(error), status=500)
