"""What the fake backend answers: a pure function of prompt, seed and options."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raybatch.records.payload import POOLING
from raybatch.records.types import FinishReason, Request, Sampling, Task, TokenIds, Vector

_VOCAB_SIZE = 256
# numbers of one vector
_SIZES: Mapping[Task, int] = {"embed": 8, "classify": 3, "score": 1}

Lengths = Literal["max", "hash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeAnswer:
    """All tokens of one sample, and how it ends."""

    tokens: TokenIds
    finish_reason: FinishReason
    stop_reason: int | None = None


def fake_answer(
    request: Request, sample_idx: int, *, lengths: Lengths, max_model_len: int
) -> FakeAnswer:
    """Return what the fake backend generates for one sample of a request."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    tokens = fake_tokens(prompt, request.seed, sampling, sample_idx, lengths=lengths)
    is_whole = len(tokens) == sampling.max_tokens
    may_stop = np.arange(1, len(tokens) + 1) >= sampling.min_tokens
    stops = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids) & may_stop)
    max_new = max_model_len - len(prompt)
    if len(stops) and stops[0] < max_new:
        tokens = tokens[: stops[0] + 1]
        return FakeAnswer(tokens=tokens, finish_reason="stop", stop_reason=int(tokens[-1]))
    if len(tokens) > max_new:
        return FakeAnswer(tokens=tokens[:max_new], finish_reason="length")
    return FakeAnswer(tokens=tokens, finish_reason="length" if is_whole else "stop")


def fake_tokens(
    prompt_token_ids: TokenIds,
    seed: int,
    sampling: Sampling,
    sample_idx: int = 0,
    *,
    lengths: Lengths = "max",
) -> TokenIds:
    """Return the tokens that the fake backend generates where nothing stops it, int32."""
    mixed = np.array([seed & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF, sample_idx], np.uint32)
    prompt = np.ascontiguousarray(prompt_token_ids, np.int32)
    code = zlib.crc32(mixed.tobytes(), zlib.crc32(prompt.tobytes()))
    num_tokens = sampling.max_tokens
    if lengths == "hash":
        num_tokens = max(sampling.min_tokens, 1 + code % num_tokens)
    positions = np.arange(num_tokens, dtype=np.int64)
    return ((code + positions * (2 * (code >> 16) + 1)) % _VOCAB_SIZE).astype(np.int32)


def fake_vector(request: Request, task: Task) -> Vector:
    """Return what the fake backend makes of a prompt for a pooling task.

    Prompt, adapter and options decide it alone. Embeddings have length 1 and probabilities the sum
    1, unless the row asks for bare numbers.
    """
    payload = json.dumps(request.payload, sort_keys=True).encode()
    prompt = np.ascontiguousarray(request.prompt_token_ids, np.int32)
    code = zlib.crc32(payload, zlib.crc32(prompt.tobytes()))
    options = request.payload.get(POOLING, {})
    size = options.get("dimensions", _SIZES[task])
    vector: Vector = np.random.default_rng(code).random(size, np.float32) + np.float32(0.1)
    if options.get("use_activation") is False or task == "score":
        return vector
    length = np.linalg.norm(vector) if task == "embed" else vector.sum()
    return np.asarray(vector / length, np.float32)
