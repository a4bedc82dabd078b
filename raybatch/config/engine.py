"""Options of one engine, and which backend runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from raybatch.config.checks import check_bool, check_choice, check_min, check_whole
from raybatch.errors import ConfigError
from raybatch.records.types import Task

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "fp8"]
VictimOrder = Literal["least", "most", "lifo"]
AdmissionPolicy = Literal["fcfs", "shortest", "multi_bin", "static"]
KVCacheDType = Literal["auto", "int8", "fp8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of one engine; vLLM takes those that it has under its own names.

    Args:
        dtype: of weights, hidden states and, by default, KV; "auto" takes float32 on a CPU, the
            checkpoint's on a GPU.
        quantization: "int8" or "fp8" keeps the weights of linears (but the head and routers) as
            bytes with a scale for each output, while products stay in `dtype`: a quarter of the
            memory, and answers that differ. None keeps them in `dtype`.
        device: "auto" takes a GPU where Ray assigned one, else the CPU.
        device_weight_bytes: memory of the device for weights; layers beyond it stay in host memory
            and are copied to the device in every step. None keeps all on the device.
        weight_buffers: layers of the ring through which these pass; needs `device_weight_bytes`.
        kv_cache_dtype: "auto" keeps KV in `dtype`; "int8" and "fp8" (float8_e4m3fn) round it to 8
            bits with a scale for each token and KV head, so that almost four times as many tokens
            fit as in float32. Answers change.
        kv_cache_bytes: memory for KV; None takes a share of the free memory.
        host_kv_bytes: host memory beside it, for the KV of sequences that had to give up theirs;
            None or 0 has none, and what they lose is computed again.
        kv_checkpoint_blocks: blocks of KV that a step copies there ahead, of sequences that are
            about to give theirs up, so that less is copied when they do; None or 0 copies none.
        kv_offload: keep the KV of all sequences in host memory, and on the device that of those
            that decode; prompts are computed in rounds, with two layers of their KV on the device.
        offload_initial_blocks: blocks of the device beyond its context that a sequence starts with.
        offload_extension_blocks: blocks that it gets when these end.
        offload_interval_blocks: blocks of tokens that sequences decode from one stop to the next.
        offload_victims: who yields first where the device is short of blocks: the sequence with the
            least progress, the most, or the one that came last.
        block_size_tokens: positions of one cache block.
        max_batched_tokens: token budget of one step.
        max_num_seqs: upper bound of running sequences; the KV memory usually binds first.
        max_model_len: longest prompt plus output; None takes the model's own limit.
        enable_prefix_caching: share the KV of equal leading blocks between requests.
        admission: who starts next. "fcfs" goes by arrival, "shortest" by predicted length, with
            ageing; "static" starts a batch when all of the one before have ended, and "multi_bin"
            makes such batches of rows of like length. A prefix group is never taken apart.
        kv_admission_fraction: sequences start while the KV memory in use is forecast to stay below
            this share of the cache; above 1 more run at once and some are computed again. None
            makes no forecast: sequences start while there are free blocks.
        attn_batch_tokens: tokens that attend at once; None takes all of a step. With a number,
            steps run as coroutines: attention part by part, feed-forward blocks together. "auto"
            measures both ways once per model and host where the model has experts, and takes the
            faster one; other models run plain.
        moe_batch_tokens: tokens for which a feed-forward block waits where steps run as coroutines;
            None waits for all that come, 0 for none.
        speculative_tokens: drafts of one sequence and step at most: tokens guessed from its prompt
            and from other answers, computed together with the known one and kept where they are
            right. Answers stay the same; drafts are made while they pay. None or 0 makes none.
        num_threads: torch threads of one engine on a CPU.
        tune_malloc: let glibc keep freed memory, so that large temporaries are not mapped and
            cleared again in every step; changes the whole process, Linux only.
        compile_kernels: on a CPU compile attention of decoding rows, linears, experts and small ops
            with the host's C compiler, where there is one; for float32 and one thread.
        cuda_graphs: capture steps in which sequences only decode as CUDA graphs, for a few numbers
            of rows, and repeat those; None does so on CUDA wherever it can be done.
    """

    WHERE: ClassVar[str] = "engine."

    dtype: DType = "auto"
    quantization: Quantization | None = None
    device: str = "auto"
    device_weight_bytes: int | None = None
    weight_buffers: int = 2
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_bytes: int | None = None
    host_kv_bytes: int | None = None
    kv_checkpoint_blocks: int | None = None
    kv_offload: bool = False
    offload_initial_blocks: int = 2
    offload_extension_blocks: int = 2
    offload_interval_blocks: int = 1
    offload_victims: VictimOrder = "least"
    block_size_tokens: int = 64
    max_batched_tokens: int = 2048
    max_num_seqs: int = 1024
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    admission: AdmissionPolicy = "fcfs"
    kv_admission_fraction: float | None = None
    attn_batch_tokens: int | Literal["auto"] | None = "auto"
    moe_batch_tokens: int | None = None
    speculative_tokens: int | None = None
    num_threads: int = 1
    tune_malloc: bool = True
    compile_kernels: bool = True
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        check_choice(self, "dtype", ("auto", "float32", "bfloat16", "float16"))
        if self.quantization is not None:
            check_choice(self, "quantization", get_args(Quantization))
        check_choice(self, "admission", get_args(AdmissionPolicy))
        check_choice(self, "kv_cache_dtype", get_args(KVCacheDType))
        for name in ("block_size_tokens", "max_batched_tokens", "max_num_seqs", "num_threads"):
            check_whole(self, name, 1)
        check_whole(self, "weight_buffers", 1)
        for name, least in (("kv_cache_bytes", 1), ("max_model_len", 1), ("moe_batch_tokens", 0)):
            if getattr(self, name) is not None:
                check_whole(self, name, least)
        for name in ("enable_prefix_caching", "tune_malloc", "compile_kernels", "kv_offload"):
            check_bool(self, name)
        if not isinstance(self.device, str):
            raise ConfigError(
                f"engine.device must be a name such as auto, cpu or cuda, got {self.device!r}"
            )
        if self.attn_batch_tokens not in (None, "auto"):
            check_whole(self, "attn_batch_tokens", 1, others='"auto" or none')
        for name in ("host_kv_bytes", "kv_checkpoint_blocks", "device_weight_bytes"):
            if getattr(self, name) is not None:
                check_whole(self, name, 0)
        if self.device_weight_bytes is None and not self._is_default("weight_buffers"):
            raise ConfigError(
                "engine.weight_buffers is for layers that do not stay on the device; set "
                "device_weight_bytes as well, or leave it out"
            )
        if self.kv_checkpoint_blocks and not self.host_kv_bytes:
            raise ConfigError(
                "engine.kv_checkpoint_blocks needs host memory for KV; set host_kv_bytes as "
                "well, or leave it out"
            )
        if self.speculative_tokens is not None:
            check_whole(self, "speculative_tokens", 0)
        if self.speculative_tokens and self.attn_batch_tokens not in (None, "auto"):
            raise ConfigError(
                "engine.speculative_tokens needs steps that are one forward pass, and "
                "attn_batch_tokens makes them coroutines; leave one of them out"
            )
        self._check_graphs()
        self._check_offload()
        if self.kv_admission_fraction is not None:
            check_min(self, "kv_admission_fraction", 0.01)
            if self.admission in ("static", "multi_bin"):
                raise ConfigError(
                    "engine.kv_admission_fraction spreads starts over time, and with "
                    f"admission={self.admission!r} a batch starts at once; leave one of them out"
                )

    def _check_graphs(self) -> None:
        if self.cuda_graphs is not None:
            check_bool(self, "cuda_graphs", others="or none")
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
        check_choice(self, "offload_victims", get_args(VictimOrder))
        for name in ("offload_interval", "offload_initial", "offload_extension"):
            check_whole(self, f"{name}_blocks", 1)
        if not self.kv_offload:
            for name in self.__dataclass_fields__:
                if name.startswith("offload_") and not self._is_default(name):
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
            if getattr(self, name) and not self._is_default(name):
                raise ConfigError(
                    f"engine.{name} cannot be set with engine.kv_offload, which {why}; leave one "
                    "of them out"
                )

    def _is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == self.__dataclass_fields__[name].default)

    @property
    def compiles_kernels(self) -> bool:
        """Return whether ops may run as compiled ones, which use one thread."""
        return self.compile_kernels and self.num_threads == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """Which backend a replica runs.

    Args:
        kind: "auto" (vLLM where the engines have GPUs and it is installed there, else native; an
            output goes on with what it was begun with), "native", "vllm", "transformers" (slow, for
            models that the native engine has not), "openai" (an endpoint that speaks OpenAI's API),
            or "fake" (no model: answers are derived from the prompt; for tests).
        options: of the backend itself, for example the address of an endpoint; None has none.
        task: what its engines make of a prompt; that of the stage.
    """

    WHERE: ClassVar[str] = "backend."

    kind: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    task: Task = "generate"

    def __post_init__(self) -> None:
        kind: object = self.kind
        if not isinstance(kind, str):
            raise ConfigError(f"backend.kind must be a name, got {kind!r}")
        check_choice(self, "task", get_args(Task))
        given: object = self.options
        if given is None:
            object.__setattr__(self, "options", {})
        elif not isinstance(given, Mapping):
            # it may hold a secret, so it is not repeated
            raise ConfigError(f"backend.options must be a mapping, got a {type(given).__name__}")

    @property
    def is_decided(self) -> bool:
        """Return whether the kind is one that runs."""
        return self.kind != "auto"
