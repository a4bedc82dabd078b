"""Options of one engine, and which backend runs it."""

from dataclasses import field
from typing import Annotated, Literal

from raybatch.config.checked import BeforeValidator, Field, dataclass
from raybatch.config.option import (
    CHECKED,
    Answers,
    NonNegative,
    Place,
    Positive,
    SecretMapping,
    Speed,
    is_default,
    options,
)
from raybatch.errors import ConfigError
from raybatch.records.types import Task

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "fp8"]
KVCacheDType = Literal["auto", "int8", "fp8"]
_NONE_IS_AUTO = BeforeValidator(lambda value: "auto" if value is None else value)
# a step of so many tokens keeps processors busy; larger ones need memory
DEFAULT_STEP_TOKENS = 2048
# what its engines are tested on
_DEVICE = Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", examples=["cpu", "cuda", "cuda:1"])


@options("engine.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class EngineConfig:
    """Options of one engine; vLLM takes those that it has, see its page."""

    dtype: Answers[DType] = "auto"
    """Type of weights, activations and, by default, KV; "auto" is float32 on a CPU, the
    checkpoint's on a GPU."""
    quantization: Answers[Quantization | None] = None
    """Either "int8" or "fp8", which stores the weights of linear layers (not the head and routers)
    in 8 bits and computes in `dtype`: a quarter of float32's memory, and answers change. None does
    not quantize."""
    device: Place[Annotated[str, _DEVICE]] = "auto"
    """Such as "cuda" or "cpu"; "auto" takes the GPU that Ray assigned, else the CPU."""
    device_weight_bytes: Speed[NonNegative | Literal["auto"] | None] = "auto"
    """Device memory for weights; feed-forward blocks beyond it stay in host memory and are copied
    in at every step. "auto" keeps all that fit; where not all fit a GPU, as many as promise the
    most tokens/s. None keeps all."""
    weight_buffers: Speed[Positive | Literal["auto"]] = "auto"
    """Device buffers for what is copied in: of one feed-forward block each, or of one tile where
    `weights` are shared. "auto" takes 2, and of shared ones what hides their copies."""
    weights: Speed[Literal["replicated", "shared", "auto"]] = "replicated"
    """With "shared", the replicas of a `pool.share_group` hold each feed-forward weight once and
    read it from each other, and memory goes to KV; sums may round otherwise. "replicated" holds
    all. "auto" shares in a job that cannot run so, or ends 5 % sooner in a simulation."""
    kv_cache_dtype: Answers[KVCacheDType] = "auto"
    """Type of KV: "auto" is `dtype`; "int8" and "fp8" (float8_e4m3fn) hold almost four times as
    many tokens as float32, and answers change."""
    kv_cache_bytes: Speed[Positive | None] = None
    """Memory for KV on the device; None takes a share of what is free."""
    host_kv_bytes: Speed[NonNegative | Literal["auto"] | None] = "auto"
    """Host memory for the KV of preempted sequences, or of all (`kv_offload`); None or 0 has none
    and computes it again. "auto" takes a share of what is free where `kv_offload` is true or a
    GPU's engine chooses it, else none."""
    host_kv_dtype: Answers[KVCacheDType] = "auto"
    """With "int8" or "fp8", half of `host_kv_bytes` holds exact copies, and KV that finds no room
    there is rounded into the other half; answers of such rows change. "auto" rounds nothing."""
    kv_offload: Speed[bool | Literal["auto"]] = "auto"
    """Keep the KV of all sequences in host memory, and on the device two buffers of one layer each:
    attention runs over as many rows as a buffer holds, then feed-forward layers over all rows of
    the step. "auto" does so where there is host memory for KV, and measured layers and links
    promise more tokens/s for the rows at hand."""
    block_size_tokens: Speed[Positive] = 64
    """Tokens per KV block."""
    max_batched_tokens: Speed[Positive | Literal["auto"]] = "auto"
    """Token budget of one step; "auto" is 2048, more on a GPU where measured layers promise more
    tokens/s, less on a CPU where larger steps take many seconds and gain nothing."""
    max_num_seqs: Speed[Positive] = 1024
    """Most sequences that run at once; KV memory is usually the tighter limit."""
    max_model_len: Answers[Positive | None] = None
    """Longest prompt plus output; None takes the model's own limit."""
    enable_prefix_caching: Speed[bool] = True
    """Reuse the KV of equal leading blocks across requests."""
    speculative_tokens: Speed[NonNegative | Literal["auto"] | None] = "auto"
    """Most draft tokens per sequence and step, looked up in its prompt and in earlier answers
    (n-gram speculation). Answers stay the same; drafts stop where they cost more than they save.
    None or 0 makes none; "auto" makes some on a CPU while the last few rows decode."""
    num_threads: Speed[Positive] = 1
    """Torch threads of one engine on a CPU."""
    tune_malloc: Speed[bool] = True
    """Let glibc keep freed memory, which saves page faults at every step; affects the whole
    process, Linux only."""
    compile_kernels: Speed[bool] = True
    """On a CPU, compile hot operations with the host's C compiler, if there is one; float32 and one
    thread only."""
    cuda_graphs: Speed[Annotated[bool | Literal["auto"] | None, _NONE_IS_AUTO]] = "auto"
    """Run steps as CUDA graphs, padded to a few sizes; "auto" does so on CUDA where possible."""

    def __post_init__(self) -> None:
        if self.device_weight_bytes is None and not is_default(self, "weight_buffers"):
            raise ConfigError(
                "engine.weight_buffers is for layers that do not stay on the device, and "
                "device_weight_bytes of none keeps all there; leave one of them out"
            )
        if self.weights == "shared":
            self._check_shared()
        if self.cuda_graphs is True and self.device == "cpu":
            raise ConfigError(
                "engine.cuda_graphs is true, but device is 'cpu', which has none; leave it "
                "out, and engines use graphs where they run on CUDA"
            )
        if self.kv_offload is True:
            self._check_offload()
        if self.host_kv_dtype != "auto":
            self._check_rounding()

    def _check_shared(self) -> None:
        for name, beside in (
            ("device_weight_bytes", self.device_weight_bytes != "auto"),
            ("kv_offload", self.kv_offload is True),
            ("cuda_graphs", self.cuda_graphs is True),
        ):
            if beside:
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
            ("cuda_graphs", "uses the pool as a window, and graphs know pools"),
        ):
            # what is switched off is no different from what is not there
            if getattr(self, name) and not is_default(self, name):
                raise ConfigError(
                    f"engine.{name} cannot be set with engine.kv_offload, which {why}; leave one "
                    "of them out"
                )

    def _check_rounding(self) -> None:
        why = None
        if not self.given_host_kv_bytes:
            why = "is for KV in host memory; set host_kv_bytes as well, or leave it out"
        elif self.kv_cache_dtype != "auto":
            why = "rounds KV, and with kv_cache_dtype all has 8 bits already; leave one of them out"
        elif self.kv_offload is True:
            why = "rounds KV that yields, and with kv_offload none does; set kv_cache_dtype instead"
        if why is not None:
            raise ConfigError(f"engine.host_kv_dtype {why}")

    @property
    def given_buffers(self) -> int | None:
        """Return the buffers for weights that are given; None where nothing is said."""
        return None if self.weight_buffers == "auto" else self.weight_buffers

    @property
    def token_budget(self) -> int:
        """Return the tokens of a step, before an engine has chosen more."""
        return DEFAULT_STEP_TOKENS if self.max_batched_tokens == "auto" else self.max_batched_tokens

    @property
    def num_drafts(self) -> int:
        """Return the drafts of a row in any step; 0 where they wait for the last rows."""
        return 0 if self.speculative_tokens in (None, "auto") else int(self.speculative_tokens)

    @property
    def given_host_kv_bytes(self) -> int:
        """Return the host memory for KV that is given; 0 where an engine may choose some."""
        return 0 if self.host_kv_bytes in (None, "auto") else int(self.host_kv_bytes)

    @property
    def compiles_kernels(self) -> bool:
        """Return whether ops may run as compiled ones, which use one thread."""
        return self.compile_kernels and self.num_threads == 1


@options("backend.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class BackendConfig:
    """Which backend a replica runs."""

    kind: Answers[str] = "auto"
    """Either "auto" (vLLM if the engines have GPUs and vLLM is installed there, else native; a
    started output keeps its backend), "native", "vllm", "transformers" (slow, for models that
    native does not know), "openai" (any endpoint with OpenAI's API) or "fake" (no model, for
    tests)."""
    options: Answers[SecretMapping] = field(default_factory=dict)
    """Options of that backend, see the sections below; None has none."""
    task: Answers[Task] = "generate"
    """The `task` of the stage; set it there."""

    @property
    def is_decided(self) -> bool:
        """Return whether the kind is one that runs."""
        return self.kind != "auto"
