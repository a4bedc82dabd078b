"""Frozen records that cross process and layer borders; no behaviour beyond validation."""

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
# what is made of a prompt: text, or numbers by pooling the states of its tokens
Task = Literal["generate", "embed", "classify", "score"]

TokenIds = npt.NDArray[np.int32]
NO_TOKENS: TokenIds = np.empty(0, np.int32)
Vector = npt.NDArray[np.float32]
# lengths that stand for a distribution
TokenLengths = tuple[int, ...]
# ids of likely tokens in one place, and their log-probabilities
TokenLogprobs = tuple[TokenIds, Vector]

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
    """Go on after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: str | Mapping[str, Any] | None = None
    """What the answer must look like, such as {"json": schema}."""

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
                    f"sampling.{name} has no meaning beside structured_outputs, which say where an "
                    "answer ends; leave one of them out"
                )

    def _check_types(self) -> None:
        # what vLLM takes as well: one stop string, and lists
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
    """Tokens of rows, or of what else a record counts; the names are those of every such record."""

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
    """Return a field of a count that Prometheus has as well, with what it says of it there.

    Args:
        metric: its name there; that of the field without `num_` by default.
    """
    return field(default=default, metadata={"kind": "counter", "metric": metric, "text": text})


def gauge(text: str, *, metric: str, default: float = 0) -> Any:  # noqa: ANN401 - a field
    """Return a field of a state of this moment that Prometheus has as well."""
    return field(default=default, metadata={"kind": "gauge", "metric": metric, "text": text})


def metrics_of(record: type, kind: Literal["counter", "gauge"]) -> dict[str, tuple[str, str]]:
    """Return the fields of a record that Prometheus has, each with its name and its text there."""
    return {
        each.name: (
            each.metadata["metric"] or each.name.removeprefix("num_"),
            each.metadata["text"],
        )
        for each in fields(record)
        if each.metadata.get("kind") == kind
    }


def token_counts(counts: object) -> dict[str, int]:
    """Return the counts of tokens of any record that has them, by name."""
    return {name: getattr(counts, name) for name in TOKEN_COUNTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One row, as an engine gets it."""

    request_id: int
    """Unique among the requests that one pool has in flight."""
    row_id: str
    """The row's identity as the user sees it."""
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
    """None where nothing is known."""
    likely_output_lens: TokenLengths = ()
    """Ascending, of rows like this one, each of an equal share of them; () where none are known."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What some backends need with tokens, or in their place, see `raybatch.records.payload`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What came out for one sample of one request: tokens, or an error."""

    request_id: int
    sample_idx: int = 0
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    """int32; ends with the stop token when one was generated."""
    finish_reason: FinishReason = "stop"
    """"capacity" could not fit even alone."""
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended it; None for the end token."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from another request; 0 for the samples after the first."""
    text: str | None = None
    """Set by backends that detokenize themselves; None leaves it to the stage."""
    vector: Vector | None = None
    """What a pooling task made of the prompt; None where tokens are generated."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Per generated token a pair (token ids, log probabilities), the sampled token first; None
    unless requested."""
    error: str = ""
    """"" for a good completion, else "Type: message"."""
    num_input_tokens: int | None = None
    """Prompt tokens as the backend counts them; None leaves it to the stage. Set, like the cost, on
    the first sample alone."""
    num_generated_tokens: int | None = None
    """Where the backend knows more than `token_ids` says."""
    cost: float | None = None
    """Of the request, in the currency of the backend's prices; None where it has none."""
    parsed: ParsedText | None = None
    """What was taken out of `text`; None where nothing was looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """A running sequence as data, so that another replica can go on with it.

    The receiver computes the KV of prompt and `token_ids` again, but for what comes along in `kv`;
    sampling goes on at position `len(token_ids)` with the same seed, so the tokens are those of an
    uninterrupted run.
    """

    request: Request
    sample_idx: int
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    kv: SequenceKV | None = None
    num_reported: int | None = None
    """Of `token_ids`, those that `Backend.begun` returned before; None where it returned all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowProgress:
    """How far the running sequences of one engine are, int64 [S] each."""

    request_ids: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    """Prompt and generated tokens."""
    num_generated: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What one backend can hold."""

    kv_tokens: int
    """Of the whole KV cache."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    max_num_seqs: int
    """Sequences that may run at once."""
    block_size: int
    """Tokens of one cache block, the granularity of prefix sharing."""
    max_batched_tokens: int | None = None
    """Token budget of one step; None where it is that of `EngineConfig`, or where there is none."""
    kv_token_bytes: int = 0
    """KV bytes of a token that can be moved to another engine; 0 where none can."""
    team_sizes: tuple[int, ...] = ()
    """How many engines may compute its steps together, itself included; () where none may."""
    weight_bytes: int = 0
    """That ranks of a team divide among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStats(TokenCounts):
    """Counters of one backend since it started, and its state at this moment."""

    num_running: int = gauge("Requests that generate.", metric="running_requests")
    num_waiting: int = gauge("Requests that wait in the engine.", metric="waiting_requests")
    kv_used_fraction: float = gauge(
        "Share of the KV cache that is in use.", metric="kv_usage_ratio", default=0.0
    )
    """Of an endpoint the share of `concurrency` in flight."""
    num_steps: int = 0
    num_preemptions: int = counter("Requests that gave up their KV.")
    num_recomputed_tokens: int = 0
    """After a preemption or a move."""
    num_chunk_tokens: int = 0
    """Of prompts, that steps have computed; 0 where an engine counts them when rows start."""
    num_carried_tokens: int = 0
    """Whose KV came along from another engine."""
    num_swapped_tokens: int = counter("Tokens whose KV came back from host memory.")
    """After a preemption."""
    num_rounded_tokens: int = counter("Of the swapped tokens, those in 8 bits.")
    """See `host_kv_dtype`."""
    num_rounded_sequences: int = 0
    """To which that happened; their tokens may be others."""
    swapped_bytes: int = counter("KV copied to host memory and back.")
    num_weight_copies: int = counter("Layers whose weights were copied to the device.")
    weight_copy_bytes: int = counter("Weights copied to the device.")
    num_weight_stalls: int = counter("Layers whose weights were waited for.")
    num_failed_copies: int = counter("Copies of KV or weights that failed.")
    """The engine went on."""
    num_copied_blocks: int = 0
    """KV blocks that samples shared, until one of them wrote behind the prompt."""
    num_held_steps: int = 0
    """In which a sequence had room but waited, because memory was forecast to run out."""
    num_drafted_tokens: int = counter("Tokens guessed ahead.")
    num_accepted_tokens: int = counter("Of these, the right ones.")
    num_graphs: int = gauge("CUDA graphs of decode steps.", metric="captured_graphs")
    num_graph_steps: int = counter("Steps that were repeated from a CUDA graph.")
    eager_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps that could not, by reason."""
    kv_tokens: int = 0
    """Size of the KV cache; 0 where it is not known."""
    concurrency: int = gauge(
        "Samples that may be in flight at an endpoint.", metric="endpoint_concurrency"
    )
    num_retries: int = counter("Requests sent again.", metric="endpoint_retries")
    engine_s: float = 0.0
    """Seconds in steps that have ended."""
    step_s: float = 0.0
    """Seconds so far of the step that runs."""
    threshold_rows: float = 0.0
    """Of a pass, from which on copies of shared weights are better than rounds; 0 without them."""
    num_lost_rounds: int = 0
    """Times that rounds ended although nobody had asked for it, as a replica was gone."""
    num_rounds: int = counter("Passes in step with a group that shares weights.")
    num_dummy_rounds: int = counter("Of these, without rows of its own.")
    num_served_rows: int = counter("Computed for others in these, counted in every layer.")
    round_bytes: int = counter("Sent for rows in these.")
    num_lost_teams: int = 0
    """That it led, and of which a rank was gone; it went on alone."""
    way: str = ""
    """How it runs, where it chose, and why."""

    @property
    def busy_s(self) -> float:
        """Seconds in steps, that of the present one included."""
        return self.engine_s + self.step_s

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens that were computed, those of another time included."""
        started = self.prompt_tokens - self.cached_tokens + self.num_recomputed_tokens
        return self.num_chunk_tokens or started
