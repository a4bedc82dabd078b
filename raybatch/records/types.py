"""Frozen records that cross process and layer borders; no behaviour beyond validation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError, range_text
from raybatch.records.parsed_text import ParsedText
from raybatch.records.structured_outputs import structured_text

FinishReason = Literal["stop", "length", "filtered", "error", "capacity"]
# what is made of a prompt: text, or numbers by pooling the states of its tokens
Task = Literal["generate", "embed", "classify", "score"]

TokenIds = npt.NDArray[np.int32]
Vector = npt.NDArray[np.float32]

# as `max_tokens`: more than any context holds, so that the context alone bounds the output
UNBOUNDED_TOKENS = 1 << 30
# samples of one row: what vLLM allows (its VLLM_MAX_N_SEQUENCES), enough for pass@10,000
MAX_SAMPLES = 1 << 14
# options of `Sampling` by type; those that may be None are whole numbers
WHOLE_OPTIONS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
OPTIONAL_OPTIONS = ("top_k", "logprobs")
FLAG_OPTIONS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
NUMBER_OPTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Options that decide the tokens of one completion; names and meanings follow vLLM.

    Defaults are greedy and short on purpose: the same answer on every run.

    Args:
        temperature: 0 picks the most likely token; above 0 divides the logits.
        max_tokens: upper bound of generated tokens, at least 1.
        min_tokens: stop tokens and stop strings are ignored before this many tokens.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set whose probability reaches this, in (0, 1].
        min_p: drop tokens below this fraction of the most likely one, in [0, 1).
        repetition_penalty: above 1 makes tokens of prompt and output less likely.
        presence_penalty: subtracted once per token already generated, in [-2, 2].
        frequency_penalty: subtracted per occurrence already generated, in [-2, 2].
        seed: mixed with the row's id, so that results do not depend on placement.
        n: samples per row, at most 16,384, as in vLLM.
        logprobs: number of most likely tokens to report per position; None reports none.
        stop: strings that end the text; cut off unless `include_stop_str_in_output`. A list or
            one string becomes a tuple.
        stop_token_ids: token ids that end the sequence, beside the model's own.
        ignore_eos: go on after the model's end token.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: what the answer must look like, such as {"json": schema}; see
            `StructuredOutputs`. Becomes one JSON text.

    Raises:
        ConfigError: a value has the wrong type or is outside its range.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        ranges = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("n", 1 <= self.n <= MAX_SAMPLES, f"at least 1 and at most {MAX_SAMPLES}"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "None or at least 0"),
            ("stop", all(self.stop), "free of empty strings"),
        )
        for name, is_valid, allowed in ranges:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(
                    f"sampling.{name} must be {range_text(allowed, value)}, got {value!r}"
                )
            if not is_valid:
                raise ConfigError(f"sampling.{name} must be {allowed}, got {value!r}")
        self._check_structured_outputs()

    def _check_structured_outputs(self) -> None:
        if self.structured_outputs is None:
            return
        object.__setattr__(self, "structured_outputs", structured_text(self.structured_outputs))
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise ConfigError(
                    f"sampling.{name} has no meaning beside structured_outputs, which say where an "
                    "answer ends; leave one of them out"
                )

    def _check_types(self) -> None:
        # what vLLM takes as well: one stop string, and lists
        stop: object = self.stop
        for name, value, kind in (
            ("stop", (stop,) if isinstance(stop, str) else stop, str),
            ("stop_token_ids", self.stop_token_ids, int),
        ):
            if not isinstance(value, list | tuple) or not all(isinstance(i, kind) for i in value):
                raise ConfigError(
                    f"sampling.{name} must be a list of {kind.__name__}, got {value!r}"
                )
            object.__setattr__(self, name, tuple(value))
        for names, kinds, allowed in (
            (WHOLE_OPTIONS, int, "a whole number"),
            (NUMBER_OPTIONS, int | float, "a number"),
        ):
            for name in names:
                value = getattr(self, name)
                is_absent = value is None and name in OPTIONAL_OPTIONS
                if not is_absent and (isinstance(value, bool) or not isinstance(value, kinds)):
                    raise ConfigError(f"sampling.{name} must be {allowed}, got {value!r}")
        for name in FLAG_OPTIONS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"sampling.{name} must be true or false, got {getattr(self, name)!r}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked of an engine for one row.

    Args:
        request_id: unique among the requests that one pool has in flight.
        row_id: the row's identity as the user sees it.
        prompt_token_ids: int32 [P], read only.
        sampling: options of this row.
        seed: 64-bit; derived from the job's seed and `row_id`, never from the placement.
        group_id: prefix-sharing group of the plan; None without a plan.
        prefix_len: tokens of the prompt that the whole group shares.
        expected_output_len: tokens that it is likely to generate; None where nothing is known.
        payload: what some backends need beside tokens: the prompt as "messages" or as "prompt",
            JSON values, read only; empty where the tokens say all.
    """

    request_id: int
    row_id: str
    prompt_token_ids: TokenIds
    sampling: Sampling
    seed: int = 0
    group_id: int | None = None
    prefix_len: int = 0
    expected_output_len: int | None = None
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What came out for one sample of one request: tokens, or an error.

    Args:
        request_id: of the request.
        sample_idx: 0..n-1.
        token_ids: int32, generated tokens, the stop token included when one was generated.
        finish_reason: "stop", "length", "error" or "capacity" (could not fit even alone).
        stop_reason: the stop string or stop token id that ended it, None for the end token.
        num_cached_tokens: prompt tokens whose KV came from another request; counted once per
            request, so 0 for the samples after the first.
        text: set by backends that detokenize themselves; None leaves it to the stage.
        vector: what a pooling task made of the prompt; None where tokens are generated.
        logprobs: per generated token a pair (token ids, log probabilities), the sampled token
            first; None unless asked for.
        error: "" for a good completion, else "Type: message".
        num_input_tokens: of the prompt as the backend counts it; None leaves it to the stage. Like
            the cost it is told with the first sample of a request.
        num_generated_tokens: where the backend knows more than `token_ids` says.
        cost: of the request, in the currency of the backend's prices; None where it has none.
        parsed: what `text` is without; None where nothing was looked for.
    """

    request_id: int
    sample_idx: int = 0
    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    text: str | None = None
    vector: Vector | None = None
    logprobs: tuple[tuple[TokenIds, npt.NDArray[np.float32]], ...] | None = None
    error: str = ""
    num_input_tokens: int | None = None
    num_generated_tokens: int | None = None
    cost: float | None = None
    parsed: ParsedText | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """A running sequence as data, so that another replica can go on with it.

    The receiver computes the KV of prompt and `token_ids` again; sampling goes on at position
    `len(token_ids)` with the same seed, so the tokens are those of an uninterrupted run.
    """

    request: Request
    sample_idx: int
    token_ids: TokenIds
    num_cached_tokens: int = 0
    logprobs: tuple[tuple[TokenIds, npt.NDArray[np.float32]], ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What one backend can hold.

    Args:
        kv_tokens: tokens of KV cache.
        max_model_len: longest prompt plus output, in tokens.
        max_num_seqs: sequences that may run at once.
        block_size: tokens of one cache block, the granularity of prefix sharing.
        max_batched_tokens: token budget of one step; None where it is that of `EngineConfig`, or
            where there is none.
    """

    kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    max_batched_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStats:
    """Counters of one backend since it started, and its state at this moment.

    `num_swapped_tokens` are those whose KV came back from host memory after a preemption, in place
    of being computed again, and `swapped_bytes` what was copied for that, there and back; of these,
    `checkpoint_bytes` went to the host ahead of a preemption. `checkpoint_used_bytes` were there
    when a sequence yielded, so that they were not copied then.
    `num_weight_copies` layers whose weights do not stay on the device were copied there,
    `weight_copy_bytes` in all, and `num_weight_stalls` of them were waited for;
    `num_failed_copies` of KV and weights failed, and the engine went on.
    `num_held_steps` counts steps in which a sequence had room but was kept waiting, because the
    memory was forecast to run out; `num_pinned_blocks` are held for prefix groups now;
    `num_drafted_tokens` were guessed ahead and computed, and `num_accepted_tokens` of them were
    right; `num_graphs` CUDA graphs were captured, `num_graph_steps` repeated one of them, and
    `eager_steps` counts by reason those that could not; `kv_tokens` is the size of the KV cache, 0
    where it is not known. Of an endpoint,
    `kv_used_fraction` is the share of `concurrency` in flight, the samples that may be now, and
    `num_retries` counts requests that were sent again.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_used_fraction: float = 0.0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_tokens: int = 0
    swapped_bytes: int = 0
    checkpoint_bytes: int = 0
    checkpoint_used_bytes: int = 0
    num_weight_copies: int = 0
    weight_copy_bytes: int = 0
    num_weight_stalls: int = 0
    num_failed_copies: int = 0
    num_held_steps: int = 0
    num_pinned_blocks: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_graphs: int = 0
    num_graph_steps: int = 0
    eager_steps: Mapping[str, int] = field(default_factory=dict)
    kv_tokens: int = 0
    concurrency: int = 0
    num_retries: int = 0
    engine_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUnit:
    """A unit of commit that is at work.

    Args:
        unit: number of the unit.
        age_s: since its rows were handed to the pool.
        host: of its feeder.
        pid: of its feeder.
    """

    unit: int
    age_s: float
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """State of a pool of replicas; the counts of rows and tokens are those of one client stage.

    Args:
        num_replicas: replicas that the pool wants.
        num_ready: replicas that answer.
        num_restarting: replicas that answered once, and are started again at this moment.
        num_given_up: replicas that failed to start too often.
        num_restarts: replicas started again after a death.
        num_group_cuts: times that a replica got rows of a prefix group that was live at another.
        cut_tokens: prefix tokens that are computed once more for these.
        rows_received: rows handed to the pool so far.
        rows_done: rows that came back, error rows included.
        errors: error class to number of rows.
        prompt_tokens_received: of all rows handed over.
        prompt_tokens_done: of the rows that came back.
        cached_tokens: prompt tokens whose KV came from another request.
        generated_tokens: of the rows that came back.
        cost: of the rows that came back, where the backend has prices.
        max_tokens_left: upper bound of tokens still to generate.
        busy_s: seconds that engines spent in steps, summed over replicas.
        first_row_s: seconds from the first row received to the first row back; None before.
        replicas: counters of each live engine.
        ranks: of these engines.
        num_units_written: units of commit that feeders have written.
        num_open_units: units of commit that are at work.
        oldest_unit: the one among them that has taken longest; None where there is none.
    """

    num_replicas: int = 0
    num_ready: int = 0
    num_restarting: int = 0
    num_given_up: int = 0
    num_restarts: int = 0
    num_group_cuts: int = 0
    cut_tokens: int = 0
    rows_received: int = 0
    rows_done: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens_received: int = 0
    prompt_tokens_done: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    max_tokens_left: int = 0
    busy_s: float = 0.0
    first_row_s: float | None = None
    replicas: tuple[ReplicaStats, ...] = ()
    ranks: tuple[int, ...] = ()
    num_units_written: int = 0
    num_open_units: int = 0
    oldest_unit: OpenUnit | None = None
