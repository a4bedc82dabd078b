"""From the rows of a request to its line in the output file or in the error file."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raybatch.openai_batch.logprobs import LogprobTexts
from raybatch.openai_batch.refusal import Refusal, error_body
from raybatch.openai_batch.requests import CHAT, Reply
from raybatch.stages.schema import ERROR_COLUMN, error_class, row_status

__all__ = ["ANSWER_COLUMNS", "AnswerWriter", "Written"]

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
    ERROR_COLUMN,
]

_CODES = {"too_long": "context_length_exceeded", "invalid": "invalid_request"}


class Written(NamedTuple):
    """A line, and the file that it belongs to.

    Args:
        data: with the end of the line.
        is_error: it belongs to the error file.
        usage: prompt tokens, those of them that were cached, and generated tokens.
    """

    data: bytes
    is_error: bool
    usage: tuple[int, int, int] = (0, 0, 0)


class _Sample(NamedTuple):
    text: str
    reason: str
    logprobs: Any


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
        usage, is_chat = _usage(rows), reply.endpoint == CHAT
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._id(first['line'], 24)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self.created,
            "model": reply.model,
            "choices": self._choices(rows, reply),
            "usage": usage,
        }
        line = self._line(
            first["line"], first["custom_id"], self._response(first["line"], 200, body)
        )
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told = usage["prompt_tokens"], cached, usage["completion_tokens"]
        return Written(line, False, told)

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
            message = {"role": "assistant", "content": sample.text, "refusal": None}
            return {**common, "message": message, "logprobs": told}
        told = self._told(sample, reply, self.logprobs.of_completion)
        return {**common, "text": sample.text, "logprobs": told}

    def _told(self, sample: _Sample, reply: Reply, tell: Any) -> Any:  # noqa: ANN401
        if reply.num_logprobs is None or sample.logprobs is None:
            return None
        is_stopped = sample.reason == "stop"
        return tell(sample.logprobs, reply.num_logprobs, is_stopped=is_stopped)


def _samples(row: Mapping[str, Any]) -> list[_Sample]:
    columns = ("generated_text", "finish_reason", "logprobs")
    values = [row.get(name) for name in columns]
    if not isinstance(row["generated_text"], list):
        values = [[value] for value in values]
    else:
        values = [[None] * len(row["generated_text"]) if v is None else v for v in values]
    return [_Sample(*found) for found in zip(*values, strict=True)]


def _usage(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    prompt = sum(row["num_input_tokens"] or 0 for row in rows)
    generated = 0
    for row in rows:
        counts = row["num_generated_tokens"]
        generated += sum(counts) if isinstance(counts, list) else counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(row["num_cached_tokens"] for row in rows)},
    }


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
