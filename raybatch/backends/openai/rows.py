"""The rows of an endpoint backend: which are refused, which wait, which are sent again and when."""

import heapq
import itertools
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from raybatch.backends.openai.options import OpenAIOptions
from raybatch.records.types import Request


@dataclass(slots=True, eq=False)
class Row:
    """A request on its way."""

    request: Request
    samples: frozenset[int]  # that are not finished
    num_tries: int = 0  # requests that were sent for it
    key: int | None = None  # of the one that is in flight
    sent_s: float = 0.0  # when that was sent
    tokens: int = 0  # that the budget was charged for it

    @property
    def weight(self) -> int:
        """Samples that the endpoint works on."""
        return self.request.sampling.n


class Rows:
    """The rows that were handed over and are not finished; who adds one puts it into a line.

    Attributes:
        waiting: that were not sent yet.
        resumed: that began elsewhere, so that nobody gets them back; they go before the others.
    """

    def __init__(self) -> None:
        self._open: dict[int, Row] = {}
        self.waiting: deque[Row] = deque()
        self.resumed: deque[Row] = deque()
        # when to send again, a number that tells equal times apart, the row
        self._delayed: list[tuple[float, int, Row]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, row: Row) -> None:
        """Take a row in; raise ValueError where its request id is there already."""
        request_id = row.request.request_id
        if request_id in self._open:
            raise ValueError(f"request {request_id} is already in the backend")
        self._open[request_id] = row

    def delay(self, row: Row, due_s: float) -> None:
        """Send a row again, not before `due_s`."""
        heapq.heappush(self._delayed, (due_s, next(self._numbers), row))

    def has_next(self, now_s: float) -> bool:
        """Return whether a row may be sent now."""
        return self._is_due(now_s) or bool(self.resumed or self.waiting)

    def next(self, now_s: float) -> Row:
        """Take the row out of its line that is to be sent now."""
        if self._is_due(now_s):
            return heapq.heappop(self._delayed)[2]
        return (self.resumed or self.waiting).popleft()

    def _is_due(self, now_s: float) -> bool:
        return bool(self._delayed) and self._delayed[0][0] <= now_s

    def take_unsent(self) -> list[Request]:
        """Take all rows out that were not sent yet, in order."""
        requests = [row.request for row in self.waiting]
        self.waiting.clear()
        for request in requests:
            del self._open[request.request_id]
        return requests

    def finish(self, request_id: int, sample_idx: int) -> None:
        """Note a finished sample; after the last one the row is forgotten."""
        row = self._open.get(request_id)
        if row is not None:
            row.samples -= {sample_idx}
            if not row.samples:
                del self._open[request_id]

    def take_out(self, request_ids: Collection[int]) -> list[Row]:
        """Take rows out, in order of arrival, wherever they are; unknown ids are ignored."""
        wanted = set(request_ids)
        rows = [row for request_id, row in self._open.items() if request_id in wanted]
        for row in rows:
            del self._open[row.request.request_id]
        gone = set(map(id, rows))
        self.waiting = deque(row for row in self.waiting if id(row) not in gone)
        self.resumed = deque(row for row in self.resumed if id(row) not in gone)
        self._delayed = [entry for entry in self._delayed if id(entry[2]) not in gone]
        heapq.heapify(self._delayed)
        return rows

    def num_waiting_samples(self) -> int:
        """Return the samples of all rows in lines."""
        delayed = (row for _, _, row in self._delayed)
        return sum(row.weight for row in itertools.chain(self.resumed, self.waiting, delayed))


def row_refusal(request: Request, options: OpenAIOptions, *, is_embedding: bool) -> str:
    """Return the error of a row that the endpoint need not be sent; "" for one that it may be."""
    prompt = request.prompt_token_ids
    endpoint, is_chat = options.endpoint, "messages" in request.payload
    if is_embedding and is_chat:
        return "InvalidPrompt: embeddings are made of texts, and the row has messages"
    if endpoint == "chat" and not is_chat:
        return "InvalidPrompt: the chat endpoint takes messages, and the row has none"
    if endpoint == "completions" and is_chat:
        return "InvalidPrompt: the completions endpoint takes texts, and the row has messages"
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
    """Bound the output by the context, where its length is known; servers refuse more."""
    limit, sampling = options.max_model_len, request.sampling
    if limit is None or request.payload:
        return request
    room = limit - len(request.prompt_token_ids)
    if sampling.max_tokens <= room:
        return request
    min_tokens = min(sampling.min_tokens, room)
    return replace(request, sampling=replace(sampling, max_tokens=room, min_tokens=min_tokens))
