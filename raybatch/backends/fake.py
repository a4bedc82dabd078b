"""A backend without a model: answers follow from prompt, seed and options alone.

For tests of everything around an engine, for dry runs of a pipeline, and for measuring the overhead
of the pool. It can fail in every way in which an engine can.
"""

import os
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from raybatch.errors import ConfigError
from raybatch.types import (
    Capacity,
    Completion,
    FinishReason,
    ReplicaStats,
    Request,
    Sampling,
    SequenceState,
    TokenIds,
)

_VOCAB_SIZE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOptions:
    """Options of the fake backend.

    Args:
        step_s: seconds that one step takes.
        max_num_seqs: sequences that run at once.
        max_model_len: longest prompt plus output.
        lengths: "max" always generates `max_tokens`; "hash" from 1 to `max_tokens`.
        crash_on: a prompt with this token id ends the process as soon as it runs.
        raise_on: a prompt with this token id makes `poll` raise, as a broken engine does.
        error_on: a prompt with this token id becomes an error completion.
        start_s: seconds that a start takes.
        fail_start: every start raises.
        marks_dir: existing directory in which each start leaves a mark; needed by the next two.
        num_failing_starts: so many first starts raise.
        num_slow_starts: so many first started engines take `slow_step_s` per step.
        slow_step_s: see `num_slow_starts`.
    """

    step_s: float = 0.0
    max_num_seqs: int = 64
    max_model_len: int = 32768
    lengths: Literal["max", "hash"] = "max"
    crash_on: int | None = None
    raise_on: int | None = None
    error_on: int | None = None
    start_s: float = 0.0
    fail_start: bool = False
    marks_dir: str | None = None
    num_failing_starts: int = 0
    num_slow_starts: int = 0
    slow_step_s: float = 0.1

    def __post_init__(self) -> None:
        if self.marks_dir is None and (self.num_failing_starts or self.num_slow_starts):
            raise ConfigError(
                "FakeOptions.marks_dir must name a directory when num_failing_starts or "
                "num_slow_starts is set"
            )


@dataclass(slots=True, eq=False)
class _Sequence:
    request: Request
    sample_idx: int
    tokens: TokenIds
    finish_reason: FinishReason
    num_cached_tokens: int
    end_step: int


class FakeBackend:
    """Follows the `Backend` protocol with answers that `fake_tokens` predicts."""

    def __init__(self, options: FakeOptions) -> None:
        start = _mark_start(options.marks_dir)
        time.sleep(options.start_s)
        if options.fail_start or start < options.num_failing_starts:
            raise RuntimeError("the fake backend was told to fail its start")
        self._options = options
        self._step_s = options.slow_step_s if start < options.num_slow_starts else options.step_s
        self._waiting: deque[SequenceState] = deque()
        self._running: dict[tuple[int, int], _Sequence] = {}
        # step at which sequences end, so that a step costs nothing per running sequence
        self._ending: dict[int, list[_Sequence]] = {}
        self._num_open: dict[int, int] = {}
        self._seen_groups: set[int] = set()
        self._failed: list[Completion] = []
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._engine_s = 0.0

    def capacity(self) -> Capacity:
        return Capacity(
            kv_tokens=self._options.max_num_seqs * self._options.max_model_len,
            max_model_len=self._options.max_model_len,
            max_num_seqs=self._options.max_num_seqs,
            block_size=16,
        )

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            error = self._row_error(request)
            if error:
                # one completion, whatever n is: this is what an engine owes at least
                self._num_open[request.request_id] = 1
                self._failed.append(
                    Completion(request_id=request.request_id, finish_reason="error", error=error)
                )
                continue
            self._num_open[request.request_id] = request.sampling.n
            for sample_idx in range(request.sampling.n):
                self._waiting.append(
                    SequenceState(
                        request=request, sample_idx=sample_idx, token_ids=np.empty(0, np.int32)
                    )
                )

    def poll(self) -> list[Completion]:
        if not self._num_open:
            return []
        began = time.perf_counter()
        self._num_steps += 1
        while self._waiting and len(self._running) < self._options.max_num_seqs:
            self._start(self._waiting.popleft())
        if self._step_s:
            time.sleep(self._step_s)
        self._num_generated_tokens += len(self._running)
        finished = self._failed
        self._failed = []
        for sequence in self._ending.pop(self._num_steps, ()):
            if self._running.pop(_key(sequence), None) is not None:
                finished.append(_completion(sequence))
        for completion in finished:
            self._close_sample(completion.request_id)
        self._engine_s += time.perf_counter() - began
        return finished

    def num_unfinished(self) -> int:
        return len(self._num_open)

    def drain(self) -> list[Request]:
        started = {request_id for request_id, _ in self._running}
        kept: deque[SequenceState] = deque()
        drained: dict[int, Request] = {}
        for state in self._waiting:
            request = state.request
            is_whole = self._num_open.get(request.request_id) == request.sampling.n
            if is_whole and request.request_id not in started and not len(state.token_ids):
                drained[request.request_id] = request
            else:
                kept.append(state)
        self._waiting = kept
        for request_id in drained:
            del self._num_open[request_id]
        return list(drained.values())

    def export(self, request_ids: Sequence[int]) -> list[SequenceState]:
        wanted = set(request_ids)
        states = []
        for key, sequence in list(self._running.items()):
            if key[0] in wanted:
                num_left = sequence.end_step - self._num_steps
                states.append(
                    SequenceState(
                        request=sequence.request,
                        sample_idx=sequence.sample_idx,
                        token_ids=sequence.tokens[: len(sequence.tokens) - num_left],
                        num_cached_tokens=sequence.num_cached_tokens,
                    )
                )
                del self._running[key]
                self._ending[sequence.end_step].remove(sequence)
                self._close_sample(key[0])
        return states

    def restore(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            request_id = state.request.request_id
            self._num_open[request_id] = self._num_open.get(request_id, 0) + 1
            self._waiting.append(state)

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_used_fraction=len(self._running) / self._options.max_num_seqs,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            engine_s=self._engine_s,
        )

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._ending.clear()
        self._num_open.clear()

    def _start(self, state: SequenceState) -> None:
        request, options = state.request, self._options
        prompt = request.prompt_token_ids
        if options.crash_on is not None and options.crash_on in prompt:
            os._exit(1)
        if options.raise_on is not None and options.raise_on in prompt:
            raise RuntimeError("the fake backend was told to break on this prompt")
        tokens = fake_tokens(
            prompt, request.seed, request.sampling, state.sample_idx, lengths=options.lengths
        )
        sequence = _Sequence(
            request=request,
            sample_idx=state.sample_idx,
            tokens=tokens,
            finish_reason="length" if len(tokens) == request.sampling.max_tokens else "stop",
            num_cached_tokens=self._cached(request),
            end_step=self._num_steps + len(tokens) - len(state.token_ids) - 1,
        )
        self._num_prompt_tokens += len(prompt)
        self._num_cached_tokens += sequence.num_cached_tokens
        self._running[_key(sequence)] = sequence
        self._ending.setdefault(sequence.end_step, []).append(sequence)

    def _row_error(self, request: Request) -> str:
        options = self._options
        if options.error_on is not None and options.error_on in request.prompt_token_ids:
            return "ValueError: the fake backend was told to fail this prompt"
        num_tokens = len(request.prompt_token_ids)
        if num_tokens >= options.max_model_len:
            return f"CapacityError: the prompt has {num_tokens} tokens of {options.max_model_len}"
        return ""

    def _cached(self, request: Request) -> int:
        if request.group_id is None:
            return 0
        is_known = request.group_id in self._seen_groups
        self._seen_groups.add(request.group_id)
        return request.prefix_len if is_known else 0

    def _close_sample(self, request_id: int) -> None:
        self._num_open[request_id] -= 1
        if not self._num_open[request_id]:
            del self._num_open[request_id]


def fake_tokens(
    prompt_token_ids: TokenIds,
    seed: int,
    sampling: Sampling,
    sample_idx: int = 0,
    *,
    lengths: Literal["max", "hash"] = "max",
) -> TokenIds:
    """Return the tokens that the fake backend generates, int32."""
    mixed = np.array([seed & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF, sample_idx], np.uint32)
    prompt = np.ascontiguousarray(prompt_token_ids, np.int32)
    code = zlib.crc32(mixed.tobytes(), zlib.crc32(prompt.tobytes()))
    num_tokens = sampling.max_tokens
    if lengths == "hash":
        num_tokens = max(sampling.min_tokens, 1 + code % num_tokens)
    positions = np.arange(num_tokens, dtype=np.int64)
    return ((code + positions * (2 * (code >> 16) + 1)) % _VOCAB_SIZE).astype(np.int32)


def _key(sequence: _Sequence) -> tuple[int, int]:
    return sequence.request.request_id, sequence.sample_idx


def _completion(sequence: _Sequence) -> Completion:
    return Completion(
        request_id=sequence.request.request_id,
        sample_idx=sequence.sample_idx,
        token_ids=sequence.tokens,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def _mark_start(marks_dir: str | None) -> int:
    """Leave a mark and return how many starts came before."""
    start = 0
    while marks_dir is not None:
        try:
            Path(marks_dir, f"start-{start}").touch(exist_ok=False)
        except FileExistsError:
            start += 1
        else:
            break
    return start
