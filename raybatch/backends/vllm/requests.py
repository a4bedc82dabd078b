"""Records between the backend and vLLM's engine, and scores of rows with two requests each.

Nothing here knows vLLM itself: names of its tasks are texts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from raybatch.backends.base import ScoreForm
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch.errors import ConfigError
from raybatch.records.payload import DOCUMENT_AT
from raybatch.records.types import (
    NO_TOKENS,
    Capacity,
    Completion,
    Request,
    SequenceState,
    Task,
    TokenIds,
    TokenLogprobs,
    Vector,
)

# gives a completion its text, and what was taken out of it
Parse = Callable[[Request, Completion], Completion]


class RequestRefused(ValueError):  # noqa: N818 - the name is seen in outputs
    """vLLM refused a request; the engine continues without it."""


class Progress(NamedTuple):
    """What a request has generated so far; `logprobs` is empty if none were requested."""

    token_ids: TokenIds = NO_TOKENS
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Answer(NamedTuple):
    """The result of a request that has ended.

    `is_finite` is False if the model gave NaN or infinite numbers. `num_prompt_tokens` counts
    images with as many tokens as the model reads for them.
    """

    key: str
    progress: Progress
    finish_reason: str
    stop_reason: str | int | None
    is_finite: bool
    vector: Vector | None = None
    num_prompt_tokens: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class VllmSequence:
    """One sample of one request, as the backend tracks it."""

    key: str  # name inside vLLM, never used again
    request: Request
    sample_idx: int
    before: SequenceState | None = None  # state from another engine to resume
    has_started: bool = False  # here or elsewhere; `drain` leaves it
    num_reported: int = 0  # generated tokens that `begun` has returned

    @property
    def tokens_before(self) -> TokenIds:
        return NO_TOKENS if self.before is None else self.before.token_ids

    def state(self, progress: Progress) -> SequenceState:
        """Return the state from which another engine can continue this sequence.

        `progress` is what vLLM has generated; tokens from before the sequence came here are put in
        front.
        """
        tokens, num_cached, logprobs = progress
        if (before := self.before) is not None:
            tokens = np.concatenate((before.token_ids, tokens))
            logprobs = (*(before.logprobs or ()), *logprobs)
            num_cached = before.num_cached_tokens
        return SequenceState(
            request=self.request,
            sample_idx=self.sample_idx,
            token_ids=tokens,
            num_cached_tokens=num_cached,
            logprobs=None if self.request.sampling.logprobs is None else logprobs,
        )


class InnerEngine(Protocol):
    """The engine interface that `VllmBackend` uses; see `VllmEngine` for each method."""

    def capacity(self) -> Capacity: ...
    def vocab_size(self) -> int: ...
    def eos_token_ids(self) -> frozenset[int]: ...
    def add(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> None: ...
    def step(self) -> list[Answer]: ...
    def take(self, keys: Sequence[str]) -> dict[str, Progress]: ...
    def progress(self, key: str) -> Progress: ...
    def num_tokens(self, key: str) -> int: ...
    def has_started(self, key: str) -> bool: ...
    def generated_tokens(self) -> int: ...
    def num_running(self) -> int: ...
    def num_steps(self) -> int: ...
    def num_preemptions(self) -> int: ...
    def kv_used_fraction(self) -> float: ...
    def weight_counters(self) -> WeightCounters: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


def pooling_task(
    task: Task, supported: Collection[str], *, form: ScoreForm, num_labels: int
) -> str:
    """Return the name of vLLM's pooling task that performs `task`; raise ConfigError for none.

    Args:
        supported: vLLM's pooling tasks that the model supports.
        form: how a score gets its query and document; "apart" is by two embeddings.
        num_labels: number of values that the model gives as a classifier.
    """
    wanted: tuple[str, ...] = (task,)
    if task == "score":
        wanted = ("embed", "token_embed") if form == "apart" else ("classify",)
    vllm_task = next((name for name in wanted if name in supported), None)
    if vllm_task is None:
        available = ", ".join(sorted(supported)) or "none"
        raise ConfigError(
            f"task {task!r} needs a model that supports vLLM's pooling task "
            f"{' or '.join(wanted)}; this one supports: {available}. Choose another model, or "
            "convert it with engine_kwargs.convert"
        )
    if task == "score" and form != "apart" and num_labels != 1:
        raise ConfigError(
            "task 'score' needs a model that gives one number, and this classifier gives "
            f"{num_labels}; use task 'classify'"
        )
    return vllm_task


def similarity(query: Vector, document: Vector) -> Vector:
    """Return the score of a query and a document from their embeddings, float32 [1], as vLLM does.

    Each embedding is [D], scored by cosine similarity, or [T, D] with one vector per token, scored
    by late interaction: the sum over query tokens of the largest product with a document token.
    """
    if query.ndim == 2:
        # every token of the query takes the token of the document that is most like it
        score = (query @ document.T).max(axis=1).sum()
    else:
        lengths = [max(float(np.linalg.norm(v)), 1e-8) for v in (query, document)]
        score = query @ document / (lengths[0] * lengths[1])
    return np.array([score], np.float32)


@dataclass(slots=True)
class _Pair:
    """Query and document of one row: those in the engine, and what came of the others."""

    open: list[str]
    done: dict[str, Answer] = field(default_factory=dict)


class ScorePairs:
    """An engine for scores: sends query and document of a row to `engine` as two requests.

    Their embeddings give the score. `engine` belongs to this object.
    """

    def __init__(self, engine: InnerEngine) -> None:
        self._engine = engine
        self.capacity = engine.capacity
        self.vocab_size = engine.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        self.close = engine.close
        self.num_steps = engine.num_steps
        self.num_preemptions = engine.num_preemptions
        self.kv_used_fraction = engine.kv_used_fraction
        self.weight_counters = engine.weight_counters
        self.generated_tokens = engine.generated_tokens
        self._pairs: dict[str, _Pair] = {}
        self._row_of: dict[str, str] = {}

    def add(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> None:
        """Queue query and document of a row; raise RequestRefused if vLLM refuses one of them."""
        others = {name: value for name, value in params.items() if name != DOCUMENT_AT}
        border = params.get(DOCUMENT_AT)
        if border is None:
            raise RequestRefused(
                "task 'score' needs a query and a document in each row; this request has one text"
            )
        halves = [f"{key}-query", f"{key}-document"]
        self._engine.add(halves[0], prompt_token_ids[:border], others)
        try:
            self._engine.add(halves[1], prompt_token_ids[border:], others)
        except RequestRefused:
            self._engine.take([halves[0]])
            raise
        self._pairs[key] = _Pair(halves)
        self._row_of.update(dict.fromkeys(halves, key))

    def step(self) -> list[Answer]:
        """Run one step and return the rows whose two requests have both ended by now."""
        answers = []
        for half in self._engine.step():
            key = self._row_of.pop(half.key)
            pair = self._pairs[key]
            pair.open.remove(half.key)
            pair.done[half.key] = half
            if not pair.open:
                del self._pairs[key]
                answers.append(_joined(key, pair.done))
        return answers

    def take(self, keys: Sequence[str]) -> dict[str, Progress]:
        """Abort rows; the embeddings that they have so far are lost."""
        pairs = [self._pairs.pop(key) for key in keys]
        halves = [half for pair in pairs for half in pair.open]
        self._engine.take(halves)
        for half in halves:
            del self._row_of[half]
        return {key: Progress() for key in keys}

    def progress(self, key: str) -> Progress:
        """Return an empty progress: a row has nothing that could move to another engine."""
        return Progress()

    def num_tokens(self, key: str) -> int:
        return 0

    def has_started(self, key: str) -> bool:
        """Return whether query or document of a row has ever been scheduled."""
        pair = self._pairs[key]
        return bool(pair.done) or any(self._engine.has_started(half) for half in pair.open)

    def num_running(self) -> int:
        """Return the number of rows of which query or document has been scheduled."""
        return sum(map(self.has_started, self._pairs))

    def reset(self) -> None:
        self._engine.reset()
        self._pairs.clear()
        self._row_of.clear()


def _joined(key: str, halves: Mapping[str, Answer]) -> Answer:
    query, document = halves[f"{key}-query"], halves[f"{key}-document"]
    num_cached = query.progress.num_cached_tokens + document.progress.num_cached_tokens
    vector = None
    if query.vector is not None and document.vector is not None:
        vector = similarity(query.vector, document.vector)
    reasons = {query.finish_reason, document.finish_reason} - {"stop"}
    return Answer(
        key,
        Progress(num_cached_tokens=num_cached),
        min(reasons, default="stop"),
        None,
        query.is_finite and document.is_finite,
        vector,
    )
