"""What a failed request means: ask once more, an error of the row, or the end of the run."""

import json
from collections.abc import Iterable, Mapping
from typing import Literal

from raybatch.backends.openai.http import HttpAnswer
from raybatch.errors import encodable
from raybatch.redaction import redacted

Verdict = Literal["good", "again", "row", "end"]

# beside 5xx: what may pass by itself
_AGAIN = (408, 409, 425, 429)
# no key, no money, no right, no such path or model, another method: no row would be answered
_END = (401, 402, 403, 404, 405)
_OVERLOAD = (429, 502, 503, 504)
# a quota that is used up comes with the status of a rate limit
_END_CODES = ("insufficient_quota", "billing_hard_limit_reached", "account_deactivated")
_ROW_CLASSES = {
    "context_length_exceeded": "PromptTooLong",
    "string_above_max_length": "PromptTooLong",
    "content_filter": "ContentFilter",
    "content_policy_violation": "ContentFilter",
}
_MAX_CHARS = 500


def verdict_on(answer: HttpAnswer) -> Verdict:
    """Return what to do about an answer, or about none."""
    if answer.failure:
        return "again"
    if 200 <= answer.status < 300:
        return "good"
    _, code = _message_and_code(answer)
    if answer.status in _END or answer.status < 400 or code in _END_CODES:
        return "end"
    return "again" if answer.status in _AGAIN or answer.status >= 500 else "row"


def is_pushback(answer: HttpAnswer) -> bool:
    """Return whether the endpoint has more work than it takes."""
    return answer.failure in ("timeout", "refused") or answer.status in _OVERLOAD


def message_of_answer(answer: HttpAnswer, secrets: Iterable[str]) -> str:
    """Return status and message of a failed request on one line, cut, without secrets."""
    message, _ = _message_and_code(answer)
    if answer.failure:
        message = answer.cause
    elif not message and answer.status < 400:
        message = "the endpoint answers with a redirect; name its API in base_url"
    text = f"{answer.status} {message}" if answer.status else message
    return hidden(text, secrets)


def row_error(answer: HttpAnswer, num_tries: int, secrets: Iterable[str]) -> str:
    """Return the error of a row whose request has failed for good."""
    _, code = _message_and_code(answer)
    said = message_of_answer(answer, secrets)
    if verdict_on(answer) != "again":
        return f"{_ROW_CLASSES.get(code, 'BadRequest')}: {said}"
    kind = {429: "RateLimited"}.get(answer.status, "EndpointFailed")
    return f"{'Timeout' if answer.failure == 'timeout' else kind}: {said} (asked {num_tries} times)"


def secrets_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of headers that must appear in no text."""
    return tuple(value.removeprefix("Bearer ") for value in headers.values())


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return a text on one line, cut, without these secrets and what looks like one."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(redacted(text).split())
    return encodable(text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " ...")


def _message_and_code(answer: HttpAnswer) -> tuple[str, str]:
    """Return what the body of an error says, in the forms that servers have."""
    text = answer.body[: 1 << 16].decode("utf-8", "replace")
    try:
        said = json.loads(text)
    except ValueError:
        return text, ""
    if not isinstance(said, Mapping):
        return text, ""
    inner = said.get("error")
    fields = inner if isinstance(inner, Mapping) else said
    message = fields.get("message") or inner or said.get("detail") or text
    code = fields.get("code")
    return (
        message if isinstance(message, str) else json.dumps(message),
        code if isinstance(code, str) else "",
    )
