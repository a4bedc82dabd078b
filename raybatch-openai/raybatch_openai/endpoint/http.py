"""Concurrent HTTP requests from one thread, and the verdict on an answer: good, retry, error.

`OpenAIBackend` decides what is sent, and when.

caller                                event loop
send(key, path, body) ------------->  one task per request
collect(timeout_s)    <-------------  answers, in order of completion
"""

import asyncio
import json
import queue
import re
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from raybatch.errors import encodable
from raybatch.redaction import redacted

_MAX_ANSWER_BYTES = 64 << 20
_CONNECT_S = 30.0
_CLOSE_S = 5.0

Failure = Literal["", "timeout", "refused", "connection"]
Verdict = Literal["good", "again", "row", "end"]

# temporary errors, like every 5xx
_AGAIN = (408, 409, 425, 429)
# wrong key, path, model or method, or no credit: no row would be answered
_END = (401, 402, 403, 404, 405)
_OVERLOAD = (429, 502, 503, 504)
# an exhausted quota has the status of a rate limit
_END_CODES = ("insufficient_quota", "billing_hard_limit_reached", "account_deactivated")
_ROW_CLASSES = {
    "context_length_exceeded": "PromptTooLong",
    "string_above_max_length": "PromptTooLong",
    "content_filter": "ContentFilter",
    "content_policy_violation": "ContentFilter",
}
# required fields of a body
_ASKED = ("messages", "prompt", "input")
# long words with a digit may be request ids or times
_LONG_WORD = re.compile(r"[\w:.+-]{12,}")
# names of this length do not occur in sentences by chance
_LONG_NAME = 8
_MAX_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    """The response to one request, or why there is none."""

    key: int
    status: int = 0  # HTTP status; 0 without an answer
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    failure: Failure = ""  # why there is no answer
    cause: str = ""
    seconds: float = 0.0  # from sending to the last byte


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment sets for a URL; None for a direct connection."""
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    return urllib.request.getproxies().get(parts.scheme)


class HttpThread:
    """Sends requests to one API (`send`) and returns responses (`collect`); called by one thread.

    A thread of this object does the network work. Request headers hold secrets, which never appear
    in errors or logs.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        timeout_s: float,
        *,
        proxy: str | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._proxy = proxy
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._answers: queue.SimpleQueue[HttpAnswer] = queue.SimpleQueue()
        self._futures: dict[int, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._main, name="raybatch-http", daemon=True)
        self._thread.start()

    def send(self, key: int, path: str, body: Mapping[str, Any] | None) -> None:
        """Send a request to `path` below the base URL: POST of `body` as JSON, GET if it is None.

        The answer has the same `key`, which must differ from those of other requests in flight.
        """
        data = None
        if body is not None:
            # the endpoint refuses invalid text
            data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        request = self._request(key, path, data)
        self._futures[key] = asyncio.run_coroutine_threadsafe(request, self._loop)

    def cancel(self, key: int) -> None:
        """Cancel a request; `collect` returns no answer for it, unless one has arrived already."""
        if (future := self._futures.pop(key, None)) is not None:
            future.cancel()

    def collect(self, timeout_s: float) -> list[HttpAnswer]:
        """Return the answers that have arrived; wait up to `timeout_s` seconds for a first one."""
        answers = []
        with suppress(queue.Empty):
            answers.append(self._answers.get(timeout_s > 0, timeout_s))
            while True:
                answers.append(self._answers.get_nowait())
        for answer in answers:
            self._futures.pop(answer.key, None)
        return answers

    def close(self) -> None:
        """Cancel every request and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)

    def _main(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _request(self, key: int, path: str, data: bytes | None) -> None:
        began = time.monotonic()
        try:
            answer = await self._answer(key, path, data)
        except TimeoutError:
            cause = f"no answer within {self._timeout_s:g} s"
            answer = HttpAnswer(key=key, failure="timeout", cause=cause)
        except aiohttp.ClientConnectorError as error:
            answer = HttpAnswer(key=key, failure="refused", cause=str(error))
        except Exception as error:
            # any failure becomes an error of the row; texts of the client may contain headers
            cause = f"the connection was lost: {type(error).__name__}"
            answer = HttpAnswer(key=key, failure="connection", cause=cause)
        self._answers.put(replace(answer, seconds=time.monotonic() - began))

    async def _answer(self, key: int, path: str, data: bytes | None) -> HttpAnswer:
        if self._session is None:
            self._session = self._new_session()
        method, url = "GET" if data is None else "POST", self._base_url + path
        # a redirect would leak the key
        async with self._session.request(method, url, data=data, allow_redirects=False) as answer:
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > _MAX_ANSWER_BYTES:
                    raise ValueError("the answer is too large")
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return HttpAnswer(key=key, status=answer.status, headers=headers, body=bytes(body))

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # the backend limits requests in flight
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", **self._headers},
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
            # without `trust_env`, which would send credentials of ~/.netrc
            proxy=self._proxy,
        )


def verdict_on(answer: HttpAnswer) -> Verdict:
    """Return what to do with an answer.

    "good": read it; "again": retry the row; "row": make it an error row; "end": give up, because
    the endpoint would refuse every row.
    """
    if answer.failure:
        return "again"
    if 200 <= answer.status < 300:
        return "good"
    _, code, _ = _error_fields(answer)
    if answer.status in _END or answer.status < 400 or code in _END_CODES:
        return "end"
    return "again" if answer.status in _AGAIN or answer.status >= 500 else "row"


def is_pushback(answer: HttpAnswer) -> bool:
    """Return whether an answer says that the endpoint is overloaded."""
    return answer.failure in ("timeout", "refused") or answer.status in _OVERLOAD


def message_of(answer: HttpAnswer, secrets: Iterable[str]) -> str:
    """Return status and message of a failed request on one line, truncated, without secrets."""
    message, _, _ = _error_fields(answer)
    if answer.failure:
        message = answer.cause
    elif not message and answer.status < 400:
        message = "the endpoint answers with a redirect; set base_url to its API"
    text = f"{answer.status} {message}" if answer.status else message
    return without_secrets(text, secrets)


def row_error(answer: HttpAnswer, num_tries: int, secrets: Iterable[str]) -> str:
    """Return the error text of a row that is not sent again, such as "Timeout: ... (9 tries)"."""
    _, code, _ = _error_fields(answer)
    message = message_of(answer, secrets)
    if verdict_on(answer) != "again":
        return f"{_ROW_CLASSES.get(code, 'BadRequest')}: {message}"
    kind = "RateLimited" if answer.status == 429 else "EndpointFailed"
    kind = "Timeout" if answer.failure == "timeout" else kind
    return f"{kind}: {message} ({num_tries} tries)"


def secrets_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of headers, each of them a secret, without the prefix "Bearer "."""
    return tuple(value.removeprefix("Bearer ") for value in headers.values())


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return a text on one line, truncated, with `secrets` and what looks like a secret masked."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(redacted(text).split())
    return encodable(text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " ...")


def is_about_row(answer: HttpAnswer) -> bool:
    """Return whether the endpoint refuses the content of this row, such as a long prompt."""
    _, code, _ = _error_fields(answer)
    return code in _ROW_CLASSES


def kind_of(answer: HttpAnswer, *, seed: int | None) -> str:
    """Return a text that is equal for refusals that differ only in the seed or in row numbers.

    Numbers and ids in the message of the endpoint are left out.
    """
    message, code, param = _error_fields(answer)
    if seed is not None:
        message = re.sub(rf"\b{seed}\b", "seed", message)
    words = _LONG_WORD.sub(lambda word: re.sub(r"^.*\d.*$", "", word[0]), message)
    return f"{answer.status} {code} {param} {words}"


def field_named(answer: HttpAnswer, fields: Iterable[str]) -> str | None:
    """Return the field, of those sent, that the error of a refusal names; None if it names none."""
    message, _, param = _error_fields(answer)
    names = [name for name in fields if name not in _ASKED]
    if (first := re.split(r"[.\[]", param)[0]) in names:
        return first
    # the longest first: max_tokens is not in max_tokens_field
    for name in sorted(names, key=len, reverse=True):
        is_quoted = re.search(rf"(?:^|[\"'`.]){re.escape(name)}(?:[\"'`:]|$)", message)
        is_long = len(name) >= _LONG_NAME and re.search(rf"\b{re.escape(name)}\b", message)
        if is_quoted or is_long:
            return name
    return None


def _error_fields(answer: HttpAnswer) -> tuple[str, str, str]:
    """Return message, code and parameter of an error body, for all known servers."""
    text = answer.body[: 1 << 16].decode("utf-8", "replace")
    try:
        error = json.loads(text)
    except ValueError:
        return text, "", ""
    if not isinstance(error, Mapping):
        return text, "", ""
    inner, detail = error.get("error"), error.get("detail")
    if isinstance(detail, list):
        detail = "; ".join(map(_detail, detail))
    fields = inner if isinstance(inner, Mapping) else error
    message = fields.get("message") or inner or detail or text
    message = message if isinstance(message, str) else json.dumps(message)
    code, param = (v if isinstance(v := fields.get(n), str) else "" for n in ("code", "param"))
    return message, code, param


def _detail(one: object) -> str:
    """Return FastAPI's error of one field, without the value, which may be the whole body."""
    if not isinstance(one, Mapping) or not isinstance(one.get("loc"), list):
        return json.dumps(one)
    return f"{'.'.join(map(str, one['loc']))}: {one.get('msg')}"
