"""Rate limits of an endpoint: adaptive concurrency and budgets; time is passed in.

Concurrency grows while latencies are good, and is halved when the endpoint pushes back (429, 503, a
timeout), like TCP's window. Waits follow the endpoint's headers, else back off exponentially.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from email.utils import parsedate_to_datetime

from raybatch.records.types import Request
from raybatch_openai.endpoint.options import OpenAIOptions

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 60.0
# longest wait at once
_MAX_WAIT_S = 3600.0
# answers before latencies are compared
_MIN_ANSWERS = 16
# weight of the latest answer in the running mean of latencies
_NEWEST = 0.1
# latency of a queue at the endpoint, in times of the best latency
_SLOW = 3.0
# fixed cost of an answer, in tokens
_TOKENS_OF_START = 16

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|us|h|m|s)")
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


class Concurrency:
    """Adapts the limit of samples in flight: call `answered` and `pushed_back`, read `limit`.

    It begins at `first` and never exceeds `most`.
    """

    def __init__(self, first: int, most: int) -> None:
        self._most = most
        self._size = float(min(first, most))
        self._is_probing = True
        self._cut_s = -math.inf
        self._num_answers = 0
        self._mean_s = 0.0
        self._best_s = math.inf
        self.num_cuts = 0

    @property
    def limit(self) -> int:
        return int(self._size)

    def answered(self, latency_s: float, num_tokens: int, *, is_full: bool) -> None:
        """Note an answer: the seconds from sending to its last byte, and its generated tokens.

        The limit only grows if it was reached (`is_full`).
        """
        token_s = latency_s / (_TOKENS_OF_START + num_tokens)
        self._num_answers += 1
        weight = max(_NEWEST, 1 / self._num_answers)
        self._mean_s += weight * (token_s - self._mean_s)
        if self._num_answers >= _MIN_ANSWERS:
            self._best_s = min(self._best_s, self._mean_s)
        if is_full and self._mean_s <= _SLOW * self._best_s:
            # doubles per round trip until the endpoint first pushes back
            self._size += 1 if self._is_probing else 1 / self._size
            self._size = min(self._size, self._most)

    def pushed_back(self, sent_s: float, now_s: float) -> None:
        """Halve the limit, because the overloaded endpoint refused a request sent at `sent_s`.

        Requests that were sent before the limit was last halved do not count.
        """
        if sent_s < self._cut_s:
            return
        self._is_probing = False
        self._cut_s = now_s
        self._size = max(1.0, self._size / 2)
        self.num_cuts += 1


class Budget:
    """A budget per minute, spent evenly: no minute exceeds it by more than one request.

    Each request is sent in full and paid off before the next one. `per_minute` None is no limit.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._per_s = math.inf if per_minute is None else per_minute / 60
        self._debt = 0.0
        self._seen_s = -math.inf

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next request may spend something."""
        self._pay(now_s)
        return self._debt / self._per_s

    def spend(self, amount: float, now_s: float) -> None:
        """Spend requests or tokens; a negative amount is a refund."""
        self._pay(now_s)
        # without a limit there is no debt
        self._debt = max(0.0, self._debt + amount) if self._per_s < math.inf else 0.0

    def _pay(self, now_s: float) -> None:
        if now_s > self._seen_s:
            self._debt = max(0.0, self._debt - (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s


def backoff_s(num_failures: int, jitter: float) -> float:
    """Return the seconds to wait after `num_failures` (from 1) failures in a row.

    `jitter` is a random number in [0, 1), so that replicas do not retry together.
    """
    longest = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 16))
    return longest * (0.5 + jitter / 2)


def retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """Return the seconds to wait that response headers ask for; None if they ask for none.

    Names of headers are in lower case; `wall_s` is the current time in seconds since 1970.
    """
    if (milliseconds := _number(headers.get("retry-after-ms", ""))) is not None:
        return _bounded(milliseconds / 1000)
    text = headers.get("retry-after", "").strip()
    if (seconds := _number(text)) is not None:
        return _bounded(seconds)
    try:
        return _bounded(parsedate_to_datetime(text).timestamp() - wall_s)
    except (TypeError, ValueError, OverflowError):
        return None


def until_reset_s(headers: Mapping[str, str], tokens: int, wall_s: float) -> float:
    """Return the seconds until the rate limits in response headers allow another request, or 0.

    Arguments as in `retry_after_s`; `tokens` is the approximate size of the next request.
    """
    wait_s = 0.0
    for kind, needed in (("requests", 1), ("tokens", max(1, tokens))):
        left = _number(headers.get(f"x-ratelimit-remaining-{kind}", ""))
        whole = _number(headers.get(f"x-ratelimit-limit-{kind}", ""))
        if left is None or left < 0 or left >= needed or (whole is not None and left >= whole):
            continue
        reset_s = _duration_s(headers.get(f"x-ratelimit-reset-{kind}", ""), wall_s)
        wait_s = max(wait_s, reset_s or 0.0)
    return wait_s


def _duration_s(text: str, wall_s: float) -> float | None:
    """Return the seconds of "6m0s", "17ms", "1.5", or until a moment in seconds since 1970."""
    text = text.strip()
    if (seconds := _number(text)) is not None:
        # no limit is reset in 30 years
        return _bounded(seconds - wall_s if seconds > 1e9 else seconds)
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return _bounded(sum(float(number) * _UNITS_S[unit] for number, unit in parts))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _bounded(seconds: float) -> float:
    return min(seconds, _MAX_WAIT_S) if seconds >= 0 else 0.0


def row_refusal(request: Request, options: OpenAIOptions, *, is_embedding: bool) -> str:
    """Return why a row would be refused and need not be sent; "" for a valid one."""
    prompt = request.prompt_token_ids
    endpoint, is_chat = options.endpoint, "messages" in request.payload
    if is_embedding and is_chat:
        return "InvalidPrompt: embeddings need texts, and the row has messages"
    if endpoint == "chat" and not is_chat:
        return "InvalidPrompt: the chat endpoint needs messages, and the row has none"
    if endpoint == "completions" and is_chat:
        return "InvalidPrompt: the completions endpoint needs texts, and the row has messages"
    if is_chat or "prompt" in request.payload:
        return ""
    if not len(prompt):
        return "EmptyPrompt: the prompt has no tokens"
    if prompt.min() < 0:
        return "BadTokenId: token ids must be at least 0"
    limit = options.max_model_len
    if limit is not None and len(prompt) >= limit + is_embedding:
        return f"PromptTooLong: {len(prompt)} tokens, the model's limit is {limit}"
    return ""


def fit_output(request: Request, options: OpenAIOptions) -> Request:
    """Return the request with an output limit that fits into the model's context.

    Unchanged if `max_model_len` is None or the prompt is not token ids. Servers refuse more.
    """
    limit, sampling = options.max_model_len, request.sampling
    if limit is None or request.payload:
        return request
    room = limit - len(request.prompt_token_ids)
    if sampling.max_tokens <= room:
        return request
    min_tokens = min(sampling.min_tokens, room)
    return replace(request, sampling=replace(sampling, max_tokens=room, min_tokens=min_tokens))
