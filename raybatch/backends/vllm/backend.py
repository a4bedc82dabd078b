"""vLLM as a backend: rows and samples over an engine that knows requests alone.

             own queue            inside vLLM
submit -->  not begun  -------->  waiting | running  -->  completions
restore ->  begun before -------> (first)

vLLM gets a few requests more than it can run, so that order, `drain` and moving rows stay here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import count
from typing import Any

import numpy as np

from raybatch.backends.base import progress_of
from raybatch.backends.intake import IntakeBackend
from raybatch.backends.vllm.requests import (
    Answer,
    InnerEngine,
    Parse,
    Progress,
    RequestRefused,
    VllmSequence,
)
from raybatch.engine.finish_rules import RowLimits
from raybatch.engine.sampling.draw import sequence_key
from raybatch.engine.sequences.table import completion_of
from raybatch.errors import error_text
from raybatch.records.payload import (
    DOCUMENT_AT,
    IMAGES,
    LORA,
    POOLING,
    TYPES_AT,
    images_of,
    prompt_ids_of,
)
from raybatch.records.structured_outputs import engine_constraint
from raybatch.records.types import (
    Capacity,
    Completion,
    FinishReason,
    ReplicaStats,
    Request,
    RowProgress,
    Sampling,
    SequenceState,
    Task,
)

# requests inside vLLM beyond those that it can run, as a share of these: what it admits while the
# results of a step are on their way
_LEAD_FRACTION = 1 / 8
# samples with images that are handed over before a step: files are unpacked here, while all wait
_IMAGES_PER_STEP = 4
# options of rows that vLLM takes by another name or in another form, or not at all
_CHANGED = "top_k max_tokens min_tokens stop stop_token_ids n seed structured_outputs"
_AS_THEY_ARE = [f.name for f in fields(Sampling) if f.name not in _CHANGED.split()]
_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmBackend(IntakeBackend):
    """Implements the `Backend` protocol over vLLM.

    Each sample of a row is a separate request with its own seed, so that it does not depend on the
    others. `parse` adds text, reasoning and tool calls to completions without an error; if it is
    None, the stage decodes their text.
    """

    def __init__(
        self, engine: InnerEngine, task: Task = "generate", parse: Parse | None = None
    ) -> None:
        self._engine = engine
        self._is_pooling = task != "generate"
        self._parse = parse
        self._capacity = engine.capacity()
        max_len = self._capacity.max_model_len
        self._limits = RowLimits(
            vocab_size=engine.vocab_size(),
            # a prompt that generates nothing may fill the context, and a score may be two prompts
            max_model_len={"generate": max_len, "score": 2 * max_len + 1}.get(task, max_len + 1),
            # and vLLM does not start where the longest one does not fit the cache
            kv_tokens=self._capacity.kv_tokens if task == "generate" else 2 * max_len,
        )
        self._eos_token_ids = engine.eos_token_ids()
        max_num_seqs = self._capacity.max_num_seqs
        self._max_inside = max_num_seqs + max(1, int(max_num_seqs * _LEAD_FRACTION))
        super().__init__()
        self._inside: dict[str, VllmSequence] = {}
        self._keys = count(1)

    def capacity(self) -> Capacity:
        return self._capacity

    def drain(self) -> list[Request]:
        unstarted = [s for s in self._inside.values() if not self._has_started(s)]
        self._waiting.extendleft(reversed(self._recall(unstarted)))
        return super().drain()

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        states = []
        for key, sequence in self._inside.items():
            num_tokens = len(sequence.tokens_before) + self._engine.num_tokens(key)
            if num_tokens >= sequence.num_reported + min_new_tokens:
                sequence.num_reported = num_tokens
                states.append(sequence.state(self._engine.progress(key)))
        return states

    def progress(self) -> RowProgress:
        return progress_of(
            (s.request, len(s.tokens_before) + self._engine.num_tokens(key))
            for key, s in self._inside.items()
            if self._has_started(s)
        )

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        wanted = set(request_ids)
        inside = [s for s in self._inside.values() if s.request.request_id in wanted]
        return self._withdraw(wanted, self._recall(inside))

    def stats(self) -> ReplicaStats:
        num_running = self._engine.num_running()
        # some come while requests are taken out
        counters = replace(self._counters, generated_tokens=self._engine.generated_tokens())
        weights = self._engine.weight_counters()
        return ReplicaStats(
            **asdict(counters),
            num_running=num_running,
            num_waiting=len(self._inside) - num_running + self._num_waiting(),
            kv_used_fraction=self._engine.kv_used_fraction(),
            num_preemptions=self._engine.num_preemptions(),
            kv_tokens=self._capacity.kv_tokens,
            num_weight_copies=weights.num_copies,
            weight_copy_bytes=weights.num_bytes,
            num_weight_stalls=weights.num_stalls,
            num_failed_copies=weights.num_failures,
        )

    def close(self) -> None:
        self._inside.clear()
        self._engine.close()

    def _find_failure(self, state: SequenceState) -> Completion | None:
        return self._limits.find_failure(state)

    def _step(self) -> list[Completion]:
        completions = self._hand_over()
        if self._inside:
            completions += [self._finish(answer) for answer in self._engine.step()]
            self._counters.num_steps = self._engine.num_steps()
        return completions

    def _hand_over(self) -> list[Completion]:
        """Submit as much as vLLM can run and a little more; return refused requests."""
        refused = []
        num_with_images = 0
        while (
            num_with_images < _IMAGES_PER_STEP
            and self._num_waiting()
            and len(self._inside) < self._max_inside
        ):
            sequence = self._sequence(*self._take_next())
            num_with_images += IMAGES in sequence.request.payload
            tokens = np.concatenate((prompt_ids_of(sequence.request), sequence.tokens_before))
            params = self._params(sequence)
            try:
                self._engine.add(sequence.key, tokens.tolist(), params)
            except RequestRefused as error:
                state = sequence.state(Progress())
                refused.append(completion_of(state, "error", error=error_text(error)))
            else:
                self._inside[sequence.key] = sequence
        return refused

    def _sequence(self, state: SequenceState, is_restored: bool) -> VllmSequence:
        """Return a sequence that resumes from its tokens, if that does not change its answer."""
        # tokens may look like the place of an image, which stands in the prompt
        goes_on = len(state.token_ids) > 0 and can_resume(state.request.sampling)
        goes_on = goes_on and IMAGES not in state.request.payload
        return VllmSequence(
            key=str(next(self._keys)),
            request=state.request,
            sample_idx=state.sample_idx,
            before=state if goes_on else None,
            has_started=is_restored,
            num_reported=len(state.token_ids) if goes_on else 0,
        )

    def _params(self, sequence: VllmSequence) -> dict[str, Any]:
        if self._is_pooling:
            return pooling_params(sequence.request)
        num_done = len(sequence.tokens_before)
        return sampling_params(sequence.request, sequence.sample_idx, num_done=num_done)

    def _finish(self, answer: Answer) -> Completion:
        sequence = self._inside.pop(answer.key)
        self._count(sequence, answer.progress)
        state, stop = sequence.state(answer.progress), answer.stop_reason
        reason = _REASONS.get(answer.finish_reason)
        if not answer.is_finite or reason is None:
            num_tokens = len(sequence.request.prompt_token_ids) + len(state.token_ids)
            if answer.is_finite:
                error = f"VllmError: vLLM ended the request with {answer.finish_reason!r}"
            elif self._is_pooling:
                error = "NonFiniteVector: what the model made of the prompt is no numbers"
            else:
                error = (
                    f"NonFiniteLogits: the model gave no finite logits after {num_tokens} tokens"
                )
            return completion_of(state, "error", error=error)
        if stop in self._eos_token_ids and not sequence.request.sampling.ignore_eos:
            stop = None
        completion = completion_of(state, reason, stop, vector=answer.vector)
        if IMAGES in sequence.request.payload and not sequence.sample_idx:
            completion = replace(completion, num_input_tokens=answer.num_prompt_tokens)
        return completion if self._parse is None else self._parse(sequence.request, completion)

    def _count(self, sequence: VllmSequence, progress: Progress) -> None:
        num_prompt = len(sequence.request.prompt_token_ids)
        if sequence.has_started:
            num_known = num_prompt + len(sequence.tokens_before)
            self._counters.num_recomputed_tokens += num_known - progress.num_cached_tokens
        elif not sequence.sample_idx:
            self._counters.prompt_tokens += num_prompt
            self._counters.cached_tokens += progress.num_cached_tokens

    def _recall(self, sequences: Sequence[VllmSequence]) -> list[SequenceState]:
        """Remove sequences from vLLM, with their tokens."""
        started = [s for s in sequences if self._engine.has_started(s.key)]
        progress = self._engine.take([s.key for s in sequences])
        for sequence in sequences:
            del self._inside[sequence.key]
        for sequence in started:
            self._count(sequence, progress[sequence.key])
        return [sequence.state(progress[sequence.key]) for sequence in sequences]

    def _has_started(self, sequence: VllmSequence) -> bool:
        return sequence.has_started or self._engine.has_started(sequence.key)


def sampling_params(request: Request, sample_idx: int, *, num_done: int = 0) -> dict[str, Any]:
    """Return options of vLLM's `SamplingParams` for one sample of a row, for `Frontend.make`.

    Images and the adapter of the row are further keys. Each sample has its own seed. The last
    `num_done` tokens of the prompt were generated earlier: they count towards the limits of output.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in _AS_THEY_ARE},
        "top_k": sampling.top_k or 0,
        "max_tokens": sampling.max_tokens - num_done,
        "min_tokens": max(0, sampling.min_tokens - num_done),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if isinstance(sampling.structured_outputs, str):
        params["structured_outputs"] = engine_constraint(sampling.structured_outputs)
    if images := images_of(request.payload):
        params[IMAGES] = images
    if sampling.temperature > 0:
        # 63 bits: torch takes signed numbers, and vLLM takes -1 for no seed
        params["seed"] = sequence_key(request.seed, sample_idx) >> 1
    return params | _adapter_of(request)


def pooling_params(request: Request) -> dict[str, Any]:
    """Return options of vLLM's `PoolingParams` for a row, except its task.

    Further keys are the adapter, the position where the document begins (`DOCUMENT_AT`, for
    `ScorePairs`), and the position where the second token type begins (`TYPES_AT`, for
    `Frontend.make`).
    """
    payload = request.payload
    params: dict[str, Any] = {**payload.get(POOLING, {}), **_adapter_of(request)}
    if TYPES_AT in payload:
        params[TYPES_AT] = payload[TYPES_AT]
    if DOCUMENT_AT in payload:
        params[DOCUMENT_AT] = payload[DOCUMENT_AT]
    return params


def _adapter_of(request: Request) -> dict[str, str]:
    """Return the adapter of a row as an option of its request; empty for none."""
    return {LORA: request.payload[LORA]} if LORA in request.payload else {}


def can_resume(sampling: Sampling) -> bool:
    """Return whether vLLM, given prompt and tokens so far, continues as if it had never stopped.

    It does not if the tokens so far matter other than as context: for the state of a random
    generator, counts of generated tokens, the beginning of a stop string, or the state of a
    grammar. A repetition penalty is fine, because it treats prompt and output alike.
    """
    return (
        sampling.temperature == 0
        and sampling.structured_outputs is None
        and not sampling.stop
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
    )
