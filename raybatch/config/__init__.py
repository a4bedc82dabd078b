"""Frozen configs of every component, validated when built; only this package reads the environment.

`from_mapping` builds any of them from a plain mapping (a job file, keyword options) and refuses
unknown keys with a suggestion. Configs are never modified: `dataclasses.replace` makes a new one.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from raybatch.config.environment import (
    armed_fault,
    cache_dir,
    environment,
    is_hub_offline,
    log_level,
    secret_of,
)
from raybatch.config.option import (
    CHECKED,
    Answers,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Place,
    Positive,
    SecretMapping,
    Speed,
    Unchecked,
    from_mapping,
    from_plain,
    is_default,
    is_number,
    options,
)
from raybatch.errors import ConfigError, range_text
from raybatch.records.types import Sampling, Task

__all__ = [
    "DEFAULT_STEP_TOKENS",
    "BackendConfig",
    "EngineConfig",
    "KVCacheDType",
    "LimitConfig",
    "OrderName",
    "PlanConfig",
    "PoolConfig",
    "SpecialTokens",
    "Strategy",
    "WaveConfig",
    "armed_fault",
    "cache_dir",
    "check_bundles",
    "environment",
    "from_mapping",
    "from_plain",
    "is_hub_offline",
    "log_level",
    "secret_of",
]

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "fp8"]
KVCacheDType = Literal["auto", "int8", "fp8"]
Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
SpecialTokens = Literal["escape", "allow"]
OrderName = Literal["auto", "ratio"]
_NONE_IS_AUTO = BeforeValidator(lambda value: "auto" if value is None else value)
# YAML reads an unquoted off as False
_NO_IS_OFF = BeforeValidator(lambda value: "off" if value is False else value)
_AtLeastTwo = Annotated[int, Ge(2)]
# tokens per step that keep processors busy; larger steps need more memory
DEFAULT_STEP_TOKENS = 2048
# devices that engines are tested on
_DEVICE = Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", examples=["cpu", "cuda", "cuda:1"])
# statuses of rows that may succeed with other sampling options
_WAVE_STATUSES = ("truncated", "too_long", "error", "crashed")


@options("engine.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class EngineConfig:
    """Options of one engine; the page about vLLM lists those that its backend supports."""

    dtype: Answers[DType] = "auto"
    """Type of weights, activations and default KV; "auto" is float32 on a CPU, the checkpoint's on
    a GPU."""
    quantization: Answers[Quantization | None] = None
    """Store weights of linear layers (not the head and routers) in 8 bits, "int8" or "fp8", and
    compute in `dtype`: a quarter of float32's memory; answers change. None does not quantize."""
    device: Place[Annotated[str, _DEVICE]] = "auto"
    """Such as "cuda" or "cpu"; "auto" uses Ray's assigned GPU, else the CPU."""
    device_weight_bytes: Speed[NonNegative | Literal["auto"] | None] = "auto"
    """Device memory for weights; further feed-forward blocks stay in host memory and are copied in
    at every step. "auto" keeps all, or on a GPU too small for them the number with the most
    forecast tokens/s. None keeps all."""
    weight_buffers: Speed[Positive | Literal["auto"]] = "auto"
    """Device buffers for copied-in weights: of one feed-forward block each, or of one shard if
    `weights` are shared. "auto": 2, for shared weights enough to hide copies."""
    weights: Speed[Literal["replicated", "shared", "auto"]] = "replicated"
    """"shared": the replicas of a `pool.share_group` hold each feed-forward weight once and read
    it from each other; the memory goes to KV, sums may round differently. "auto" shares if a job
    cannot run otherwise, or ends 5 % sooner in a simulation."""
    kv_cache_dtype: Answers[KVCacheDType] = "auto"
    """Type of KV: "auto" is `dtype`; "int8" and "fp8" (float8_e4m3fn) hold almost four times
    float32's tokens; answers change."""
    kv_cache_bytes: Speed[Positive | None] = None
    """Memory for KV on the device; None uses a share of the free memory."""
    host_kv_bytes: Speed[NonNegative | Literal["auto"] | None] = "auto"
    """Host memory for KV of preempted sequences, or of all (`kv_offload`). None or 0: recompute.
    "auto": a share of the free memory if `kv_offload` is true or a GPU's engine chooses it, else
    none."""
    host_kv_dtype: Answers[KVCacheDType] = "auto"
    """With "int8" or "fp8", half of `host_kv_bytes` holds exact copies; KV beyond that is rounded
    into the other half, and answers of such rows change. "auto" rounds nothing."""
    kv_offload: Speed[bool | Literal["auto"]] = "auto"
    """Keep all KV in host memory, with two device buffers of one layer each: attention runs over
    the rows of a buffer, feed-forward layers over all rows. "auto": where measured layers and links
    promise more tokens/s."""
    block_size_tokens: Speed[Positive] = 64
    """Tokens per KV block."""
    max_batched_tokens: Speed[Positive | Literal["auto"]] = "auto"
    """Token budget of one step; "auto" is 2048, more on a GPU if measured layers promise more
    tokens/s, less on a CPU where steps would last many seconds without gain."""
    max_num_seqs: Speed[Positive] = 1024
    """Maximum running sequences; KV memory is usually the tighter limit."""
    max_model_len: Answers[Positive | None] = None
    """Maximum prompt plus output tokens; None uses the model's limit."""
    enable_prefix_caching: Speed[bool] = True
    """Reuse the KV of equal leading blocks across requests."""
    speculative_tokens: Speed[NonNegative | Literal["auto"] | None] = "auto"
    """Maximum draft tokens per sequence and step, looked up in its prompt and earlier answers
    (n-gram speculation). Answers stay equal; unprofitable drafting stops. None or 0: no drafts.
    "auto": some on a CPU while the last few rows decode."""
    num_threads: Speed[Positive] = 1
    """Torch threads of one engine on a CPU."""
    tune_malloc: Speed[bool] = True
    """Let glibc keep freed memory, which saves page faults in every step; affects the whole
    process, Linux only."""
    compile_kernels: Speed[bool] = True
    """Compile hot CPU operations with the host's C compiler, if any; float32 and one thread
    only."""
    cuda_graphs: Speed[Annotated[bool | Literal["auto"] | None, _NONE_IS_AUTO]] = "auto"
    """Run steps as CUDA graphs, padded to a few sizes; "auto" does so on CUDA where possible."""

    def __post_init__(self) -> None:
        if self.device_weight_bytes is None and not is_default(self, "weight_buffers"):
            raise ConfigError(
                "engine.weight_buffers has no effect with device_weight_bytes=none, which keeps "
                "all weights on the device; leave one of them out"
            )
        if self.weights == "shared":
            self._check_shared()
        if self.cuda_graphs is True and self.device == "cpu":
            raise ConfigError(
                "engine.cuda_graphs=true needs a GPU, but engine.device is 'cpu'; leave it out: "
                "engines on CUDA then use graphs by default"
            )
        if self.kv_offload is True:
            self._check_offload()
        if self.host_kv_dtype != "auto":
            self._check_rounding()

    def _check_shared(self) -> None:
        for name, is_set in (
            ("device_weight_bytes", self.device_weight_bytes != "auto"),
            ("kv_offload", self.kv_offload is True),
            ("cuda_graphs", self.cuda_graphs is True),
        ):
            if is_set:
                raise ConfigError(
                    f"engine.{name}={getattr(self, name)!r} cannot be set with "
                    "engine.weights='shared', which reads weights of other replicas; leave one of "
                    "them out"
                )

    def _check_offload(self) -> None:
        if self.host_kv_bytes in (None, 0):
            raise ConfigError(
                "engine.kv_offload needs host memory for KV; set host_kv_bytes as well"
            )
        for name, why in (
            ("speculative_tokens", "computes no drafts"),
            ("cuda_graphs", "uses the KV pool as a window, which graphs do not support"),
        ):
            # an option that is switched off counts as not set
            if getattr(self, name) and not is_default(self, name):
                raise ConfigError(
                    f"engine.{name} cannot be set with engine.kv_offload, which {why}; leave one "
                    "of them out"
                )

    def _check_rounding(self) -> None:
        why = None
        if not self.explicit_host_kv_bytes:
            why = "applies to KV in host memory; set host_kv_bytes as well, or leave it out"
        elif self.kv_cache_dtype != "auto":
            why = "has no effect with kv_cache_dtype, which makes all KV 8 bits; leave one out"
        elif self.kv_offload is True:
            why = "rounds KV of preempted rows, none with kv_offload; set kv_cache_dtype instead"
        if why is not None:
            raise ConfigError(f"engine.host_kv_dtype {why}")

    @property
    def explicit_buffers(self) -> int | None:
        """Return `weight_buffers` if it is a number; None for "auto"."""
        return None if self.weight_buffers == "auto" else self.weight_buffers

    @property
    def token_budget(self) -> int:
        """Return `max_batched_tokens` if it is a number; the default for a step if it is "auto"."""
        return DEFAULT_STEP_TOKENS if self.max_batched_tokens == "auto" else self.max_batched_tokens

    @property
    def num_drafts(self) -> int:
        """Return `speculative_tokens` if it is a number; 0 for None and "auto"."""
        return 0 if self.speculative_tokens in (None, "auto") else int(self.speculative_tokens)

    @property
    def explicit_host_kv_bytes(self) -> int:
        """Return `host_kv_bytes` if it is a number; 0 for None and "auto"."""
        return 0 if self.host_kv_bytes in (None, "auto") else int(self.host_kv_bytes)

    @property
    def compiles_kernels(self) -> bool:
        """Return whether compiled ops may run; they use one thread."""
        return self.compile_kernels and self.num_threads == 1


@options("backend.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class BackendConfig:
    """Which backend a replica runs."""

    kind: Answers[str] = "auto"
    """"auto" (vLLM if the engines have GPUs and it is installed there, else native; a started
    output keeps its backend), "native", "vllm", "transformers" (slow, for models that native
    lacks), "openai" (any endpoint with OpenAI's API) or "fake" (no model, for tests)."""
    options: Answers[SecretMapping] = field(default_factory=dict)
    """Options of that backend, see below."""
    task: Answers[Task] = "generate"
    """The `task` of the stage; set it there."""

    @property
    def is_decided(self) -> bool:
        """Return whether the kind is not "auto"."""
        return self.kind != "auto"


@options("pool.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class PoolConfig:
    """Number, resources and restarts of the engines."""

    replicas: Place[Positive | None] = None
    """Number of engines; None: as many as the cluster's GPUs allow, else one per CPU core of the
    driver's host; 1 for an endpoint."""
    min_replicas: Place[Positive | None] = None
    """Engines at the start; others start if enough work is left, idle ones stop. None is 1 if
    `max_replicas` is set."""
    max_replicas: Place[Positive | None] = None
    """Maximum engines; None is the default of `replicas`."""
    num_cpus_per_replica: Place[NonNegativeFloat] = 0
    """CPUs that Ray reserves per engine. Keep 0 on small clusters, or Ray Data's tasks may use all
    CPUs and no engine starts."""
    num_gpus_per_replica: Place[NonNegativeFloat | None] = None
    """GPUs per engine. None is 1 (vLLM: its tensor x pipeline x context parallel size) if the
    cluster has GPUs or options request them: a GPU as `accelerator_type`, `engine.device` "cuda",
    or `replicas` of vLLM."""
    max_row_crashes: Speed[Positive] = 3
    """Engine crashes after which a row becomes an error row."""
    max_start_failures: Speed[Positive] = 3
    """Consecutive failed starts before a replica is given up (one, if the cause is permanent); the
    run fails when none is left."""
    start_timeout_s: Speed[NonNegativeFloat | None] = 1800.0
    """Timeout of a start, and of a wait for resources while no other engine works. None waits
    forever."""
    stuck_after_s: Speed[Annotated[float, Ge(2)] | None] = 180.0
    """Restart an engine that has rows but finishes no step for this long, or does not answer; its
    first step may last as long as a start, others twice the longest so far. None waits forever."""
    duplicate_last_rows: Speed[bool] = False
    """Idle engines also compute some of the last rows of a slow or hanging one; the first result
    counts. Not for endpoints."""
    stages: Speed[Annotated[_AtLeastTwo | Literal["auto", "off"], _NO_IS_OFF]] = "off"
    """Number of length ranges, each with its own engines; "auto" uses ranges where measured costs
    forecast a gain of 5 %. Needs raybatch-lab and `bench calibrate` first."""
    feeder_timeout_s: Speed[Annotated[float, Ge(0.1)]] = 120.0
    """Rows of a feeder (a Ray Data task of the stage) silent for this long are dropped."""
    idle_release_s: Speed[NonNegativeFloat | None] = 600.0
    """Engines idle for this long stop until work comes; None keeps them until the driver ends."""
    keep_tokens_every_s: Speed[Annotated[float, Ge(0.05)] | None] = 30.0
    """How often tokens of long rows are checkpointed, so that another engine can continue them;
    None loses them."""
    share_group: Place[Annotated[int, Ge(2)] | None] = None
    """Replicas of one host that share feed-forward weights (`engine.weights`: "shared") and start
    and end together. None has no groups."""
    accelerator_type: Place[Annotated[str | Sequence[str] | None, Field(examples=["H100"])]] = None
    """Only use hosts with this accelerator, such as "H100", or one of several, as in ["H100",
    "L4"]; None uses any."""
    resources: Place[Unchecked[Mapping[str, float]]] = field(default_factory=dict)
    """Custom Ray resources that one replica reserves, by name."""
    runtime_env: Place[Mapping[str, Any]] = field(default_factory=dict)
    """Ray's runtime_env of the engines: environment variables, packages, files."""
    bundles: Place[Unchecked[Sequence[Mapping[str, float]] | None]] = None
    """Placement group of a vLLM engine with `distributed_executor_backend: ray`, all that Ray
    reserves for it; GPU bundles go to hosts with `accelerator_type`. None: one GPU per rank."""
    strategy: Place[Strategy] = "PACK"
    """Placement strategy of `bundles`, as in Ray."""

    def __post_init__(self) -> None:
        self._check_number()
        if self.accelerator_type is not None and not all(self.accelerator_types or ("",)):
            raise ConfigError(
                "pool.accelerator_type must be a name such as H100, or several, got "
                f"{self.accelerator_type!r}"
            )
        if not isinstance(self.resources, Mapping):
            raise ConfigError(f"pool.resources must be a mapping, got {self.resources!r:.200}")
        for name, amount in self.resources.items():
            where = f"pool.resources: {name!r}"
            if name in ("CPU", "GPU"):
                raise ConfigError(
                    f"{where} cannot be a custom resource; set num_{name.lower()}s_per_replica"
                )
            _check_amount(amount, where=where, is_zero_allowed=True)
        if self.bundles is not None:
            check_bundles(self.bundles, where="pool.bundles")
        others = {
            "num_cpus_per_replica": self.num_cpus_per_replica or None,
            "num_gpus_per_replica": self.num_gpus_per_replica,
            "resources": self.resources or None,
        }
        for name, value in others.items():
            if self.bundles is not None and value is not None:
                raise ConfigError(
                    f"pool.{name}={value!r} has no effect with pool.bundles, which are all that "
                    "Ray reserves for an engine; put it into a bundle, or leave it out"
                )

    def _check_number(self) -> None:
        least, most = self.min_replicas, self.max_replicas
        if least is not None and most is not None and least > most:
            raise ConfigError(
                f"pool.min_replicas={least} is above max_replicas={most}; lower min_replicas or "
                "raise max_replicas"
            )
        for name, value in (("min_replicas", least), ("max_replicas", most)):
            if self.replicas is not None and value is not None:
                raise ConfigError(
                    f"pool.{name}={value} makes the number of engines elastic, but "
                    f"replicas={self.replicas} fixes it; leave one of them out"
                )

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of engines may change while they work."""
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def most_replicas(self) -> int | None:
        """Return the maximum number of engines; None if the resources of the hosts decide it."""
        return self.replicas if self.replicas is not None else self.max_replicas

    @property
    def accelerator_types(self) -> tuple[str, ...]:
        """Return the accelerator types on which engines may run; () for any."""
        kinds = self.accelerator_type
        return (kinds,) if isinstance(kinds, str) else tuple(kinds or ())


def check_bundles(bundles: object, *, where: str, is_zero_allowed: bool = False) -> None:
    """Raise ConfigError unless `bundles` is a list of mappings, as a placement group needs.

    With `is_zero_allowed` amounts may be 0, and a bundle may be empty.
    """
    if not isinstance(bundles, list | tuple) or not bundles:
        raise ConfigError(
            f"{where} must be a list of bundles, such as [{{'GPU': 1}}]; got {bundles!r}"
        )
    for bundle in bundles:
        if not isinstance(bundle, Mapping) or not (bundle or is_zero_allowed):
            raise ConfigError(
                f"{where}: a bundle must be a mapping with a resource, got {bundle!r}"
            )
        for name, amount in bundle.items():
            of_bundle = f"{where}: {name!r} of a bundle"
            _check_amount(amount, where=of_bundle, is_zero_allowed=is_zero_allowed)


def _check_amount(amount: Any, *, where: str, is_zero_allowed: bool) -> None:  # noqa: ANN401
    # NaN fails every comparison
    is_enough = is_number(amount) and (amount >= 0 if is_zero_allowed else amount > 0)
    if not is_enough or not amount < math.inf:
        lowest = "at least 0" if is_zero_allowed else "above 0"
        raise ConfigError(f"{where} must be {range_text(lowest, amount)}, got {amount!r}")


@options("plan.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class PlanConfig:
    """How a job groups and orders its whole input before it generates."""

    mode: Speed[Literal["auto", "off"]] = "auto"
    """"auto" makes the plan, "off" runs rows in input order."""
    order: Speed[OrderName] = "auto"
    """Order of prefix groups: "auto" mixes short and long outputs, long ones early enough to end
    with the run; "ratio" runs the most output per computed prompt token first."""
    sharing: Speed[Literal["single_level", "multi_level"]] = "single_level"
    """"single_level" shares one prefix per group; "multi_level" also prefixes of prefixes, by
    running subtrees of the prefix tree in turn."""
    lengths: Speed[Literal["auto", "probe"]] = "auto"
    """Expected output lengths: "auto" uses `expected_tokens_column` if set, else `max_tokens`;
    "probe" generates some rows first."""
    expected_tokens_column: Speed[str | None] = None
    """Column of expected output tokens; null where unknown."""
    probe_fraction: Speed[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Share of the rows that a probe generates; their results are kept."""
    min_saved_fraction: Speed[Fraction] = 0.01
    """Rows keep input order if sharing saves a smaller share of the prompt tokens and output
    lengths are unknown."""
    unit_rows: Speed[Positive] = 1024
    """Target rows of a commit unit."""
    max_unit_rows: Speed[Positive] = 4096
    """A larger prefix group is split over several units."""
    max_driver_bytes: Speed[NonNegative] = 32 << 20
    """The driver plans inputs up to this size in memory; Ray tasks plan larger ones from hashes of
    prompts."""
    shards: Speed[str | None] = "auto"
    """Folder or URI for rows in planned order, which the next run reads instead of sorting again;
    removed when the job is complete. "auto": below the sink, for inputs above 256 MiB."""
    seed: Speed[NonNegative] = 0
    """Random seed of the probe."""

    def __post_init__(self) -> None:
        if self.shards is not None and (not self.shards or self.shards.startswith("memory:")):
            raise ConfigError(
                f"plan.shards={self.shards!r} must be auto, None, or a folder or URI that all "
                "hosts can write"
            )
        if self.max_unit_rows < self.unit_rows:
            raise ConfigError(
                f"plan.max_unit_rows={self.max_unit_rows} is below unit_rows="
                f"{self.unit_rows}; raise max_unit_rows or lower unit_rows"
            )
        if self.lengths == "probe" and self.expected_tokens_column is not None:
            raise ConfigError(
                "plan.lengths=probe and plan.expected_tokens_column both set expected output "
                "lengths; leave one of them out"
            )


@options("limits.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class LimitConfig:
    """Limits that end a run early: no further unit starts, and finished rows are kept.

    Run the same job again to resume; its limits count from zero.
    """

    max_wall_s: Speed[NonNegativeFloat | None] = None
    """Wall-clock seconds of the run."""
    max_tokens: Speed[NonNegative | None] = None
    """Prompt and generated tokens of finished rows."""
    max_engine_hours: Speed[NonNegativeFloat | None] = None
    """Hours of engine work, summed over replicas."""
    max_cost: Speed[NonNegativeFloat | None] = None
    """Money: `price_per_engine_hour` for all replicas, also idle ones, plus an endpoint's
    answers."""
    price_per_engine_hour: Speed[NonNegativeFloat | None] = None
    """Price of one replica per hour, in any currency."""
    max_error_rate: Speed[Fraction | None] = None
    """Share of error rows among finished rows."""
    min_rows_for_error_rate: Speed[Positive] = 100
    """Finished rows before `max_error_rate` is checked."""


@options("waves.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class WaveConfig:
    """A rule that retries rows of some statuses with other options."""

    on: Answers[tuple[str, ...]]
    """Statuses to retry: "truncated", "too_long", "error", "crashed"."""
    sampling: Answers[Mapping[str, Any]]
    """Sampling options that replace those of stage and row, such as {"max_tokens": 2048}."""

    def __post_init__(self) -> None:
        if not self.on or not set(self.on) <= set(_WAVE_STATUSES):
            raise ConfigError(
                f"waves.on must name statuses of {', '.join(_WAVE_STATUSES)}, got {list(self.on)!r}"
            )
        # n and logprobs decide the type of an output column
        names = {f.name for f in dataclasses.fields(Sampling)} - {"n", "logprobs"}
        if not self.sampling or not set(self.sampling) <= names:
            raise ConfigError(
                f"waves.sampling must set sampling options other than n and logprobs, got "
                f"{dict(self.sampling)!r}"
            )
        dataclasses.replace(Sampling(), **self.sampling)
