"""Sends the rows of one replica to an OpenAI-compatible endpoint.

Rows are sent in order of arrival, with at most `Concurrency.limit` samples in flight; retries
go first. `poll` sends, and waits for answers a few milliseconds at most; the requests
run in the thread of `HttpThread`.
"""

import heapq
import itertools
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from raybatch.backends.intake import IntakeBackend
from raybatch.config import environment
from raybatch.errors import EndpointError, EndpointUnreachable
from raybatch.records.types import (
    UNBOUNDED_TOKENS,
    Capacity,
    Completion,
    ReplicaStats,
    Request,
    SequenceState,
    Task,
)
from raybatch_openai.endpoint import body as bodies
from raybatch_openai.endpoint import http, rate_limits
from raybatch_openai.endpoint.options import OpenAIOptions, headers_of

_POLL_S = 0.005
# context length if unknown
_NO_LIMIT = 1 << 22
# consecutive rows that failed for good before it is in doubt
# whether the endpoint answers anything
_MAX_IN_VAIN = 10
# rows refused in the same way, before any answer, that end the run
_MAX_REFUSED = 20
# a wait that is worth a line in the log
_LONG_WAIT_S = 30.0
# for the first request, at the start
_PROBE_S = 30.0

# below the logger whose level RAYBATCH_LOG_LEVEL sets
_logger = logging.getLogger("raybatch.openai")


@dataclass(slots=True, eq=False)
class Row:
    """A request in flight, or one that waits for its next retry."""

    request: Request
    samples: list[int]  # unfinished ones; empty for a mere test request
    num_tries: int = 0  # requests sent for it
    key: int = 0  # of the request in flight
    sent_s: float = 0.0  # when it was sent
    tokens: int = 0  # charged to the budget

    @property
    def weight(self) -> int:
        """Number of samples in the request."""
        return self.request.sampling.n

    def states(self) -> list[SequenceState]:
        return [SequenceState(request=self.request, sample_idx=i) for i in self.samples]


class OpenAIBackend(IntakeBackend):
    """Implements the `Backend` protocol over HTTP.

    A row that moves to another replica while it is in flight is sent again from there.
    """

    def __init__(
        self,
        options: OpenAIOptions,
        model: str,
        headers: Mapping[str, str],
        *,
        task: Task = "generate",
        num_replicas: int = 1,
        proxy: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._options = options
        self._model = model
        self._is_embedding = task == "embed"
        self._clock = clock
        self._secrets = http.secrets_in(headers)
        self._http = http.HttpThread(options.base_url, headers, options.timeout_s, proxy=proxy)
        self._concurrency = rate_limits.Concurrency(
            options.first_concurrency, options.max_concurrency
        )
        self._budgets = tuple(
            rate_limits.Budget(None if total is None else total / num_replicas)
            for total in (options.requests_per_minute, options.tokens_per_minute)
        )
        self._keys = itertools.count()
        self._random = random.Random()
        self._in_flight: dict[int, Row] = {}
        # time of the retry, a serial number as tie-break, the row
        self._delayed: list[tuple[float, int, Row]] = []
        self._not_before_s = 0.0
        self._num_pushbacks = 0
        self._num_in_vain = 0
        # rows that failed for good, with errors, until the cause is known
        self._withheld: list[tuple[Row, str]] = []
        self._last_answered: Request | None = None
        # refused rows by kind of refusal; None once any row was answered
        self._num_refused: Counter[str] | None = Counter()
        # why no row can be answered; raised after all results were returned
        self._end: EndpointError | None = None
        # the same, unless a row in flight is answered
        self._doubt: EndpointError | None = None
        self._polled_s = clock()
        self._in_flight_s = 0.0
        self._num_retries = 0

    def capacity(self) -> Capacity:
        max_model_len = self._options.max_model_len or _NO_LIMIT
        return Capacity(
            kv_tokens=self._options.max_concurrency * max_model_len,
            max_model_len=max_model_len,
            max_num_seqs=self._options.max_concurrency,
            block_size=1,
        )

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        # an endpoint returns no partial answers
        return []

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        wanted = set(request_ids)
        rows = [r for r in self._in_flight.values() if r.samples and r.request.request_id in wanted]
        for row in rows:
            self._http.cancel(row.key)
            del self._in_flight[row.key]
        delayed = [e[2] for e in self._delayed if e[2].request.request_id in wanted]
        rows += [row for row in delayed if row.samples]
        self._delayed = [e for e in self._delayed if e[2] not in rows]
        heapq.heapify(self._delayed)
        rows += [row for row, _ in self._withheld if row.request.request_id in wanted]
        self._withheld = [e for e in self._withheld if e[0].request.request_id not in wanted]
        return self._withdraw(wanted, [state for row in rows for state in row.states()])

    def stats(self) -> ReplicaStats:
        num_running, limit = self._num_in_flight(), self._concurrency.limit
        self._counters.engine_s = self._in_flight_s
        return ReplicaStats(
            **asdict(self._counters),
            num_retries=self._num_retries,
            num_running=num_running,
            num_waiting=self._num_waiting()
            + sum(row.weight for _, _, row in self._delayed)
            + sum(row.weight for row, _ in self._withheld),
            kv_used_fraction=min(1.0, num_running / limit),
            concurrency=limit,
        )

    def close(self) -> None:
        self._http.close()

    def _step(self) -> list[Completion]:
        finished: list[Completion] = []
        for answer in self._http.collect(0.0 if self._failed or self._may_send() else _POLL_S):
            finished += self._take(answer)
        if self._doubt is not None and not self._in_flight:
            self._end = self._doubt
        if self._end is not None and not finished and not self._failed:
            raise self._end
        while self._may_send():
            self._send(self._next_row())
        now_s = self._clock()
        if self._in_flight:
            self._in_flight_s += now_s - self._polled_s
        self._polled_s = now_s
        return finished

    def _find_failure(self, state: SequenceState) -> Completion | None:
        is_embedding = self._is_embedding
        error = rate_limits.row_refusal(state.request, self._options, is_embedding=is_embedding)
        return _error(state, error) if error else None

    def _is_due(self) -> bool:
        return bool(self._delayed) and self._delayed[0][0] <= self._clock()

    def _next_row(self) -> Row:
        """Pop the next row to send, with all of its queued samples."""
        if self._is_due():
            return heapq.heappop(self._delayed)[2]
        state, is_restored = self._take_next()
        queue, request = self._restored if is_restored else self._waiting, state.request
        samples = [state.sample_idx]
        while queue and queue[0].request.request_id == request.request_id:
            samples.append(queue.popleft().sample_idx)
        if not self._is_embedding:
            request = rate_limits.fit_output(request, self._options)
        return Row(request, samples)

    def _num_in_flight(self) -> int:
        return sum(row.weight for row in self._in_flight.values())

    def _may_send(self) -> bool:
        now_s = self._clock()
        return (
            self._end is None
            and self._doubt is None
            and now_s >= self._not_before_s
            and not any(budget.wait_s(now_s) for budget in self._budgets)
            and self._num_in_flight() < self._concurrency.limit
            and (self._is_due() or (self._num_waiting() > 0 and not self._withheld))
        )

    def _send(self, row: Row) -> None:
        now_s, sampling = self._clock(), row.request.sampling
        path, body = self._body_of(row.request)
        row.key, row.sent_s = next(self._keys), now_s
        row.num_tries += 1
        # an output bounded by the context only has an unknown size
        longest = sampling.max_tokens if sampling.max_tokens < UNBOUNDED_TOKENS else 0
        row.tokens = len(row.request.prompt_token_ids) + longest * sampling.n
        for budget, amount in zip(self._budgets, (1, row.tokens), strict=True):
            budget.spend(amount, now_s)
        self._in_flight[row.key] = row
        self._http.send(row.key, path, body)
        self._counters.num_steps += 1
        self._num_retries += row.num_tries > 1

    def _body_of(self, request: Request) -> tuple[str, dict[str, Any]]:
        ask = bodies.embedding_body if self._is_embedding else bodies.body_of
        return ask(request, self._options, self._model)

    def _take(self, answer: http.HttpAnswer) -> list[Completion]:
        """Return the samples or errors of an answer; none if the row is retried."""
        row = self._in_flight.pop(answer.key, None)
        if row is None:
            return []  # cancelled meanwhile
        verdict = http.verdict_on(answer)
        if verdict == "end":
            message = http.message_of(answer, self._secrets)
            self._end = EndpointError(f"{self._options.base_url} refuses all requests: {message}")
            return []
        if verdict == "again":
            return self._again(row, answer)
        self._num_pushbacks = self._num_in_vain = 0
        failed = [each for failed, why in self._withheld for each in _errors(failed, why)]
        self._withheld = []
        if verdict == "row":
            error = http.row_error(answer, row.num_tries, self._secrets)
            return failed + self._refused(row, answer, error)
        return failed + self._answered(row, answer)

    def _refused(self, row: Row, answer: http.HttpAnswer, error: str) -> list[Completion]:
        """Return the errors of a row; stop sending if the endpoint refuses all rows alike."""
        if self._num_refused is None or http.is_about_row(answer):
            return _errors(row, error)
        _, body = self._body_of(row.request)
        kind = http.kind_of(answer, seed=body.get("seed"))
        self._num_refused[kind] += 1
        if self._num_refused[kind] < _MAX_REFUSED:
            return _errors(row, error)
        name = http.field_named(answer, body)
        way_out = "if only these rows cause it, remove them from the input"
        if name is not None:
            way_out = f"the cause is {name!r}: {bodies.way_out(name, self._options)}"
        self._doubt = EndpointError(
            f"{self._options.base_url} has answered no row yet and refused {_MAX_REFUSED} in the "
            f"same way, so no others are sent; {way_out}. Its error: {error}"
        )
        return _errors(row, error)

    def _answered(self, row: Row, answer: http.HttpAnswer) -> list[Completion]:
        now_s = self._clock()
        try:
            read = bodies.embedding_of if self._is_embedding else bodies.completions_of
            samples = read(row.request, json.loads(answer.body), self._options)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            says_why = isinstance(error, bodies.BadAnswer)
            what = str(error) if says_why else "the answer is no JSON of the API"
            message = http.without_secrets(f"{what}: {answer.body[:200]!r}", self._secrets)
            return self._refused(row, answer, f"BadAnswer: {message}")
        self._num_refused = self._doubt = None
        self._last_answered = row.request
        num_generated = sum(
            len(s.token_ids) if s.num_generated_tokens is None else s.num_generated_tokens
            for s in samples
        )
        first = samples[0]
        prompt = row.request.prompt_token_ids
        num_input = len(prompt) if first.num_input_tokens is None else first.num_input_tokens
        self._concurrency.answered(
            answer.seconds,
            num_generated,
            is_full=self._num_in_flight() + row.weight >= self._concurrency.limit,
        )
        self._budgets[1].spend(num_input + num_generated - row.tokens, now_s)
        self._pause(rate_limits.until_reset_s(answer.headers, row.tokens, time.time()))
        self._counters.prompt_tokens += num_input
        self._counters.cached_tokens += first.num_cached_tokens
        self._counters.generated_tokens += num_generated
        return [sample for sample in samples if sample.sample_idx in row.samples]

    def _again(self, row: Row, answer: http.HttpAnswer) -> list[Completion]:
        now_s, wait_s = self._clock(), rate_limits.retry_after_s(answer.headers, time.time())
        if http.is_pushback(answer):
            num_cuts = self._concurrency.num_cuts
            self._concurrency.pushed_back(row.sent_s, now_s)
            if self._concurrency.num_cuts > num_cuts:
                self._num_pushbacks += 1
                if wait_s is None:
                    self._pause(rate_limits.backoff_s(self._num_pushbacks, self._random.random()))
        if wait_s is None:
            wait_s = rate_limits.backoff_s(row.num_tries, self._random.random())
        elif http.is_pushback(answer):
            self._pause(wait_s)
        if row.num_tries <= self._options.max_retries:
            heapq.heappush(self._delayed, (now_s + wait_s, next(self._keys), row))
            return []
        self._num_in_vain += 1
        error = http.row_error(answer, row.num_tries, self._secrets)
        if self._num_in_vain < _MAX_IN_VAIN:
            return _errors(row, error)
        if self._last_answered is None or not row.samples:
            self._end = EndpointError(
                f"{self._options.base_url} does not answer any more: {self._num_in_vain} requests "
                f"in a row failed; the last error: {error}"
            )
            return []
        if not self._withheld:
            _logger.warning(
                "%d consecutive rows failed; sending a row again that %s has answered, to see "
                "whether it still answers; last error: %s",
                self._num_in_vain,
                self._options.base_url,
                error,
            )
            heapq.heappush(self._delayed, (now_s, next(self._keys), self._repeated_row()))
        self._withheld.append((row, error))
        return []

    def _repeated_row(self) -> Row:
        """Return the last answered row, limited to one token."""
        request = self._last_answered
        assert request is not None
        sampling = replace(request.sampling, n=1, max_tokens=1, min_tokens=0)
        return Row(replace(request, sampling=sampling), [])

    def _pause(self, wait_s: float) -> None:
        """Pause sending for `wait_s` seconds."""
        until_s = self._clock() + wait_s
        if wait_s >= _LONG_WAIT_S and until_s > self._not_before_s + 1:
            _logger.warning(
                "%s asks to wait: sending no requests for %.0f s", self._options.base_url, wait_s
            )
        self._not_before_s = max(self._not_before_s, until_s)


def _errors(row: Row, error: str) -> list[Completion]:
    return [_error(state, error) for state in row.states()]


def _error(state: SequenceState, error: str) -> Completion:
    return Completion(
        request_id=state.request.request_id,
        sample_idx=state.sample_idx,
        finish_reason="error",
        error=error,
    )


def create(
    options: OpenAIOptions, model: str, *, task: Task = "generate", num_replicas: int = 1
) -> OpenAIBackend:
    """Check that an endpoint answers and accepts the key, and return a backend for it.

    Raises ConfigError if an environment variable or the key file is missing here, and EndpointError
    if the endpoint cannot be reached or refuses the key.
    """
    headers, proxy = headers_of(options, environment()), http.proxy_of(options.base_url)
    _probe(options, headers, proxy)
    name = model if options.model is None else options.model
    return OpenAIBackend(options, name, headers, task=task, num_replicas=num_replicas, proxy=proxy)


def _probe(options: OpenAIOptions, headers: Mapping[str, str], proxy: str | None) -> None:
    """Request the list of models; raise EndpointError if the endpoint cannot answer."""
    timeout_s = min(options.timeout_s, _PROBE_S)
    thread = http.HttpThread(options.base_url, headers, timeout_s, proxy=proxy)
    try:
        thread.send(0, "/models", None)
        answers = thread.collect(_PROBE_S + 1)
    finally:
        thread.close()
    for answer in answers:
        message = http.message_of(answer, http.secrets_in(headers))
        if answer.failure == "refused":
            raise EndpointUnreachable(
                f"{options.base_url} cannot be reached ({message}); start the server, or fix "
                "base_url"
            )
        # some endpoints have no list of models, and some keys may not read it
        if answer.status == 401:
            raise EndpointError(
                f"{options.base_url} refuses the API key ({message}); set a valid one in the "
                "environment variable that api_key_env names, or in api_key_file"
            )
