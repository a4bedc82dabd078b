"""Measures one representative layer: attention, feed-forward block, and copies.

The profile is the input of `raybatch.policy.cost.roofline` and `raybatch.policy.choose_engine`, not
of `raybatch.policy.cost.cost_model`. It runs the decoder's own code. It is measured once per kind
of host and cached on disk.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from raybatch.engine.forward.decoder import byte_dtype_of
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.forward.step_graphs import CudaGraphs
from raybatch.engine.memory.kv_cache import pick_kv_dtype
from raybatch.engine.memory.pinned import allocate_memory
from raybatch.engine.profile.cached_file import (
    cached_path,
    cpu_name,
    read_cached,
    versions,
    write_cached,
)
from raybatch.engine.profile.host_times import timed_reads
from raybatch.engine.profile.layer_bench import (
    Clock,
    LayerBench,
    ProfileOptions,
    Run,
    Stopwatch,
    clock_of,
    probe_decoder,
)
from raybatch.engine.weights.layout import map_tensors, tensors_of
from raybatch.engine.weights.records import ModelWeights
from raybatch.errors import ConfigError
from raybatch.kernels.byte_numbers import row_width
from raybatch.kernels.dispatch import Ops
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.cascade import UNTIMED, CascadeThresholds
from raybatch.policy.cost.layers import ModelShape, ModuleCosts
from raybatch.policy.cost.roofline import MeasuredWork, Work, fit_roofline

_COPY_BYTES = (1 << 16, 1 << 20, 1 << 24)
# copies and layers alternate over this much memory, more than CPU caches hold
_BEYOND_CACHE_BYTES = 128 << 20
# shares of the time budget: attention of decodes, of prompts, and the feed-forward block
_SHARES = (0.3, 0.2, 0.5)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleProfile:
    model: ModelShape
    attention: tuple[MeasuredWork, ...]  # attention of decodes
    prompts: tuple[MeasuredWork, ...]  # attention of prompts
    ffn: tuple[MeasuredWork, ...]
    to_device: tuple[MeasuredWork, ...]
    to_host: tuple[MeasuredWork, ...]
    copies_overlap: bool
    cascade: CascadeThresholds

    def __post_init__(self) -> None:
        if not all((self.attention, self.prompts, self.ffn, self.to_device, self.to_host)):
            raise ConfigError(
                "layer times are incomplete: attention, prompts, feed-forward blocks and copies "
                "each need a measurement"
            )

    def costs(self) -> ModuleCosts:
        return ModuleCosts(
            attention=fit_roofline(self.attention),
            prompts=fit_roofline(self.prompts),
            ffn=fit_roofline(self.ffn),
            to_device=fit_roofline(self.to_device),
            to_host=fit_roofline(self.to_host),
            copies_overlap=self.copies_overlap,
            # both on a GPU
            steps_overlap=self.copies_overlap,
            cascade=self.cascade,
        )


def model_shape(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    byte_dtype: torch.dtype | None = None,
) -> ModelShape:
    """Return the shape of a model for forecasts, see `ModelShape.of`; takes torch dtypes."""
    kv_dtype = kv_dtype or dtype
    return ModelShape.of(
        spec,
        element_bytes=dtype.itemsize,
        weight_bytes=(byte_dtype or dtype).itemsize,
        kv_row_bytes=row_width(spec.head_dim, kv_dtype) * kv_dtype.itemsize,
    )


def profile_layer(
    spec: ModelSpec,
    weights: ModelWeights,
    options: ProfileOptions,
    *,
    clock: Clock | None = None,
    tell: Callable[[str], None] = lambda _: None,
    ops: Ops | None = None,
) -> ModuleProfile:
    """Measure attention, feed-forward block and copies; takes about `options.budget_s`.

    Calls alternate over layers of the representative kind, because a single layer would stay in the
    CPU cache. Their weights are read once before, as a mapped file is loaded lazily. `tell` is
    called with the name of the next measurement; `ops` of None picks those of the model.
    """
    device, dtype = weights.embed.device, weights.embed.dtype
    stopwatch = Stopwatch(clock or clock_of(device), options.num_repeats)
    kv_dtype = pick_kv_dtype(options.kv_cache_dtype, dtype)
    model = model_shape(spec, dtype=dtype, kv_dtype=kv_dtype, byte_dtype=byte_dtype_of(weights))
    is_sparse = model.layer.num_experts > 1
    # enough layers of the representative kind to exceed caches; streamed layers are measured on
    # the device too
    alike = [w for i, w in enumerate(weights.layers) if spec.is_sparse(i) or not is_sparse]
    num_layers = -(-_BEYOND_CACHE_BYTES // (model.layer.attention_bytes + model.layer.ffn_bytes))
    layers = map_tensors(alike[: max(num_layers, 2)], lambda tensor: tensor.to(device))
    ops = ops or pick_ops(
        spec,
        weights,
        block_size=options.block_size,
        may_compile=options.may_compile,
        kv_dtype=kv_dtype,
    )
    decoder = probe_decoder(spec, weights, layers, ops)
    graphs = CudaGraphs(device) if device.type == "cuda" and options.has_graphs else None
    bench = LayerBench(
        spec, decoder, model.layer, options, stopwatch, kv_dtype, weights.norm, graphs
    )
    budgets = [options.budget_s * share for share in _SHARES]
    with torch.inference_mode():
        for tensor in tensors_of(layers):
            tensor.clone()
        tell("attention")
        attention = bench.attention(options.attention_tokens, options.workloads, budgets[0])
        prompts = bench.attention(options.prompt_tokens, options.prompts, budgets[1])
        tell("experts" if is_sparse else "feed-forward block")
        ffn = bench.ffn(budgets[2])
        cascade = UNTIMED
        if device.type == "cpu":
            block_size = options.block_size
            cascade = timed_reads(ops, spec, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)
        tell("copies")
        to_device, to_host = _profile_copies(device, stopwatch)
    return ModuleProfile(
        model=model,
        attention=attention,
        prompts=prompts,
        ffn=ffn,
        to_device=to_device,
        to_host=to_host,
        copies_overlap=device.type == "cuda",
        cascade=cascade,
    )


def _profile_copies(device: torch.device, stopwatch: Stopwatch) -> list[tuple[MeasuredWork, ...]]:
    """Measure copies to the device and back; on a CPU, copies within its memory.

    Always measures all sizes: small ones alone do not determine the bandwidth.
    """
    sizes = [(0, Work(operations=0.0, moved_bytes=size)) for size in _COPY_BYTES]
    host = allocate_memory((_BEYOND_CACHE_BYTES,), torch.uint8, device).fill_(1)
    there = torch.ones(_BEYOND_CACHE_BYTES, dtype=torch.uint8, device=device)

    def copying(target: torch.Tensor, source: torch.Tensor, idx: int) -> Run:
        targets, sources = (torch.split(x, _COPY_BYTES[idx]) for x in (target, source))
        return lambda turn: targets[turn % len(targets)].copy_(
            sources[turn % len(sources)], non_blocking=True
        )

    return [
        stopwatch.measure(sizes, partial(copying, *pair), math.inf)
        for pair in ((there, host), (host, there))
    ]


def measured_profile(
    spec: ModelSpec,
    weights: ModelWeights,
    options: ProfileOptions,
    *,
    fresh: bool = False,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    measure: Callable[..., ModuleProfile] = profile_layer,
) -> tuple[ModuleProfile, bool]:
    """Return (layer times of a model on this host, whether they were cached).

    `fresh` ignores and replaces cached ones; a `folder` of None is `batch-plans` below the cache
    folder; `tell` is called with the name of the next measurement.
    """
    path = profile_path(spec, weights.embed.dtype, weights.embed.device, options, folder=folder)
    cached = None if fresh else load_profile(path)
    if cached is not None:
        return cached, True
    _logger.info("measuring layer times on this host, about %.0f s, once", options.budget_s)
    profile = measure(spec, weights, options, tell=tell)
    write_cached(profile, path, what="profile of the model")
    return profile, False


def profile_path(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    options: ProfileOptions,
    *,
    folder: Path | None = None,
) -> Path:
    """Return the file of a model's layer times; its name is a hash of everything they depend on.

    They depend on the model's shapes, not its weights, so that models of one shape share a file.
    """
    described = {
        "spec": asdict(spec),
        "dtype": str(dtype),
        "device": cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "versions": versions(("raybatch", "torch")),
        "options": asdict(options),
    }
    return cached_path("batch-plans", described, folder)


def load_profile(path: Path) -> ModuleProfile | None:
    """Read cached layer times; None if they are missing, or (with a warning) invalid."""
    return read_cached(ModuleProfile, path, what="profile of the model")
