"""A backend without a model: answers depend on prompt, seed and options only.

For tests of everything around an engine, for dry runs of a pipeline, and for measuring the overhead
of the pool. It can fail in every way in which an engine can.
"""

import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from raybatch.backends.base import BackendType, progress_of
from raybatch.backends.intake import IntakeBackend
from raybatch.config import BackendConfig, from_mapping
from raybatch.engine.sequences.table import completion_of
from raybatch.errors import ConfigError
from raybatch.records.payload import POOLING
from raybatch.records.types import (
    NO_TOKENS,
    Capacity,
    Completion,
    FinishReason,
    ReplicaStats,
    Request,
    RowProgress,
    Sampling,
    SequenceState,
    Task,
    TokenIds,
    Vector,
)

_VOCAB_SIZE = 256
# numbers of one vector
_SIZES: Mapping[Task, int] = {"embed": 8, "classify": 3, "score": 1}
_HELD_S = 0.001

Lengths = Literal["max", "hash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOptions:
    """Options of the fake backend; an option `*_on` is a token id and acts on prompts with it."""

    step_s: float = 0.0
    row_s: float = 0.0  # a step takes so much longer per row that runs
    max_num_seqs: int = 64
    max_model_len: int = 32768
    lengths: Lengths = "max"  # always `max_tokens`; "hash" from 1 to `max_tokens`
    crashes: bool = False  # every prompt ends the process as soon as it runs
    crash_on: int | None = None  # such a prompt does
    hang_on: int | None = None  # the step in which it starts does not end
    # no step ends of an engine whose process id is the name of a file there
    hang_dir: str | None = None
    # engines whose process ids are names of files there take `slowness` times as long per step
    slow_dir: str | None = None
    slowness: float = 10.0
    raise_on: int | None = None  # it makes `poll` raise, as a broken engine does
    raise_every: int | None = None  # one of this many steps of an engine raises
    raise_file: str | None = None  # `raise_on` and `raise_every` hold while it exists; None: always
    error_on: int | None = None  # it becomes an error completion
    start_s: float = 0.0
    fail_start: bool = False
    refuse_start: bool = False  # every start raises as for a wrong option
    marks_dir: str | None = None  # existing; each start leaves a mark, which the next two need
    num_failing_starts: int = 0
    # number of first started engines with `slow_step_s` per step, and a scaled `row_s`
    num_slow_starts: int = 0
    slow_step_s: float = 0.1
    finished_log: str | None = None  # grows by one byte per finished sequence, over all engines
    # an engine that has finished `hold_after` sequences takes no step while this file exists, so
    # that what interrupts a run meets it at work
    hold_file: str | None = None
    hold_after: int = 0

    def __post_init__(self) -> None:
        if self.marks_dir is None and (self.num_failing_starts or self.num_slow_starts):
            raise ConfigError(
                "backend.options.marks_dir must name a directory when num_failing_starts or "
                "num_slow_starts is set"
            )


def fake_tokens(
    prompt_token_ids: TokenIds,
    seed: int,
    sampling: Sampling,
    sample_idx: int = 0,
    *,
    lengths: Lengths = "max",
    limit: int | None = None,
) -> TokenIds:
    """Return the int32 tokens that the fake backend generates if nothing stops it.

    `seed` is that of the request. Their number is `max_tokens`, or with `lengths` "hash" a number
    from 1 to `max_tokens` that depends on the prompt; never more than `limit`, since a row may ask
    for more than memory holds.
    """
    mixed = np.array([seed & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF, sample_idx], np.uint32)
    prompt = np.ascontiguousarray(prompt_token_ids, np.int32)
    code = zlib.crc32(mixed.tobytes(), zlib.crc32(prompt.tobytes()))
    num_tokens = sampling.max_tokens
    if lengths == "hash":
        num_tokens = max(sampling.min_tokens, 1 + code % num_tokens)
    if limit is not None:
        num_tokens = min(num_tokens, limit)
    positions = np.arange(num_tokens, dtype=np.int64)
    return ((code + positions * (2 * (code >> 16) + 1)) % _VOCAB_SIZE).astype(np.int32)


class FakeAnswer(NamedTuple):
    """All tokens of one sample, and how it ends."""

    tokens: TokenIds
    finish_reason: FinishReason
    stop_reason: int | None = None


def fake_answer(
    request: Request, sample_idx: int, *, lengths: Lengths, max_model_len: int
) -> FakeAnswer:
    """Return what the fake backend generates for one sample of a request."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    max_new = max_model_len - len(prompt)
    tokens = fake_tokens(
        prompt, request.seed, sampling, sample_idx, lengths=lengths, limit=max_new + 1
    )
    is_whole = len(tokens) == sampling.max_tokens
    may_stop = np.arange(1, len(tokens) + 1) >= sampling.min_tokens
    stops = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids) & may_stop)
    if len(stops) and stops[0] < max_new:
        return FakeAnswer(tokens[: stops[0] + 1], "stop", int(tokens[stops[0]]))
    if len(tokens) > max_new:
        return FakeAnswer(tokens[:max_new], "length")
    return FakeAnswer(tokens, "length" if is_whole else "stop")


def fake_vector(request: Request, task: Task) -> Vector:
    """Return the vector that the fake backend computes from a prompt for a pooling task.

    It depends only on prompt, adapter and options of the row. An embedding has L2 norm 1, class
    probabilities have sum 1, unless the row sets `use_activation` to false; a score is one number.
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


@dataclass(slots=True, eq=False)
class _Sequence:
    # with the tokens that it has in the end
    state: SequenceState
    finish_reason: FinishReason
    stop_reason: int | None
    end_step: int
    num_reported: int

    @property
    def key(self) -> tuple[int, int]:
        return self.state.request.request_id, self.state.sample_idx


class FakeBackend(IntakeBackend):
    """Implements the `Backend` protocol with answers that `fake_tokens` predicts."""

    def __init__(self, options: FakeOptions, task: Task = "generate") -> None:
        self._task = task
        # what generates nothing may fill the context
        self._max_len = options.max_model_len + (task != "generate")
        start = _mark_start(options.marks_dir)
        time.sleep(options.start_s)
        if options.refuse_start:
            raise ConfigError("the fake backend refuses to start, since refuse_start is set")
        if options.fail_start or start < options.num_failing_starts:
            raise RuntimeError(
                "the fake backend fails to start, since fail_start or num_failing_starts is set"
            )
        self._options = options
        is_slow = start < options.num_slow_starts
        self._step_s = options.slow_step_s if is_slow else options.step_s
        slowness = options.slow_step_s / options.step_s if is_slow and options.step_s else 1.0
        self._row_s = slowness * options.row_s
        super().__init__()
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
        hang_dir = self._options.hang_dir
        if hang_dir is not None and os.path.exists(f"{hang_dir}/{os.getpid()}"):
            threading.Event().wait()
        is_due = self._num_open and self._num_finished >= self._options.hold_after
        if is_due and self._options.hold_file and os.path.exists(self._options.hold_file):
            time.sleep(_HELD_S)
            return []
        finished = super().poll()
        self._num_finished += len(finished)
        if self._options.finished_log is not None and finished:
            # in one write, so that bytes of several engines are never mixed up
            with open(self._options.finished_log, "ab") as file:
                file.write(b"." * len(finished))
        return finished

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        states = []
        for sequence in self._running.values():
            state = self._exported(sequence)
            if len(state.token_ids) >= sequence.num_reported + min_new_tokens:
                sequence.num_reported = len(state.token_ids)
                states.append(state)
        return states

    def progress(self) -> RowProgress:
        now = self._counters.num_steps
        return progress_of(
            (s.state.request, len(s.state.token_ids) - (s.end_step - now))
            for s in self._running.values()
        )

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        wanted = set(request_ids)
        states = []
        for key in [key for key in self._running if key[0] in wanted]:
            sequence = self._running.pop(key)
            self._ending[sequence.end_step].remove(sequence)
            states.append(self._exported(sequence))
        return self._withdraw(wanted, states)

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            **asdict(self._counters),
            num_running=len(self._running),
            num_waiting=self._num_waiting(),
            kv_used_fraction=len(self._running) / self._options.max_num_seqs,
            kv_tokens=self.capacity().kv_tokens,
        )

    def close(self) -> None:
        self._running.clear()
        self._ending.clear()
        self._forget_all()

    def _step(self) -> list[Completion]:
        if not self._num_waiting() and not self._running:
            return []
        self._counters.num_steps += 1
        raise_every = self._options.raise_every
        if raise_every and not self._counters.num_steps % raise_every and self._is_broken():
            raise RuntimeError("the fake backend fails in this step, since raise_every is set")
        num_free = self._options.max_num_seqs - len(self._running)
        for _ in range(min(num_free, self._num_waiting())):
            self._start(*self._take_next())
        if self._step_s or self._row_s:
            time.sleep(self._slowness() * (self._step_s + self._row_s * len(self._running)))
        if self._task == "generate":
            self._counters.generated_tokens += len(self._running)
        ended = self._ending.pop(self._counters.num_steps, [])
        for sequence in ended:
            del self._running[sequence.key]
        finished = [completion_of(s.state, s.finish_reason, s.stop_reason) for s in ended]
        if self._task == "generate":
            return finished
        vectors = [fake_vector(sequence.state.request, self._task) for sequence in ended]
        return [
            replace(completion, token_ids=NO_TOKENS, finish_reason="stop", vector=vector)
            for completion, vector in zip(finished, vectors, strict=True)
        ]

    def _is_broken(self) -> bool:
        return self._options.raise_file is None or os.path.exists(self._options.raise_file)

    def _slowness(self) -> float:
        slow_dir = self._options.slow_dir
        is_slow = slow_dir is not None and os.path.exists(f"{slow_dir}/{os.getpid()}")
        return self._options.slowness if is_slow else 1.0

    def _start(self, state: SequenceState, has_started: bool) -> None:
        request, options = state.request, self._options
        prompt = request.prompt_token_ids
        if options.crashes or (options.crash_on is not None and options.crash_on in prompt):
            os._exit(1)
        if options.hang_on is not None and options.hang_on in prompt:
            threading.Event().wait()
        if options.raise_on is not None and options.raise_on in prompt and self._is_broken():
            raise RuntimeError("the fake backend fails, since the prompt has the token raise_on")
        tokens, reason, stop_reason = fake_answer(
            request, state.sample_idx, lengths=options.lengths, max_model_len=self._max_len
        )
        num_before, num_cached = len(state.token_ids), state.num_cached_tokens
        if has_started:
            self._counters.num_recomputed_tokens += len(prompt) + num_before
        else:
            num_cached = request.prefix_len if request.group_id in self._seen_groups else 0
            if request.group_id is not None:
                self._seen_groups.add(request.group_id)
            self._counters.prompt_tokens += len(prompt)
            self._counters.cached_tokens += num_cached
        sequence = _Sequence(
            state=replace(state, token_ids=tokens, num_cached_tokens=num_cached),
            finish_reason=reason,
            stop_reason=stop_reason,
            end_step=self._counters.num_steps + len(tokens) - num_before - 1,
            num_reported=num_before,
        )
        self._running[sequence.key] = sequence
        self._ending.setdefault(sequence.end_step, []).append(sequence)

    def _exported(self, sequence: _Sequence) -> SequenceState:
        state, num_left = sequence.state, sequence.end_step - self._counters.num_steps
        return SequenceState(
            request=state.request,
            sample_idx=state.sample_idx,
            token_ids=state.token_ids[: len(state.token_ids) - num_left],
            num_cached_tokens=state.num_cached_tokens,
        )

    def _find_failure(self, state: SequenceState) -> Completion | None:
        options, prompt = self._options, state.request.prompt_token_ids
        num_tokens = len(prompt) + len(state.token_ids)
        if not len(prompt):
            error = "EmptyPrompt: the prompt has no tokens"
        elif num_tokens >= self._max_len:
            limit = options.max_model_len
            error = f"PromptTooLong: {num_tokens} tokens, the model's limit is {limit}"
        elif prompt.min() < 0:
            error = "BadTokenId: token ids must be at least 0"
        elif options.error_on is not None and options.error_on in prompt:
            error = "ValueError: the fake backend fails this prompt"
        else:
            return None
        return Completion(
            request_id=state.request.request_id,
            sample_idx=state.sample_idx,
            finish_reason="error",
            error=error,
        )


def _mark_start(marks_dir: str | None) -> int:
    """Leave a mark and return how many starts came before."""
    if marks_dir is None:
        return 0
    for start in itertools.count():
        with suppress(FileExistsError):
            Path(marks_dir, f"start-{start}").touch(exist_ok=False)
            return start
    raise AssertionError("counting has no end")


def _options(backend: BackendConfig) -> FakeOptions:
    return from_mapping(FakeOptions, backend.options, where="backend.options")


FAKE = BackendType(
    kind="fake",
    create=lambda start: FakeBackend(_options(start.backend), start.backend.task),
    max_model_len=lambda backend, *_: backend.options.get("max_model_len"),
    tasks=get_args(Task),
    check=lambda backend, _: _options(backend),
    num_gpus=lambda *_: 0,
    may_end_process=lambda backend: any(
        # 0 is a token
        backend.options.get(name) is not None and backend.options[name] is not False
        for name in ("crashes", "crash_on", "hang_on", "hang_dir")
    ),
    has_weights=False,
    has_adapters=True,
)
