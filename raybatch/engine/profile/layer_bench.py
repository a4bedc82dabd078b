"""Times the modules of a decoder by themselves, and whole layers with attention in parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raybatch.config import EngineConfig, KVCacheDType
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.profile.attention_batch import AttentionBatch
from raybatch.engine.profile.stopwatch import Run, Stopwatch
from raybatch.engine.weights.loading import LayerWeights, ModelWeights
from raybatch.errors import ConfigError
from raybatch.kernels.dispatch import REFERENCE, Ops
from raybatch.kernels.native.compiler import has_compiler
from raybatch.models.config import ModelSpec
from raybatch.policy.batches.layer_plan import LayerShape, Workload
from raybatch.policy.batches.step_plan import MeasuredLayer, Phase
from raybatch.policy.cost.roofline import MeasuredWork


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """What is measured.

    Args:
        workloads: kinds of sequences that attention is measured with.
        attention_tokens: sizes of its batches, each with every workload.
        ffn_tokens: sizes of the batches of the experts.
        prefill_tokens: of a step that is measured in parts of whole prompts.
        decode_tokens: of such a step whose sequences decode, each behind a prompt.
        prompt_tokens: of one prompt in these steps.
        part_tokens: sizes of the parts; those that are no smaller than a step are left out.
        num_repeats: samples of each size after a first one that does not count.
        budget_s: seconds of all measurements; sizes that would not fit are left out, and the
            smallest of each module never is.
        max_kv_bytes: of the KV that attention is measured with; larger batches are left out.
        block_size: tokens of a block of KV.
        kv_cache_dtype: of the pool, as `EngineConfig` has it.
        may_compile: measure ops that are compiled for this host, as an engine runs them.
        quantization: how the weights that are measured are kept, see `EngineConfig`.

    Raises:
        ConfigError: there is no size, or a number is too small.
    """

    workloads: tuple[Workload, ...] = (
        Workload(cached_tokens=127),
        Workload(cached_tokens=1023),
        Workload(tokens_per_sequence=256),
    )
    attention_tokens: tuple[int, ...] = (1, 4, 16, 64, 256)
    ffn_tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    prefill_tokens: int = 1024
    decode_tokens: int = 256
    prompt_tokens: int = 256
    part_tokens: tuple[int, ...] = (512, 256, 128, 64)
    num_repeats: int = 5
    budget_s: float = 8.0
    max_kv_bytes: int = 256 << 20
    block_size: int = 64
    kv_cache_dtype: KVCacheDType = "auto"
    may_compile: bool = False
    quantization: str | None = None

    def __post_init__(self) -> None:
        for name in ("workloads", "attention_tokens", "ffn_tokens"):
            if not getattr(self, name):
                raise ConfigError(f"a profile without {name} measures nothing")
        sizes = (*self.attention_tokens, *self.ffn_tokens, *self.part_tokens)
        others = (self.prefill_tokens, self.decode_tokens, self.prompt_tokens)
        if min(*sizes, *others, self.num_repeats, self.block_size) < 1:
            raise ConfigError("sizes, repeats and block_size of a profile must be at least 1")


def profile_options(config: EngineConfig) -> ProfileOptions:
    """Return the options that measure what an engine runs on this host."""
    return ProfileOptions(
        block_size=config.block_size_tokens,
        kv_cache_dtype=config.kv_cache_dtype,
        may_compile=config.compiles_kernels and has_compiler(),
        quantization=config.quantization,
    )


def probe_decoder(
    spec: ModelSpec,
    weights: ModelWeights,
    layers: Sequence[LayerWeights],
    ops: Ops = REFERENCE,
) -> Decoder:
    """Return a decoder of some layers of a model, which attend to all that `LayerShape` counts.

    Windows are left out: plans do not know them, and stay on the safe side.
    """
    shortened = replace(spec, num_layers=len(layers), windows=(None,) * len(layers))
    return Decoder(shortened, replace(weights, layers=tuple(layers)), ops=ops)


class LayerBench:
    """Times the modules of a decoder whose layers are all of one kind; runs take turns over them.

    Each measurement takes a tensor with the device and dtype of the model, and a budget in seconds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        decoder: Decoder,
        shape: LayerShape,
        options: ProfileOptions,
        stopwatch: Stopwatch,
    ) -> None:
        self._spec = spec
        self._decoder = decoder
        self._shape = shape
        self._options = options
        self._stopwatch = stopwatch

    def attention(self, like: torch.Tensor, budget_s: float) -> tuple[MeasuredWork, ...]:
        """Time attention with the linears around it, for each size and kind of sequences."""
        options, decoder = self._options, self._decoder
        kinds = [(n, kind) for n in sorted(options.attention_tokens) for kind in options.workloads]
        kinds = [k for k in kinds if self._kv_bytes(*k) <= options.max_kv_bytes] or kinds[:1]

        def prepare(idx: int) -> Run:
            batch = self._batch(*kinds[idx], like)
            return lambda turn: batch.run(decoder, turn % decoder.num_layers)

        sizes = [(n, self._shape.attention_work(n, workload)) for n, workload in kinds]
        return self._stopwatch.measure(sizes, prepare, budget_s)

    def ffn(self, like: torch.Tensor, budget_s: float) -> tuple[MeasuredWork, ...]:
        """Time the experts, or the dense block, for each size."""
        batches, decoder = sorted(self._options.ffn_tokens), self._decoder
        random = torch.Generator().manual_seed(0)

        def prepare(idx: int) -> Run:
            x = torch.randn(batches[idx], self._spec.model_dim, generator=random).to(like)
            return lambda turn: decoder.ffn_(turn % decoder.num_layers, x.clone())

        sizes = [(tokens, self._shape.ffn_work(tokens)) for tokens in batches]
        return self._stopwatch.measure(sizes, prepare, budget_s)

    def layers(self, phase: Phase, like: torch.Tensor, budget_s: float) -> list[MeasuredLayer]:
        """Time a step's layer plain, and with attention in parts, the largest parts first."""
        options = self._options
        tokens, workload = options.decode_tokens, Workload(cached_tokens=options.prompt_tokens)
        if phase == "prefill":
            tokens = options.prefill_tokens
            workload = Workload(tokens_per_sequence=min(options.prompt_tokens, tokens))
        # all ways to run it hold their KV at once
        most_bytes = options.max_kv_bytes // (1 + len(options.part_tokens))
        while tokens > 1 and self._kv_bytes(tokens, workload) > most_bytes:
            tokens //= 2
        # a part holds whole prompts, as the engine makes them
        least = workload.tokens_per_sequence
        smaller = {max(n // least, 1) * least for n in options.part_tokens}
        part_tokens = [tokens, *sorted((n for n in smaller if n < tokens), reverse=True)]
        runs = [self._layer_run(tokens, size, workload, like) for size in part_tokens]
        seconds = self._stopwatch.compare(runs, budget_s)
        return [
            MeasuredLayer(phase=phase, gate_tokens=tokens, attention_tokens=size, seconds=found)
            for size, found in zip(part_tokens, seconds, strict=False)
        ]

    def _layer_run(
        self, tokens: int, part_tokens: int, workload: Workload, like: torch.Tensor
    ) -> Run:
        decoder = self._decoder
        full, rest = divmod(tokens, part_tokens)
        counts = [part_tokens] * full + [rest] * (rest > 0)
        parts = [self._batch(count, workload, like) for count in counts]

        def run(turn: int) -> None:
            layer = turn % decoder.num_layers
            hidden = [part.run(decoder, layer) for part in parts]
            decoder.ffn_(layer, hidden[0] if len(hidden) == 1 else torch.cat(hidden))

        return run

    def _batch(self, tokens: int, workload: Workload, like: torch.Tensor) -> AttentionBatch:
        return AttentionBatch.build(
            self._decoder,
            self._spec,
            tokens,
            workload,
            like=like,
            block_size=self._options.block_size,
            kv_cache_dtype=self._options.kv_cache_dtype,
        )

    def _kv_bytes(self, tokens: int, workload: Workload) -> int:
        held = workload.num_sequences(tokens) * workload.cached_tokens + tokens
        return held * self._shape.kv_bytes_per_token
