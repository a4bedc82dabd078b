"""Measures one representative layer: attention and experts by themselves, over batch sizes.

What is measured feeds `raybatch.policy.roofline`, not `raybatch.policy.cost_model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from raybatch.engine.attention_batch import AttentionBatch
from raybatch.engine.model_config import ModelSpec
from raybatch.engine.stopwatch import Clock, Run, Stopwatch, clock_of
from raybatch.engine.weights import LayerWeights, ModelWeights
from raybatch.errors import ConfigError
from raybatch.kernels.mlp import add_mlp_
from raybatch.kernels.moe import moe_ffn
from raybatch.kernels.norm import rms_norm
from raybatch.policy.layer_plan import ModelShape, ModuleCosts
from raybatch.policy.layer_work import LayerShape, Workload
from raybatch.policy.roofline import MeasuredWork, Work, fit_roofline

__all__ = ["ModuleProfile", "ProfileOptions", "model_shape", "profile_layer", "run_ffn"]

_COPY_BYTES = (1 << 16, 1 << 20, 1 << 24)
# copies and layers take turns over so much memory, which is more than processors have of cache
_BEYOND_CACHE_BYTES = 128 << 20
# of the time budget: attention, experts, copies
_SHARES = (0.45, 0.45, 0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """What is measured.

    Args:
        workloads: kinds of sequences that attention is measured with.
        attention_tokens: sizes of its batches, each with every workload.
        ffn_tokens: sizes of the batches of the experts.
        num_repeats: samples of each size after a first one that does not count.
        budget_s: seconds of all measurements; sizes that would not fit are left out, and the
            smallest of each module never is.
        max_kv_bytes: of the KV that attention is measured with; larger batches are left out.
        block_size: tokens of a block of KV.

    Raises:
        ConfigError: there is no size, or a number is too small.
    """

    workloads: tuple[Workload, ...] = (Workload(cached_tokens=127), Workload(cached_tokens=1023))
    attention_tokens: tuple[int, ...] = (1, 4, 16, 64, 256)
    ffn_tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    num_repeats: int = 3
    budget_s: float = 4.0
    max_kv_bytes: int = 256 << 20
    block_size: int = 64

    def __post_init__(self) -> None:
        for name in ("workloads", "attention_tokens", "ffn_tokens"):
            if not getattr(self, name):
                raise ConfigError(f"a profile without {name} measures nothing")
        if min(*self.attention_tokens, *self.ffn_tokens, self.num_repeats, self.block_size) < 1:
            raise ConfigError("sizes, repeats and block_size of a profile must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleProfile:
    """What was measured of a model's representative layer.

    Args:
        model: its shape, as plans count its work.
        attention: runs with the linears before and after it.
        ffn: runs of the experts, or of the dense block.
        to_device: copies from the host.
        to_host: copies to the host.
        copies_overlap: see `ModuleCosts`.
    """

    model: ModelShape
    attention: tuple[MeasuredWork, ...]
    ffn: tuple[MeasuredWork, ...]
    to_device: tuple[MeasuredWork, ...]
    to_host: tuple[MeasuredWork, ...]
    copies_overlap: bool

    def costs(self) -> ModuleCosts:
        """Fit a roofline to each of the four."""
        return ModuleCosts(
            attention=fit_roofline(self.attention),
            ffn=fit_roofline(self.ffn),
            to_device=fit_roofline(self.to_device),
            to_host=fit_roofline(self.to_host),
            copies_overlap=self.copies_overlap,
        )


def model_shape(spec: ModelSpec, *, dtype: torch.dtype, num_pieces: int = 1) -> ModelShape:
    """Return a model as plans see it: layers like its sparse ones, or all dense.

    A model that has layers of both kinds is planned as if all were sparse, which is on the safe
    side of its memory.
    """
    moe = spec.moe if spec.moe is not None and any(spec.moe.is_sparse) else None
    layer = LayerShape(
        model_dim=spec.model_dim,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn_dim=moe.ffn_dim if moe else spec.ffn_dim,
        num_experts=moe.num_experts if moe else 1,
        top_k=moe.top_k if moe else 1,
        element_bytes=dtype.itemsize,
    )
    num_tables = 1 if spec.is_tied else 2
    return ModelShape(
        layer=layer,
        num_layers=spec.num_layers,
        other_bytes=num_tables * spec.vocab_size * spec.model_dim * dtype.itemsize,
        num_pieces=num_pieces,
    )


def profile_layer(
    spec: ModelSpec,
    weights: ModelWeights,
    options: ProfileOptions | None = None,
    *,
    clock: Clock | None = None,
    num_pieces: int = 1,
) -> ModuleProfile:
    """Measure attention, experts and copies of a model; takes about `options.budget_s`.

    Repeated runs take turns over layers of the representative kind: one layer alone would stay in
    the processor's cache, where no forward pass finds it. Their weights are read once before, as
    those of a mapped file come from disk at first.

    Args:
        spec: what the model is.
        weights: of that model; read only.
        options: what is measured; None takes the defaults.
        clock: seconds; None takes CPU seconds of this process on a CPU, else the time by the clock
            with the device synchronised.
        num_pieces: see `ModelShape`.
    """
    options = options or ProfileOptions()
    device, dtype = weights.embed.device, weights.embed.dtype
    stopwatch = Stopwatch(clock or clock_of(device), options.num_repeats)
    model = model_shape(spec, dtype=dtype, num_pieces=num_pieces)
    is_sparse = model.layer.num_experts > 1
    alike = [w for i, w in enumerate(weights.layers) if spec.is_sparse(i) or not is_sparse]
    num_layers = -(-_BEYOND_CACHE_BYTES // (model.layer.attention_bytes + model.layer.ffn_bytes))
    layers = alike[: max(num_layers, 2)]
    budgets = [options.budget_s * share for share in _SHARES]
    with torch.inference_mode():
        for layer in layers:
            _read(layer)
        attention = _profile_attention(spec, model.layer, layers, options, stopwatch, budgets[0])
        ffn = _profile_ffn(spec, model.layer, layers, options, stopwatch, budgets[1])
        to_device, to_host = _profile_copies(device, stopwatch, budgets[2])
    return ModuleProfile(
        model=model,
        attention=attention,
        ffn=ffn,
        to_device=to_device,
        to_host=to_host,
        copies_overlap=device.type == "cuda",
    )


def _read(layer: LayerWeights) -> None:
    for field in fields(layer):
        tensor = getattr(layer, field.name)
        if tensor is not None:
            tensor.sum()


def _profile_attention(
    spec: ModelSpec,
    shape: LayerShape,
    layers: Sequence[LayerWeights],
    options: ProfileOptions,
    stopwatch: Stopwatch,
    budget_s: float,
) -> tuple[MeasuredWork, ...]:
    kinds = [
        (tokens, workload)
        for tokens in sorted(options.attention_tokens)
        for workload in options.workloads
    ]
    kinds = [kind for kind in kinds if _kv_bytes(shape, *kind) <= options.max_kv_bytes] or kinds[:1]

    def prepare(idx: int) -> Run:
        tokens, workload = kinds[idx]
        batch = AttentionBatch.build(
            spec, tokens, workload, like=layers[0].qkv, block_size=options.block_size
        )
        return lambda turn: batch.run(spec, layers[turn % len(layers)])

    sizes = [(tokens, shape.attention_work(tokens, workload)) for tokens, workload in kinds]
    return stopwatch.measure(sizes, prepare, budget_s)


def _kv_bytes(shape: LayerShape, tokens: int, workload: Workload) -> int:
    held = workload.num_sequences(tokens) * workload.cached_tokens + tokens
    return held * shape.kv_bytes_per_token


def _profile_ffn(
    spec: ModelSpec,
    shape: LayerShape,
    layers: Sequence[LayerWeights],
    options: ProfileOptions,
    stopwatch: Stopwatch,
    budget_s: float,
) -> tuple[MeasuredWork, ...]:
    batches = sorted(options.ffn_tokens)
    random = torch.Generator().manual_seed(0)

    def prepare(idx: int) -> Run:
        x = torch.randn(batches[idx], spec.model_dim, generator=random).to(layers[0].qkv)
        return lambda turn: run_ffn(spec, layers[turn % len(layers)], x)

    sizes = [(tokens, shape.ffn_work(tokens)) for tokens in batches]
    return stopwatch.measure(sizes, prepare, budget_s)


def run_ffn(spec: ModelSpec, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """Return the hidden states [T, M] after the feed-forward block of a layer."""
    hidden = rms_norm(x, layer.ffn_norm, spec.rms_eps)
    if layer.gate_up is not None and layer.down is not None:
        out = x.clone()
        add_mlp_(out, hidden, layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)
        return out
    assert spec.moe is not None, "a layer without gate_up is sparse"
    assert layer.router is not None, "a sparse layer has a router"
    assert layer.experts_gate_up is not None, "a sparse layer has experts"
    assert layer.experts_down is not None, "a sparse layer has experts"
    return x + moe_ffn(
        hidden,
        layer.router,
        layer.experts_gate_up,
        layer.experts_down,
        top_k=spec.moe.top_k,
        norm_topk_prob=spec.moe.norm_topk_prob,
    )


def _profile_copies(
    device: torch.device, stopwatch: Stopwatch, budget_s: float
) -> tuple[tuple[MeasuredWork, ...], tuple[MeasuredWork, ...]]:
    """Measure copies to the device and back; on a CPU, between two places of its memory."""
    sizes = [(0, Work(operations=0.0, moved_bytes=size)) for size in _COPY_BYTES]

    host = torch.ones(_BEYOND_CACHE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.ones(_BEYOND_CACHE_BYTES, dtype=torch.uint8, device=device)

    def copying(target: torch.Tensor, source: torch.Tensor, num_bytes: int) -> Run:
        targets, sources = torch.split(target, num_bytes), torch.split(source, num_bytes)
        return lambda turn: targets[turn % len(targets)].copy_(
            sources[turn % len(sources)], non_blocking=True
        )

    return (
        stopwatch.measure(sizes, lambda i: copying(there, host, _COPY_BYTES[i]), budget_s / 2),
        stopwatch.measure(sizes, lambda i: copying(host, there, _COPY_BYTES[i]), budget_s / 2),
    )
