"""vLLM as a backend: rows and samples over an engine that knows requests alone.

             own line             inside vLLM
submit -->  not begun  -------->  waiting | running  -->  completions
restore ->  begun before -------> (first)

vLLM gets a few requests more than it can run, so that order, `drain` and moving rows stay here.
"""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np

from raybatch.backends.intake import IntakeBackend
from raybatch.backends.vllm_args import engine_args, vllm_options
from raybatch.backends.vllm_sampling import can_resume, sampling_params
from raybatch.backends.vllm_sequence import (
    Answer,
    Progress,
    RequestRefused,
    VllmSequence,
)
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.completions import completion_of
from raybatch.engine.model_source import resolve_model
from raybatch.engine.row_checks import RowLimits
from raybatch.errors import error_text
from raybatch.types import (
    Capacity,
    Completion,
    FinishReason,
    ReplicaStats,
    Request,
    SequenceState,
)

__all__ = ["InnerEngine", "VllmBackend", "create", "start_inner"]

# requests inside vLLM beyond those that it can run, as a share of these: what it admits while the
# results of a step are on their way
_LEAD_FRACTION = 1 / 8
_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
_ENVIRONMENT = {
    # the engine core in this process: its scheduler is read, and its memory is shared
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # on a CPU: OMP_NUM_THREADS counts, and engines of one host do not meet on its first cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class InnerEngine(Protocol):
    """What is asked of vLLM; `raybatch.backends.vllm_engine.VllmEngine` says what each does."""

    def capacity(self) -> Capacity: ...
    def vocab_size(self) -> int: ...
    def eos_token_ids(self) -> frozenset[int]: ...
    def add(self, key: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> None: ...
    def step(self) -> list[Answer]: ...
    def take(self, keys: Sequence[str]) -> dict[str, Progress]: ...
    def progress(self, key: str) -> Progress: ...
    def num_tokens(self, key: str) -> int: ...
    def has_started(self, key: str) -> bool: ...
    def num_running(self) -> int: ...
    def num_preemptions(self) -> int: ...
    def kv_used_fraction(self) -> float: ...
    def close(self) -> None: ...


class VllmBackend(IntakeBackend):
    """Follows the `Backend` protocol over vLLM.

    Each sample of a row is a request of its own with its own seed, so that it does not depend on
    the others.

    Args:
        engine: owned by this backend from here on.
    """

    def __init__(self, engine: InnerEngine) -> None:
        self._engine = engine
        self._capacity = engine.capacity()
        self._limits = RowLimits(
            vocab_size=engine.vocab_size(),
            max_model_len=self._capacity.max_model_len,
            kv_tokens=self._capacity.kv_tokens,
        )
        self._eos_token_ids = engine.eos_token_ids()
        max_num_seqs = self._capacity.max_num_seqs
        self._max_inside = max_num_seqs + max(1, int(max_num_seqs * _LEAD_FRACTION))
        super().__init__(self._limits.find_failure)
        self._inside: dict[str, VllmSequence] = {}
        self._keys = count(1)
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_recomputed_tokens = 0
        self._engine_s = 0.0

    def capacity(self) -> Capacity:
        return self._capacity

    def restore(self, states: Sequence[SequenceState]) -> None:
        """Go on with exported sequences, before those that have not started.

        Those whose answer would differ if they went on from their tokens begin anew.
        """
        super().restore(states)

    def poll(self) -> list[Completion]:
        began = time.perf_counter()
        completions = self._hand_over()
        if self._inside:
            self._num_steps += 1
            completions += [self._finish(answer) for answer in self._engine.step()]
        told = self._intake.close(completions)
        self._engine_s += time.perf_counter() - began
        return told

    def drain(self) -> list[Request]:
        unstarted = [s for s in self._inside.values() if not self._has_started(s)]
        self._intake.put_back(self._recall(unstarted))
        return super().drain()

    def begun(self, min_new_tokens: int) -> list[SequenceState]:
        states = []
        for key, sequence in self._inside.items():
            num_tokens = len(sequence.tokens_before) + self._engine.num_tokens(key)
            if num_tokens >= sequence.num_told + min_new_tokens:
                sequence.num_told = num_tokens
                states.append(sequence.state(self._engine.progress(key)))
        return states

    def export(self, request_ids: Collection[int]) -> list[SequenceState]:
        wanted = set(request_ids)
        inside = [s for s in self._inside.values() if s.request.request_id in wanted]
        return self._intake.withdraw(wanted, self._recall(inside))

    def stats(self) -> ReplicaStats:
        num_running = self._engine.num_running()
        return ReplicaStats(
            num_running=num_running,
            num_waiting=len(self._inside) - num_running + self._intake.num_waiting,
            kv_used_fraction=self._engine.kv_used_fraction(),
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self._engine.num_preemptions(),
            num_recomputed_tokens=self._num_recomputed_tokens,
            kv_tokens=self._capacity.kv_tokens,
            engine_s=self._engine_s,
        )

    def close(self) -> None:
        self._inside.clear()
        self._engine.close()

    def _hand_over(self) -> list[Completion]:
        """Give vLLM what it can run and a little more; return what it does not take."""
        refused = []
        while self._intake.num_waiting and len(self._inside) < self._max_inside:
            sequence = self._sequence(*self._intake.take())
            tokens = np.concatenate((sequence.request.prompt_token_ids, sequence.tokens_before))
            params = sampling_params(
                sequence.request, sequence.sample_idx, num_done=len(sequence.tokens_before)
            )
            try:
                self._engine.add(sequence.key, tokens.tolist(), params)
            except RequestRefused as error:
                state = sequence.state(None)
                refused.append(completion_of(state, "error", error=error_text(error)))
            else:
                self._inside[sequence.key] = sequence
        return refused

    def _sequence(self, state: SequenceState, is_begun: bool) -> VllmSequence:
        goes_on = len(state.token_ids) > 0 and can_resume(state.request.sampling)
        return VllmSequence(
            key=str(next(self._keys)),
            request=state.request,
            sample_idx=state.sample_idx,
            before=state if goes_on else None,
            has_started=is_begun,
            num_told=len(state.token_ids) if goes_on else 0,
        )

    def _finish(self, answer: Answer) -> Completion:
        sequence = self._inside.pop(answer.key)
        self._count(sequence, answer.progress)
        state, stop = sequence.state(answer.progress), answer.stop_reason
        if not answer.is_finite:
            num_tokens = len(sequence.request.prompt_token_ids) + len(state.token_ids)
            error = f"NonFiniteLogits: the model gave no finite logits after {num_tokens} tokens"
            return completion_of(state, "error", error=error)
        reason = _REASONS.get(answer.finish_reason)
        if reason is None:
            error = f"VllmError: vLLM ended the request with {answer.finish_reason!r}"
            return completion_of(state, "error", error=error)
        if stop in self._eos_token_ids and stop not in sequence.request.sampling.stop_token_ids:
            stop = None
        return completion_of(state, reason, stop)

    def _count(self, sequence: VllmSequence, progress: Progress) -> None:
        self._num_generated_tokens += len(progress.token_ids)
        num_prompt = len(sequence.request.prompt_token_ids)
        if sequence.has_started:
            num_known = num_prompt + len(sequence.tokens_before)
            self._num_recomputed_tokens += num_known - progress.num_cached_tokens
        elif not sequence.sample_idx:
            self._num_prompt_tokens += num_prompt
            self._num_cached_tokens += progress.num_cached_tokens

    def _recall(self, sequences: Sequence[VllmSequence]) -> list[SequenceState]:
        """Take sequences out of vLLM, with what they have."""
        begun = [s for s in sequences if self._engine.has_started(s.key)]
        found = self._engine.take([s.key for s in sequences])
        for sequence in sequences:
            del self._inside[sequence.key]
        for sequence in begun:
            self._count(sequence, found[sequence.key])
        return [sequence.state(found[sequence.key]) for sequence in sequences]

    def _has_started(self, sequence: VllmSequence) -> bool:
        return sequence.has_started or self._engine.has_started(sequence.key)


def create(
    model: str, backend: BackendConfig, engine: EngineConfig, *, num_engines_on_host: int = 1
) -> VllmBackend:
    """Start vLLM in this process and return a backend that is ready for `submit`.

    Args:
        model: checkpoint directory, hub id or URI.
        backend: see `raybatch.backends.vllm_args.VllmOptions`.
        engine: options of the engine.
        num_engines_on_host: engines that share the host's memory.

    Raises:
        ConfigError: an unknown option, or a model that is not there.
        Exception: whatever vLLM raises where it cannot run the model with these options.
    """
    return VllmBackend(start_inner(model, backend, engine, num_engines_on_host=num_engines_on_host))


def start_inner(
    model: str, backend: BackendConfig, engine: EngineConfig, *, num_engines_on_host: int = 1
) -> InnerEngine:
    """Do the same as `create` without what makes a backend of it.

    Sets variables of the environment that vLLM reads, except those that are set already.
    """
    options = vllm_options(backend, engine)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = str(int(options.check_logits))
    path = resolve_model(model)
    # the environment has to be as it is now when vLLM is imported
    from raybatch.backends.vllm_engine import start_engine

    return start_engine(
        path,
        engine_args(options, engine),
        check_logits=options.check_logits,
        num_engines_on_host=num_engines_on_host,
    )
