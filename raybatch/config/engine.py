"""Options of one engine, and which backend runs it."""

from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field
from pydantic.dataclasses import dataclass

from raybatch.config.option import (
    CHECKED,
    Answers,
    NonNegative,
    Place,
    Positive,
    SecretMapping,
    Speed,
    fields_of,
    is_default,
    options,
)
from raybatch.errors import ConfigError
from raybatch.records.types import Task

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "fp8"]
VictimOrder = Literal["least", "most", "lifo"]
AdmissionPolicy = Literal["fcfs", "shortest", "multi_bin", "static"]
KVCacheDType = Literal["auto", "int8", "fp8"]


@options("engine.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class EngineConfig:
    """Options of one engine; vLLM takes those that it has under its own names."""

    dtype: Answers[DType] = "auto"
    """Of weights, hidden states and, by default, KV; "auto" takes float32 on a CPU, the
    checkpoint's on a GPU."""

    quantization: Answers[Quantization | None] = None
    """Either "int8" or "fp8", which keeps the weights of linears (but the head and routers) as
    bytes with a scale for each output, while products stay in `dtype`: a quarter of the memory,
    and answers that differ. None keeps them in `dtype`."""

    device: Place[Annotated[str, Field(examples=["cpu", "cuda"])]] = "auto"
    """Such as "cuda" or "cpu"; "auto" takes a GPU where Ray assigned one, else the CPU."""

    device_weight_bytes: Speed[NonNegative | None] = None
    """Memory of the device for weights; layers beyond it stay in host memory and are copied to the
    device in every step. None keeps all on the device."""

    weight_buffers: Speed[Positive] = 2
    """Layers of the ring through which these pass; needs `device_weight_bytes`."""

    kv_cache_dtype: Answers[KVCacheDType] = "auto"
    """Of KV: "auto" keeps it in `dtype`; "int8" and "fp8" (float8_e4m3fn) round it to 8 bits with
    a scale for each token and KV head, so that almost four times as many tokens fit as in float32.
    Answers change."""

    kv_cache_bytes: Speed[Positive | None] = None
    """Memory for KV; None takes a share of the free memory."""

    host_kv_bytes: Speed[NonNegative | None] = None
    """Host memory beside it, for the KV of sequences that had to give up theirs; None or 0 has
    none, and what they lose is computed again."""

    kv_checkpoint_blocks: Speed[NonNegative | None] = None
    """Blocks of KV that a step copies there ahead, of sequences that are about to give theirs up,
    so that less is copied when they do; None or 0 copies none."""

    kv_offload: Speed[bool] = False
    """Keep the KV of all sequences in host memory, and on the device that of those that decode;
    prompts are computed in rounds, with two layers of their KV on the device."""

    offload_initial_blocks: Speed[Positive] = 2
    """Blocks of the device beyond its context that a sequence starts with."""

    offload_extension_blocks: Speed[Positive] = 2
    """Blocks that it gets when these end."""

    offload_interval_blocks: Speed[Positive] = 1
    """Blocks of tokens that sequences decode from one stop to the next."""

    offload_victims: Speed[VictimOrder] = "least"
    """Who yields first where the device is short of blocks: the sequence with the least progress,
    the most, or the one that came last."""

    block_size_tokens: Speed[Positive] = 64
    """Positions of one cache block."""

    max_batched_tokens: Speed[Positive] = 2048
    """Token budget of one step."""

    max_num_seqs: Speed[Positive] = 1024
    """Upper bound of running sequences; the KV memory usually binds first."""

    max_model_len: Answers[Positive | None] = None
    """Longest prompt plus output; None takes the model's own limit."""

    enable_prefix_caching: Speed[bool] = True
    """Share the KV of equal leading blocks between requests."""

    admission: Speed[AdmissionPolicy] = "fcfs"
    """Who starts next. "fcfs" goes by arrival, "shortest" by predicted length, with ageing;
    "static" starts a batch when all of the one before have ended, and "multi_bin" makes such
    batches of rows of like length. A prefix group is never taken apart."""

    kv_admission_fraction: Speed[Annotated[float, Ge(0.01)] | None] = None
    """Sequences start while the KV memory in use is forecast to stay below this share of the
    cache; above 1 more run at once and some are computed again. None makes no forecast: sequences
    start while there are free blocks."""

    attn_batch_tokens: Speed[Positive | Literal["auto"] | None] = "auto"
    """Tokens that attend at once; None takes all of a step. With a number, steps run as
    coroutines: attention part by part, feed-forward blocks together. "auto" measures both ways
    once per model and host where the model has experts, and takes the faster one; other models run
    plain."""

    moe_batch_tokens: Speed[NonNegative | None] = None
    """Tokens for which a feed-forward block waits where steps run as coroutines; None waits for
    all that come, 0 for none."""

    speculative_tokens: Speed[NonNegative | None] = None
    """Drafts of one sequence and step at most: tokens guessed from its prompt and from other
    answers, computed together with the known one and kept where they are right. Answers stay the
    same; drafts are made while they pay. None or 0 makes none."""

    num_threads: Speed[Positive] = 1
    """Torch threads of one engine on a CPU."""

    tune_malloc: Speed[bool] = True
    """Let glibc keep freed memory, so that large temporaries are not mapped and cleared again in
    every step; changes the whole process, Linux only."""

    compile_kernels: Speed[bool] = True
    """On a CPU compile attention of decoding rows, linears, experts and small ops with the host's
    C compiler, where there is one; for float32 and one thread."""

    cuda_graphs: Speed[bool | None] = None
    """Capture steps in which sequences only decode as CUDA graphs, for a few numbers of rows, and
    repeat those; None does so on CUDA wherever it can be done."""

    def __post_init__(self) -> None:
        if self.device_weight_bytes is None and not is_default(self, "weight_buffers"):
            raise ConfigError(
                "engine.weight_buffers is for layers that do not stay on the device; set "
                "device_weight_bytes as well, or leave it out"
            )
        if self.kv_checkpoint_blocks and not self.host_kv_bytes:
            raise ConfigError(
                "engine.kv_checkpoint_blocks needs host memory for KV; set host_kv_bytes as "
                "well, or leave it out"
            )
        if self.speculative_tokens and self.attn_batch_tokens not in (None, "auto"):
            raise ConfigError(
                "engine.speculative_tokens needs steps that are one forward pass, and "
                "attn_batch_tokens makes them coroutines; leave one of them out"
            )
        self._check_graphs()
        self._check_offload()
        if self.kv_admission_fraction is not None and self.admission in ("static", "multi_bin"):
            raise ConfigError(
                "engine.kv_admission_fraction spreads starts over time, and with "
                f"admission={self.admission!r} a batch starts at once; leave one of them out"
            )

    def _check_graphs(self) -> None:
        if self.cuda_graphs and self.attn_batch_tokens not in (None, "auto"):
            raise ConfigError(
                "engine.cuda_graphs needs steps that are one forward pass, and "
                "attn_batch_tokens makes them coroutines; leave one of them out"
            )
        if self.cuda_graphs and self.device == "cpu":
            raise ConfigError(
                "engine.cuda_graphs is true, but device is 'cpu', which has none; leave it "
                "out, and engines use graphs where they run on CUDA"
            )

    def _check_offload(self) -> None:
        if not self.kv_offload:
            for name in fields_of(type(self)):
                if name.startswith("offload_") and not is_default(self, name):
                    raise ConfigError(
                        f"engine.{name} is for KV that lives in host memory; set kv_offload and "
                        "host_kv_bytes as well, or leave it out"
                    )
            return
        if not self.host_kv_bytes:
            raise ConfigError(
                "engine.kv_offload needs host memory for KV; set host_kv_bytes as well"
            )
        for name in ("offload_initial_blocks", "offload_extension_blocks"):
            if getattr(self, name) < self.offload_interval_blocks:
                raise ConfigError(
                    f"engine.{name} is {getattr(self, name)}, and sequences decode "
                    f"{self.offload_interval_blocks} blocks from one page boundary to the next "
                    "(engine.offload_interval_blocks); set it to as many at least"
                )
        for name, why in (
            ("speculative_tokens", "computes no drafts"),
            ("kv_checkpoint_blocks", "copies all KV to host memory anyway"),
            ("admission", "starts rows in the order in which they come"),
            ("kv_admission_fraction", "starts rows in rounds"),
            ("cuda_graphs", "uses the pool in two shapes, and graphs know one"),
        ):
            # what is switched off is no different from what is not there
            if getattr(self, name) and not is_default(self, name):
                raise ConfigError(
                    f"engine.{name} cannot be set with engine.kv_offload, which {why}; leave one "
                    "of them out"
                )

    @property
    def compiles_kernels(self) -> bool:
        """Return whether ops may run as compiled ones, which use one thread."""
        return self.compile_kernels and self.num_threads == 1


@options("backend.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class BackendConfig:
    """Which backend a replica runs."""

    kind: Answers[str] = "auto"
    """Either "auto" (vLLM where the engines have GPUs and it is installed there, else native; an
    output goes on with what it was begun with), "native", "vllm", "transformers" (slow, for models
    that the native engine has not), "openai" (an endpoint that speaks OpenAI's API), or "fake" (no
    model: answers are derived from the prompt; for tests)."""

    options: Answers[SecretMapping] = field(default_factory=dict)
    """Of the backend itself, for example the address of an endpoint; None has none."""

    task: Answers[Task] = "generate"
    """What its engines make of a prompt; that of the stage."""

    @property
    def is_decided(self) -> bool:
        """Return whether the kind is one that runs."""
        return self.kind != "auto"
