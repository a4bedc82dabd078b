"""Frozen records that cross process and layer borders, without behaviour beyond validation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError, range_text
from raybatch.records.parsed_text import ParsedText
from raybatch.records.sequence_kv import SequenceKV
from raybatch.records.structured_outputs import structured_text

FinishReason = Literal["stop", "length", "filtered", "error", "capacity"]
# what a stage computes from a prompt: text, or numbers by pooling the states of its tokens
Task = Literal["generate", "embed", "classify", "score"]

TokenIds = npt.NDArray[np.int32]
NO_TOKENS: TokenIds = np.empty(0, np.int32)
Vector = npt.NDArray[np.float32]
# number of lengths that represent a distribution
TokenLengths = tuple[int, ...]
# ids of the most likely tokens at one position, and their log probabilities
TokenLogprobs = tuple[TokenIds, Vector]

# value of `max_tokens` above any context, so that only the context limits the output
UNBOUNDED_TOKENS = 1 << 30
# maximum samples of one row, as in vLLM (VLLM_MAX_N_SEQUENCES), enough for pass@10,000
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
    """

    temperature: float = 0.0
    """0 picks the most likely token; above 0 divides the logits."""
    max_tokens: int = 256
    """Upper bound of generated tokens, at least 1."""
    min_tokens: int = 0
    """Stop tokens and stop strings do not count before this many tokens."""
    top_k: int | None = None
    """Keep the k most likely tokens; None keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most likely one, in [0, 1)."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output less likely to recur."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token already generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence of a token already generated, in [-2, 2]."""
    seed: int = 0
    """Combined with the row's id, so answers depend on neither engine nor batch."""
    n: int = 1
    """Samples per row, at most 16,384, as in vLLM."""
    logprobs: int | None = None
    """Most likely tokens to report per position; None adds no column."""
    stop: tuple[str, ...] = ()
    """Strings or special tokens that end the text, one or a list; cut off unless
    `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence, in addition to the model's."""
    ignore_eos: bool = False
    """Continue after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: str | Mapping[str, Any] | None = None
    """Constraint of the answer, such as {"json": schema}."""

    def __post_init__(self) -> None:
        self._check_types()
        ranges = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            (
                "min_tokens",
                0 <= self.min_tokens <= self.max_tokens,
                f"between 0 and max_tokens ({self.max_tokens})",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("n", 1 <= self.n <= MAX_SAMPLES, f"at least 1 and at most {MAX_SAMPLES}"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "None or at least 0"),
            ("stop", all(self.stop), "texts that are not empty"),
            (
                "stop_token_ids",
                all(0 <= token_id < 1 << 31 for token_id in self.stop_token_ids),
                "token ids from 0 to 2147483647",
            ),
        )
        for name, is_valid, allowed in ranges:
            value = getattr(self, name)
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not (is_finite and is_valid):
                allowed = allowed if is_finite else range_text(allowed, value)
                raise ConfigError(f"sampling.{name} must be {allowed}, got {value!r}")
        if self.structured_outputs is None:
            return
        object.__setattr__(self, "structured_outputs", structured_text(self.structured_outputs))
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise ConfigError(
                    f"sampling.{name} has no effect with structured_outputs, which decide where an "
                    "answer ends; leave one of them out"
                )

    def _check_types(self) -> None:
        # as in vLLM: one stop string, or lists
        stop: object = self.stop
        for name, value, kind, items in (
            ("stop", (stop,) if isinstance(stop, str) else stop, str, "texts"),
            ("stop_token_ids", self.stop_token_ids, int, "token ids"),
        ):
            if not isinstance(value, list | tuple) or not all(
                isinstance(i, kind) and not isinstance(i, bool) for i in value
            ):
                raise ConfigError(f"sampling.{name} must be a list of {items}, got {value!r:.200}")
            object.__setattr__(self, name, tuple(value))
        for names, kinds, allowed in (
            (WHOLE_OPTIONS, int, "a whole number"),
            (NUMBER_OPTIONS, int | float, "a number"),
            (FLAG_OPTIONS, bool, "true or false"),
        ):
            for name in names:
                value = getattr(self, name)
                is_absent = value is None and name in OPTIONAL_OPTIONS
                is_flag = isinstance(value, bool)
                if not is_absent and (is_flag != (kinds is bool) or not isinstance(value, kinds)):
                    raise ConfigError(f"sampling.{name} must be {allowed}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """Base of records that count tokens, with common names."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from another request."""
    generated_tokens: int = 0

    @property
    def cached_fraction(self) -> float:
        """Share of the prompt tokens whose KV came from another request."""
        return self.cached_tokens / max(1, self.prompt_tokens)


TOKEN_COUNTS = tuple(field.name for field in fields(TokenCounts))


def counter(text: str, *, metric: str = "", default: float = 0) -> Any:  # noqa: ANN401 - a field
    """Return a dataclass field that is also a Prometheus counter with the help `text`.

    Args:
        metric: name of the counter; default: the field's name without `num_`.
    """
    return field(default=default, metadata={"kind": "counter", "metric": metric, "text": text})


def gauge(text: str, *, metric: str, default: float = 0) -> Any:  # noqa: ANN401 - a field
    """Return a dataclass field that is also a Prometheus gauge."""
    return field(default=default, metadata={"kind": "gauge", "metric": metric, "text": text})


def metrics_of(record: type, kind: Literal["counter", "gauge"]) -> dict[str, tuple[str, str]]:
    """Return (metric name, help) by field name, of the fields that are metrics of this kind."""
    return {
        each.name: (
            each.metadata["metric"] or each.name.removeprefix("num_"),
            each.metadata["text"],
        )
        for each in fields(record)
        if each.metadata.get("kind") == kind
    }


def token_counts(counts: object) -> dict[str, int]:
    """Return the token counts of any record with `TokenCounts` fields, by name."""
    return {name: getattr(counts, name) for name in TOKEN_COUNTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for one row, as an engine gets it."""

    request_id: int
    """Unique among the requests that one pool has in flight."""
    row_id: str
    """The row's id for the user."""
    prompt_token_ids: TokenIds
    """int32 [P], read only."""
    sampling: Sampling
    seed: int = 0
    """64-bit; derived from the job's seed and `row_id`, never from the placement."""
    group_id: int | None = None
    """Prefix group of the plan; None without a plan."""
    prefix_len: int = 0
    """Tokens of the prompt that the whole group shares."""
    expected_output_len: int | None = None
    """None if unknown."""
    likely_output_lens: TokenLengths = ()
    """Quantiles of the output length of rows like this one, ascending; () if unknown."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON that some backends need with tokens or instead, see `raybatch.records.payload`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The result of one sample of one request: tokens, or an error."""

    request_id: int
    sample_idx: int = 0
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    """int32; ends with the stop token when one was generated."""
    finish_reason: FinishReason = "stop"
    """"capacity" does not fit the KV cache even alone."""
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended it; None for the end token."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from another request; 0 for the samples after the first."""
    text: str | None = None
    """Set by backends that detokenize themselves; None leaves it to the stage."""
    vector: Vector | None = None
    """Result of a pooling task; None for generation."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Per generated token a pair (token ids, log probabilities), the sampled token first; None
    unless requested."""
    error: str = ""
    """"" for a good completion, else "Type: message"."""
    num_input_tokens: int | None = None
    """Prompt tokens as the backend counts them; None leaves it to the stage. Set, like the cost, on
    the first sample alone."""
    num_generated_tokens: int | None = None
    """Number of generated tokens if `token_ids` lacks some."""
    cost: float | None = None
    """Cost of the request in the currency of the backend's prices; None without prices."""
    parsed: ParsedText | None = None
    """Parts that a parser took out of `text`; None without a parser."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """A running sequence as data, so that another replica can continue it.

    The receiver recomputes the KV of prompt and `token_ids`, except for `kv`; sampling continues
    at position `len(token_ids)` with the same seed, so the tokens are those of an uninterrupted
    run.
    """

    request: Request
    sample_idx: int
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    kv: SequenceKV | None = None
    num_reported: int | None = None
    """Number of `token_ids` that `Backend.checkpoint` returned before; None for all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowProgress:
    """Progress of the S running sequences of one engine; each array is int64 [S]."""

    request_ids: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    """Prompt and generated tokens."""
    num_generated: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Limits of one backend."""

    kv_tokens: int
    """Tokens of the whole KV cache."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    max_num_seqs: int
    """Maximum running sequences."""
    block_size: int
    """Tokens of one cache block, the granularity of prefix sharing."""
    max_batched_tokens: int | None = None
    """Token budget of one step; None if it is that of `EngineConfig`, or unlimited."""
    kv_token_bytes: int = 0
    """KV bytes per token that can be migrated to another engine; 0 if none can."""
    tp_sizes: tuple[int, ...] = ()
    """Possible sizes of TP groups with this engine; () for none."""
    weight_bytes: int = 0
    """Weights that the ranks of a TP group shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStats(TokenCounts):
    """Counters of one backend since it started, and its current state."""

    num_running: int = gauge("Running requests.", metric="running_requests")
    num_waiting: int = gauge("Waiting requests in the engine.", metric="waiting_requests")
    kv_used_fraction: float = gauge(
        "Share of the KV cache in use.", metric="kv_usage_ratio", default=0.0
    )
    """For an endpoint: share of `concurrency` in flight."""
    num_steps: int = 0
    num_preemptions: int = counter("Preempted requests.")
    num_recomputed_tokens: int = 0
    """Tokens recomputed after preemptions and migrations."""
    num_chunk_tokens: int = 0
    """Prompt tokens computed by steps; 0 if an engine counts them when rows start."""
    num_migrated_kv_tokens: int = 0
    """Tokens whose KV was migrated from another engine."""
    num_swapped_tokens: int = counter("Tokens whose KV was swapped in from host memory.")
    """After preemptions."""
    num_rounded_tokens: int = counter("Swapped-in tokens rounded to 8 bits.")
    """See `host_kv_dtype`."""
    num_rounded_sequences: int = 0
    """Sequences with rounded KV; their answers may differ."""
    swapped_bytes: int = counter("KV bytes copied to host memory and back.")
    num_weight_copies: int = counter("Layers whose weights were copied to the device.")
    weight_copy_bytes: int = counter("Bytes of weights copied to the device.")
    num_weight_stalls: int = counter("Layers that waited for their weights.")
    num_failed_copies: int = counter("Failed copies of KV or weights.")
    """The engine continued."""
    num_copied_blocks: int = 0
    """Shared KV blocks copied (copy on write) when a sample wrote after the prompt."""
    num_admission_stalls: int = 0
    """Steps in which a sequence fit but waited, because memory was forecast to run out."""
    num_drafted_tokens: int = counter("Drafted tokens.")
    num_accepted_tokens: int = counter("Accepted draft tokens.")
    num_graphs: int = gauge("CUDA graphs of decode steps.", metric="captured_graphs")
    num_graph_steps: int = counter("Steps replayed from a CUDA graph.")
    eager_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps without a graph, by reason."""
    kv_tokens: int = 0
    """Tokens of the KV cache; 0 if unknown."""
    concurrency: int = gauge(
        "Maximum samples in flight at an endpoint.", metric="endpoint_concurrency"
    )
    num_retries: int = counter("Retried requests.", metric="endpoint_retries")
    engine_s: float = 0.0
    """Seconds of finished steps."""
    step_s: float = 0.0
    """Seconds so far of the running step."""
    threshold_rows: float = 0.0
    """Batch size from which fetching weights beats exchanging rows; 0 if weights are not shared."""
    num_lost_exchanges: int = 0
    """Times that a lost replica ended activation exchange."""
    num_exchanges: int = counter(
        "Passes of activation exchange in a weight-sharing group.", metric="rounds"
    )
    num_dummy_exchanges: int = counter("Exchange passes without own rows.", metric="dummy_rounds")
    num_served_rows: int = counter("Rows computed for peers in exchange passes, counted per layer.")
    exchange_bytes: int = counter("Bytes sent in exchange passes.", metric="round_bytes")
    num_lost_tp_groups: int = 0
    """TP groups led by this engine that lost a rank; it continued alone."""
    execution_mode: str = ""
    """Execution mode, if the engine chose one, and why."""

    @property
    def busy_s(self) -> float:
        """Seconds in steps, including the running one."""
        return self.engine_s + self.step_s

    @property
    def num_prefilled_tokens(self) -> int:
        """Computed prompt tokens, including recomputed ones."""
        started = self.prompt_tokens - self.cached_tokens + self.num_recomputed_tokens
        return self.num_chunk_tokens or started
