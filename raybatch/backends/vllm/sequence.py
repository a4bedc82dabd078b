"""One sample of one row in the vLLM backend, waiting or running, and what vLLM says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raybatch.records.types import Request, SequenceState, TokenIds, Vector

TokenLogprobs = tuple[TokenIds, npt.NDArray[np.float32]]

NO_TOKENS: TokenIds = np.empty(0, np.int32)


class RequestRefused(ValueError):  # noqa: N818 - the name is seen in outputs
    """vLLM does not take a request; the engine goes on without it."""


class Progress(NamedTuple):
    """What a request has so far; `logprobs` is empty where none were asked for."""

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
        request: what was asked.
        sample_idx: 0..n-1.
        before: what another engine has made of it, and this one goes on from; None begins anew.
        has_started: here or elsewhere, so that it is not given back.
        num_told: generated tokens that are known outside.
    """

    key: str
    request: Request
    sample_idx: int
    before: SequenceState | None = None
    has_started: bool = False
    num_told: int = 0

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
