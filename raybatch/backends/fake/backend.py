"""A backend without a model: answers follow from prompt, seed and options alone.

For tests of everything around an engine, for dry runs of a pipeline, and for measuring the overhead
of the pool. It can fail in every way in which an engine can.
"""

import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from raybatch.backends.fake.answers import FakeAnswer, fake_answer, fake_vector
from raybatch.backends.fake.type import FakeOptions
from raybatch.backends.intake import Intake, IntakeBackend
from raybatch.engine.sequences.table import completion_of
from raybatch.errors import ConfigError
from raybatch.records.types import Capacity, Completion, ReplicaStats, Request, SequenceState, Task

_HELD_S = 0.001
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class _Sequence:
    state: SequenceState
    answer: FakeAnswer
    num_cached_tokens: int
    end_step: int
    num_reported: int

    @property
    def key(self) -> tuple[int, int]:
        return self.state.request.request_id, self.state.sample_idx


class FakeBackend(IntakeBackend):
    """Follows the `Backend` protocol with answers that `fake_tokens` predicts."""

    def __init__(self, options: FakeOptions, task: Task = "generate") -> None:
        self._task = task
        # what generates nothing may fill the context
        self._max_len = options.max_model_len + (task != "generate")
        start = _mark_start(options.marks_dir)
        time.sleep(options.start_s)
        if options.refuse_start:
            raise ConfigError("the fake backend was told to refuse its options")
        if options.fail_start or start < options.num_failing_starts:
            raise RuntimeError("the fake backend was told to fail its start")
        self._options = options
        self._step_s = options.slow_step_s if start < options.num_slow_starts else options.step_s
        super().__init__(self._find_failure)
        self._running: dict[tuple[int, int], _Sequence] = {}
        # step at which sequences end, so that a step costs nothing per running sequence
        self._ending: dict[int, list[_Sequence]] = {}
        self._seen_groups: set[int] = set()
        self._num_finished = 0

    def capacity(self) -> Capacity:
        return Capacity(
            kv_tokens=self._options.max_num_seqs * self._options.max_model_len,
            max_model_len=self._options.max_model_len,
            max_num_seqs=self._options.max_num_seqs,
            block_size=16,
        )

    def poll(self) -> list[Completion]:
        if not self._intake.num_open:
            return []
        if self._is_held():
            time.sleep(_HELD_S)
            return []
        began = time.perf_counter()
        has_work = self._intake.num_waiting or self._running
        finished = self._intake.close(self._run_step() if has_work else [])
        self._num_finished += len(finished)
        _log_finished(self._options.finished_log, len(finished))
        self._counters.engine_s += time.perf_counter() - began
        return finished

    def begun(self, min_new_tokens: int) -> list[SequenceState]:
        states = []
        for sequence in self._running.values():
            state = self._exported(sequence)
            if len(state.token_ids) >= sequence.num_reported + min_new_tokens:
                sequence.num_reported = len(state.token_ids)
                states.append(state)
        return states

    def export(self, request_ids: Collection[int]) -> list[SequenceState]:
        wanted = set(request_ids)
        states = []
        for key in [key for key in self._running if key[0] in wanted]:
            sequence = self._running.pop(key)
            self._ending[sequence.end_step].remove(sequence)
            states.append(self._exported(sequence))
        return self._intake.withdraw(request_ids, states)

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            **asdict(self._counters),
            num_running=len(self._running),
            num_waiting=self._intake.num_waiting,
            kv_used_fraction=len(self._running) / self._options.max_num_seqs,
            kv_tokens=self.capacity().kv_tokens,
        )

    def close(self) -> None:
        self._running.clear()
        self._ending.clear()
        self._intake = Intake(self._find_failure)

    def _is_held(self) -> bool:
        hold_file = self._options.hold_file
        return (
            hold_file is not None
            and self._num_finished >= self._options.hold_after
            and os.path.exists(hold_file)
        )

    def _run_step(self) -> list[Completion]:
        self._counters.num_steps += 1
        num_free = self._options.max_num_seqs - len(self._running)
        for _ in range(min(num_free, self._intake.num_waiting)):
            state, has_started = self._intake.take()
            self._start(state, has_started=has_started)
        if self._step_s:
            time.sleep(self._step_s)
        if self._task == "generate":
            self._counters.generated_tokens += len(self._running)
        ended = self._ending.pop(self._counters.num_steps, [])
        for sequence in ended:
            del self._running[sequence.key]
        return [self._completion(sequence) for sequence in ended]

    def _completion(self, sequence: _Sequence) -> Completion:
        completion = _generated(sequence)
        if self._task == "generate":
            return completion
        vector = fake_vector(sequence.state.request, self._task)
        return replace(completion, token_ids=_NO_TOKENS, finish_reason="stop", vector=vector)

    def _start(self, state: SequenceState, *, has_started: bool) -> None:
        request, options = state.request, self._options
        prompt = request.prompt_token_ids
        if options.crashes or (options.crash_on is not None and options.crash_on in prompt):
            os._exit(1)
        if options.raise_on is not None and options.raise_on in prompt:
            raise RuntimeError("the fake backend was told to break on this prompt")
        answer = fake_answer(
            request, state.sample_idx, lengths=options.lengths, max_model_len=self._max_len
        )
        if has_started:
            num_cached = state.num_cached_tokens
            self._counters.num_recomputed_tokens += len(prompt) + len(state.token_ids)
        else:
            num_cached = self._cached(request)
            self._counters.prompt_tokens += len(prompt)
            self._counters.cached_tokens += num_cached
        sequence = _Sequence(
            state=state,
            answer=answer,
            num_cached_tokens=num_cached,
            end_step=self._counters.num_steps + len(answer.tokens) - len(state.token_ids) - 1,
            num_reported=len(state.token_ids),
        )
        self._running[sequence.key] = sequence
        self._ending.setdefault(sequence.end_step, []).append(sequence)

    def _exported(self, sequence: _Sequence) -> SequenceState:
        num_left = sequence.end_step - self._counters.num_steps
        tokens = sequence.answer.tokens
        return SequenceState(
            request=sequence.state.request,
            sample_idx=sequence.state.sample_idx,
            token_ids=tokens[: len(tokens) - num_left],
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _find_failure(self, state: SequenceState) -> Completion | None:
        error = self._row_error(state)
        if not error:
            return None
        return Completion(
            request_id=state.request.request_id,
            sample_idx=state.sample_idx,
            finish_reason="error",
            error=error,
        )

    def _row_error(self, state: SequenceState) -> str:
        options, prompt = self._options, state.request.prompt_token_ids
        num_tokens = len(prompt) + len(state.token_ids)
        if not len(prompt):
            return "EmptyPrompt: the prompt has no tokens"
        if num_tokens >= self._max_len:
            limit = options.max_model_len
            return f"PromptTooLong: {num_tokens} tokens, the model's limit is {limit}"
        if prompt.min() < 0:
            return "BadTokenId: token ids must be at least 0"
        if options.error_on is not None and options.error_on in prompt:
            return "ValueError: the fake backend was told to fail this prompt"
        return ""

    def _cached(self, request: Request) -> int:
        if request.group_id is None:
            return 0
        is_known = request.group_id in self._seen_groups
        self._seen_groups.add(request.group_id)
        return request.prefix_len if is_known else 0


def _generated(sequence: _Sequence) -> Completion:
    answer = sequence.answer
    num_cached_tokens = sequence.num_cached_tokens
    state = replace(sequence.state, token_ids=answer.tokens, num_cached_tokens=num_cached_tokens)
    return completion_of(state, answer.finish_reason, answer.stop_reason)


def _log_finished(path: str | None, num_finished: int) -> None:
    """Count finished sequences where every engine does; bytes of several are never mixed up."""
    if path is not None and num_finished:
        with open(path, "ab") as file:
            file.write(b"." * num_finished)


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
