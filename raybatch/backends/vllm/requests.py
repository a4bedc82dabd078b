"""What passes between the backend and vLLM's engine; nothing of vLLM is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raybatch.records.types import Capacity, Completion, Request, SequenceState, TokenIds, Vector

TokenLogprobs = tuple[TokenIds, npt.NDArray[np.float32]]

NO_TOKENS: TokenIds = np.empty(0, np.int32)
# gives a completion its text, and what was taken out of it
Parse = Callable[[Request, Completion], Completion]


class RequestRefused(ValueError):  # noqa: N818 - the name is seen in outputs
    """vLLM does not take a request; the engine goes on without it."""


class Progress(NamedTuple):
    """What a request has so far; `logprobs` is empty where none were requested."""

    token_ids: TokenIds
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...]


class Answer(NamedTuple):
    """A request that has ended; `is_finite` is False where what the model gave is no numbers.

    `num_prompt_tokens` counts images as the model reads them.
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
    """One sample of one request.

    Args:
        key: name inside vLLM, never used again.
        before: state from another engine to go on from; None begins anew.
        has_started: here or elsewhere; `drain` leaves it.
        num_reported: generated tokens that `begun` has returned.
    """

    key: str
    request: Request
    sample_idx: int
    before: SequenceState | None = None
    has_started: bool = False
    num_reported: int = 0

    @property
    def tokens_before(self) -> TokenIds:
        return NO_TOKENS if self.before is None else self.before.token_ids

    def state(self, progress: Progress | None) -> SequenceState:
        """Return prompt, tokens so far and what else another engine needs."""
        before, logprobs = self.before, () if progress is None else progress.logprobs
        tokens = NO_TOKENS if progress is None else progress.token_ids
        num_cached = 0 if progress is None else progress.num_cached_tokens
        if before is not None:
            tokens = np.concatenate((before.token_ids, tokens))
            logprobs = (*(before.logprobs or ()), *logprobs)
            num_cached = before.num_cached_tokens
        return SequenceState(
            request=self.request,
            sample_idx=self.sample_idx,
            token_ids=tokens,
            num_cached_tokens=num_cached,
            logprobs=None if self.request.sampling.logprobs is None else tuple(logprobs),
        )


class InnerEngine(Protocol):
    """What the backend needs of an engine; `VllmEngine` says what each method does."""

    def capacity(self) -> Capacity: ...
    def vocab_size(self) -> int: ...
    def eos_token_ids(self) -> frozenset[int]: ...
    def add(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> None: ...
    def step(self) -> list[Answer]: ...
    def take(self, keys: Sequence[str]) -> dict[str, Progress]: ...
    def progress(self, key: str) -> Progress: ...
    def num_tokens(self, key: str) -> int: ...
    def has_started(self, key: str) -> bool: ...
    def num_running(self) -> int: ...
    def num_preemptions(self) -> int: ...
    def kv_used_fraction(self) -> float: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
