"""Measures one representative layer: attention, feed-forward block, and copies.

The profile is the input of `raybatch.policy.cost.roofline` and `raybatch.policy.choose_engine`, not
of `raybatch.policy.cost.cost_model`. It runs the decoder's own code. It is measured once per kind
of host and cached on disk.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from raybatch.config import EngineConfig, KVCacheDType
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder, PreparedBatch, byte_dtype_of
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.forward.step_graphs import CudaGraphs
from raybatch.engine.memory.kv_cache import KVCache, pick_kv_dtype
from raybatch.engine.memory.pinned import allocate_memory
from raybatch.engine.profile.cached_file import (
    cached_path,
    cpu_name,
    read_cached,
    versions,
    write_cached,
)
from raybatch.engine.profile.host_times import timed_reads
from raybatch.engine.weights.layout import LayerWeights, ModelWeights, map_tensors, tensors_of
from raybatch.errors import ConfigError, error_text
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart
from raybatch.kernels.byte_numbers import pool_rows, row_width
from raybatch.kernels.dispatch import REFERENCE, Ops
from raybatch.kernels.native.compiler import has_compiler
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.cascade import UNTIMED, CascadeThresholds
from raybatch.policy.cost.layers import LayerShape, ModelShape, ModuleCosts, Workload
from raybatch.policy.cost.roofline import MeasuredWork, Work, fit_roofline

# shorter samples consist of several runs, because of the clock's resolution
_MIN_SAMPLE_S = 1e-3
_LEAST_RUN_S = 1e-6


Clock = Callable[[], float]
Run = Callable[[int], object]


def step_clock(device: torch.device) -> Clock:
    """Return the clock for step times: CPU time with one CPU thread, else wall time.

    CPU time excludes other load. A GPU is not synchronised, because the host prepares the next step
    meanwhile: times of single steps are meaningless, but sums over many are right.
    """
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if is_one_thread else time.perf_counter


def clock_of(device: torch.device) -> Clock:
    """Return the clock for measurements: as `step_clock`, but synchronised with a GPU."""
    if device.type == "cpu":
        return step_clock(device)

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times functions for several batch sizes, with a warm-up and repetitions for each."""

    _clock: Clock
    _num_repeats: int

    def measure(
        self, sizes: Sequence[tuple[int, Work]], prepare: Callable[[int], Run], budget_s: float
    ) -> tuple[MeasuredWork, ...]:
        """Return the times of the first `sizes`, until `budget_s` seconds are spent; at least one.

        `sizes` are (tokens, work), smallest first. `prepare(i)` returns the function to time for
        `sizes[i]`, which is called with the number of the call.
        """
        points: list[MeasuredWork] = []
        left_s = budget_s
        for idx, (tokens, work) in enumerate(sizes):
            began = self._clock()
            seconds = self._median_s(prepare(idx), left_s if points else float("inf"))
            if seconds is None:
                break
            left_s -= self._clock() - began
            points.append(MeasuredWork(tokens=tokens, work=work, seconds=seconds))
        return tuple(points)

    def _median_s(self, run: Run, left_s: float) -> float | None:
        """Return the median seconds of a run; None if sampling would exceed `left_s`."""
        began = self._clock()
        run(0)
        first_s = self._clock() - began
        if first_s * (1 + self._num_repeats) > left_s:
            return None
        num_runs = max(1, round(_MIN_SAMPLE_S / max(first_s, _LEAST_RUN_S)))
        samples = []
        for repeat in range(self._num_repeats):
            start = self._clock()
            for i in range(num_runs):
                run(1 + repeat * num_runs + i)
            samples.append((self._clock() - start) / num_runs)
        return statistics.median(samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Options of a measurement of layer times.

    Raises ConfigError: a list is empty, or a number is too small.
    """

    # decode workloads of the attention measurement
    workloads: tuple[Workload, ...] = (Workload(cached_tokens=127), Workload(cached_tokens=1023))
    # its batch sizes, each with every workload
    attention_tokens: tuple[int, ...] = (1, 4, 16, 64, 256)
    # the same for prompts, which use another kind of attention
    prompts: tuple[Workload, ...] = (
        Workload(tokens_per_sequence=64),
        Workload(tokens_per_sequence=256),
    )
    prompt_tokens: tuple[int, ...] = (64, 256, 1024)
    # batch sizes of the feed-forward measurement
    ffn_tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    # samples per size, after a warm-up
    num_repeats: int = 5
    # seconds of all measurements; sizes beyond it are skipped, except the smallest of each module
    budget_s: float = 4.0
    # KV bytes of the attention measurement; larger batches are skipped
    max_kv_bytes: int = 256 << 20
    block_size: int = 64
    kv_cache_dtype: KVCacheDType = "auto"
    may_compile: bool = False
    quantization: str | None = None
    # time CUDA graphs on a GPU
    has_graphs: bool = True
    num_threads: int = 1  # of torch, on a CPU

    def __post_init__(self) -> None:
        names = ("attention_tokens", "prompt_tokens", "ffn_tokens")
        for name in ("workloads", "prompts", *names):
            if not getattr(self, name):
                raise ConfigError(f"{name} of a profile must not be empty")
        sizes = [size for name in names for size in getattr(self, name)]
        if min(*sizes, self.num_repeats, self.block_size) < 1:
            raise ConfigError("sizes, repeats and block_size of a profile must be at least 1")


def profile_options(config: EngineConfig) -> ProfileOptions:
    return ProfileOptions(
        block_size=config.block_size_tokens,
        kv_cache_dtype=config.kv_cache_dtype,
        may_compile=config.compiles_kernels and has_compiler(),
        quantization=config.quantization,
        has_graphs=config.cuda_graphs is not False,
        num_threads=config.num_threads,
    )


def probe_decoder(
    spec: ModelSpec, weights: ModelWeights, layers: Sequence[LayerWeights], ops: Ops = REFERENCE
) -> Decoder:
    """Return a decoder of some layers of a model, without sliding windows.

    `LayerShape` does not model windows, which overestimates attention.
    """
    shortened = replace(spec, num_layers=len(layers), windows=(None,) * len(layers))
    return Decoder(shortened, replace(weights, layers=tuple(layers)), ops=ops)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """Synthetic input of attention: tokens of S sequences of equal length."""

    # hidden states [T, M]
    x: torch.Tensor
    # the prepared forward batch; all rows have logits, so that the last layer keeps them
    prepared: PreparedBatch
    # random KV [L, N, G, B, R]: zero pages would share one physical page. Each layer has separate
    # memory, so that it does not stay in the CPU cache
    cache: KVCache

    @classmethod
    def build(
        cls,
        decoder: Decoder,
        spec: ModelSpec,
        tokens: int,
        workload: Workload,
        *,
        like: torch.Tensor,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> "AttentionBatch":
        """Make a batch of `tokens` tokens; the last sequence may be shorter.

        `like` has the device and dtype of the model; a `kv_dtype` of None is its dtype.
        """
        lens = _cut(tokens, workload.tokens_per_sequence)
        cached, device = workload.cached_tokens, like.device
        blocks_per_seq = -(-(cached + max(lens)) // block_size)
        random = torch.Generator().manual_seed(0)
        shape = (1, len(lens) * blocks_per_seq, spec.num_kv_heads, block_size, spec.head_dim)
        copies = (decoder.num_layers, 1, 1, 1, 1)
        dtype = kv_dtype or like.dtype
        cache = KVCache(
            k=pool_rows(torch.randn(shape, generator=random).to(like), dtype).repeat(copies),
            v=pool_rows(torch.randn(shape, generator=random).to(like), dtype).repeat(copies),
        )
        positions = torch.cat([cached + torch.arange(n) for n in lens]).to(device)
        owners = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).to(device)
        batch = ForwardBatch(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=positions,
            slot_mapping=owners * blocks_per_seq * block_size + positions,
            logits_idx=torch.arange(tokens, device=device),
            attention=_plan(lens, cached, blocks_per_seq, block_size),
        )
        return cls(
            x=torch.randn(tokens, spec.model_dim, generator=random).to(like),
            prepared=decoder.prepare(batch, cache),
            cache=cache,
        )

    def run(self, decoder: Decoder, layer_idx: int) -> torch.Tensor:
        """Return the hidden states [T, M] after the attention of a layer."""
        return decoder.attention(layer_idx, self.x.clone(), self.prepared, self.cache)


def replays(graphs: CudaGraphs, run: Run, num_turns: int) -> Run:
    """Return a function that replays `run(turn)` as CUDA graphs, one graph per turn.

    Turns count from 0 to `num_turns` - 1, then again. Excludes launch overhead, which exceeds the
    time of a small batch. Returns `run` itself if graphs cannot be captured.
    """
    # drivers and kernels may raise anything, and eager launches are valid too
    try:
        captured = [graphs.capture(partial(run, turn)) for turn in range(num_turns)]
    except Exception as error:
        _logger.info(
            "measured layer times include kernel launches, as CUDA graphs cannot be captured: %s",
            error_text(error),
        )
        return run
    return lambda turn: captured[turn % num_turns].replay()


@dataclass(frozen=True, slots=True)
class LayerBench:
    """Times the modules of a decoder whose layers are all of one kind; calls alternate over them.

    Each measurement has a budget in seconds.
    """

    _spec: ModelSpec
    _decoder: Decoder
    _shape: LayerShape
    _options: ProfileOptions
    _stopwatch: Stopwatch
    _kv_dtype: torch.dtype
    # a tensor with the device and dtype of the model
    _like: torch.Tensor
    # captures graphs as steps do; None launches eagerly
    _graphs: CudaGraphs | None = None

    def attention(
        self, tokens: Sequence[int], workloads: Sequence[Workload], budget_s: float
    ) -> tuple[MeasuredWork, ...]:
        """Time attention with its linears, for each batch size and workload."""
        options, decoder = self._options, self._decoder
        kinds = [(n, kind) for n in sorted(tokens) for kind in workloads]
        kinds = [k for k in kinds if self._kv_bytes(*k) <= options.max_kv_bytes] or kinds[:1]

        def prepare(idx: int) -> Run:
            batch = AttentionBatch.build(
                decoder,
                self._spec,
                *kinds[idx],
                like=self._like,
                block_size=options.block_size,
                kv_dtype=self._kv_dtype,
            )
            return self._repeated(lambda turn: batch.run(decoder, turn % decoder.num_layers))

        sizes = [(n, self._shape.attention_work(n, workload)) for n, workload in kinds]
        return self._stopwatch.measure(sizes, prepare, budget_s)

    def ffn(self, budget_s: float) -> tuple[MeasuredWork, ...]:
        batches, decoder = sorted(self._options.ffn_tokens), self._decoder
        random = torch.Generator().manual_seed(0)

        def prepare(idx: int) -> Run:
            x = torch.randn(batches[idx], self._spec.model_dim, generator=random).to(self._like)
            return self._repeated(lambda turn: decoder.ffn_(turn % decoder.num_layers, x.clone()))

        sizes = [(tokens, self._shape.ffn_work(tokens)) for tokens in batches]
        return self._stopwatch.measure(sizes, prepare, budget_s)

    def _repeated(self, run: Run) -> Run:
        return run if self._graphs is None else replays(self._graphs, run, self._decoder.num_layers)

    def _kv_bytes(self, tokens: int, workload: Workload) -> int:
        held = workload.num_sequences(tokens) * workload.cached_tokens + tokens
        return held * self._shape.kv_bytes_per_token * self._decoder.num_layers


def _cut(total: int, size: int) -> list[int]:
    return [size] * (total // size) + [total % size] * (total % size > 0)


def _plan(lens: list[int], cached: int, blocks_per_seq: int, block_size: int) -> AttentionPlan:
    """Plan one decode token per sequence over its cached tokens, or whole prompts."""
    num_seqs = len(lens)
    if max(lens) == 1:
        block_ids = torch.arange(num_seqs * blocks_per_seq).view(num_seqs, blocks_per_seq)
        num_valid = torch.full((num_seqs,), cached + 1 - (blocks_per_seq - 1) * block_size)
        decode = DecodePart.of_rows(block_ids, num_valid, block_size=block_size)
        return AttentionPlan(num_decode=num_seqs, decode=decode, prefill=None, segments=())
    assert not cached, f"prompts are timed without cached tokens, got {cached}"
    starts = tuple(sum(lens[:i]) for i in range(num_seqs))
    prefill = PrefillPart(starts=starts, lens=tuple(lens))
    return AttentionPlan(num_decode=0, decode=None, prefill=prefill, segments=())


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
