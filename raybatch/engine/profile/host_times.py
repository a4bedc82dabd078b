"""Times of ops on this host, measured once, cached, and shared by all its engines.

They decide which dense linears use torch instead of compiled ops, and the thresholds of cascade
attention.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

import torch

from raybatch.config.environment import kernel_vectors
from raybatch.engine.profile.cached_file import (
    cached_path,
    cpu_name,
    read_cached,
    versions,
    write_cached,
)
from raybatch.engine.weights.layout import exclusive
from raybatch.errors import ConfigError
from raybatch.kernels import linear as reference
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefixSegment
from raybatch.kernels.byte_numbers import pool_rows
from raybatch.kernels.dispatch import REFERENCE, Ops
from raybatch.kernels.linear import Linear
from raybatch.kernels.native.compiler import random_tensors
from raybatch.kernels.native.linears import PANEL_WIDTH, CompiledLinears
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.cascade import CascadeThresholds, ReadTimes

Times = tuple[float, ...]
# [out, in]
Shape = tuple[int, int]

# rows of a linear: from one decode to a prompt chunk; larger batches take as long per row
_LINEAR_ROWS = (1, 8, 64, 256)
# time is proportional to outputs and inputs, so a part of a large linear is timed
_MAX_OUTPUTS, _MAX_INPUTS = 512, 4096
# smaller ones take microseconds, mostly call overhead
_MIN_WEIGHTS = 1 << 16

# readers of a shared prefix; beyond the last the cost per row is constant
_READERS = (2, 3, 4, 6, 8, 12, 16, 32)
_SHORT, _LONG = 64, 512
# shared prefixes per timed step, to amortise its overhead
_NUM_RUNS = 4
# time is proportional to KV heads, so some of them are timed
_MAX_KV_HEADS = 4
_NUM_REPEATS = 5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _CachedTimes:
    """Contents of one cache file."""

    times: Times

    def __post_init__(self) -> None:
        if not self.times or not all(each >= 0 for each in self.times):
            raise ConfigError(f"times of an op must be at least 0, got {self.times}")


def _cached_times(
    name: str, measure: Callable[[], Times], *, kind: str, folder: Path | None
) -> Times:
    """Return the times of `name`, measured if they are not cached.

    `kind` ("linear") names their folder, by default below the cache folder.
    """
    described = {
        "name": name,
        "device": cpu_name(),
        "vectors": kernel_vectors(),
        "threads": torch.get_num_threads(),
        "versions": versions(("raybatch", "torch")),
    }
    path, what = cached_path(f"{kind}-times", described, folder), f"{kind} times"
    with ExitStack() as lock:
        # one engine of a host measures, so that all choose alike
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.enter_context(exclusive(path.with_suffix(".lock")))
        kept = read_cached(_CachedTimes, path, what=what)
        if kept is None:
            kept = _CachedTimes(measure())
            write_cached(kept, path, what=what)
    return kept.times


def shapes_for_torch(
    shapes: Iterable[Shape],
    ops: CompiledLinears,
    *,
    folder: Path | None = None,
    measure: Callable[[Shape, CompiledLinears], Times] | None = None,
) -> tuple[Shape, ...]:
    """Return the (outputs, inputs) of linears that torch computes faster than compiled ops.

    Times are averaged over batch sizes. Each shape is timed once per host, mostly in less than 0.1
    s; small ones are not timed. A `folder` of None is below the cache folder; `measure` returns
    compiled time divided by torch time for each batch size.
    """
    slower = []
    for shape in sorted({shape for shape in shapes if shape[0] * shape[1] >= _MIN_WEIGHTS}):
        timed = partial(measure or _ratios, shape, ops)
        ratios = _cached_times(f"{shape[0]}x{shape[1]}", timed, kind="linear", folder=folder)
        if sum(ratios) > len(ratios):
            slower.append(shape)
    if slower:
        _logger.info("using torch for linears of these shapes, as it is faster here: %s", slower)
    return tuple(slower)


def _ratios(shape: Shape, ops: CompiledLinears) -> Times:
    """Return the time of the compiled op over that of torch, for each batch size."""
    made, num_inputs = random_tensors(), min(shape[1], _MAX_INPUTS)
    num_panels = min(-(-shape[0] // PANEL_WIDTH), _MAX_OUTPUTS // PANEL_WIDTH)
    weight = made(num_panels * PANEL_WIDTH, num_inputs)
    plain = Linear(weight, len(weight))
    panels = Linear(weight.view(num_panels, PANEL_WIDTH, num_inputs).mT.contiguous(), len(weight))
    ratios = []
    for num_rows in _LINEAR_ROWS:
        x = made(num_rows, num_inputs)
        compiled = torchs = float("inf")
        # in turns, so that a change of clock meets both
        for _ in range(_NUM_REPEATS):
            compiled = min(compiled, _linear_s(ops.linear, x, panels))
            torchs = min(torchs, _linear_s(reference.linear, x, plain))
        ratios.append(compiled / torchs)
    return tuple(ratios)


def _linear_s(
    op: Callable[[torch.Tensor, Linear], torch.Tensor], x: torch.Tensor, layer: Linear
) -> float:
    start = perf_counter()
    op(x, layer)
    return perf_counter() - start


def timed_reads(
    ops: Ops,
    spec: ModelSpec,
    *,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    folder: Path | None = None,
    measure: Callable[["_ReadShape", Ops], Times] | None = None,
) -> CascadeThresholds:
    """Return the cascade thresholds of `ops` on a CPU, timed once per host and shape.

    Takes about 0.1 s. A `folder` of None is below the cache folder; `measure` returns the seconds
    of separate and cascade attention over short and long prefixes, for each number of rows.
    """
    num_kv_heads = min(spec.num_kv_heads, _MAX_KV_HEADS)
    shape = _ReadShape(
        num_heads=spec.num_heads // spec.num_kv_heads * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        num_layers=spec.num_layers,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    is_compiled = ops.prepare_attention is not REFERENCE.prepare_attention
    name = f"{'compiled' if is_compiled else 'torch'} {shape}"
    timed = partial(measure or _read_times, shape, ops)
    times = _cached_times(name, timed, kind="shared-read", folder=folder)
    num_runs = _NUM_RUNS * spec.num_layers * num_kv_heads / spec.num_kv_heads
    rule = CascadeThresholds.of(_rows_of(times), num_runs=num_runs)
    _logger.info(
        "cascade attention is used for shared prefixes of at least this many tokens, by number of "
        "rows: %s",
        ", ".join(f"{r} rows {t:.0f}" for r, t in zip(rule.num_rows, rule.min_tokens, strict=True)),
    )
    return rule


def _rows_of(times: Times) -> Iterable[tuple[int, ReadTimes, ReadTimes]]:
    for i, num_rows in enumerate(_READERS):
        short, long = times[4 * i : 4 * i + 2], times[4 * i + 2 : 4 * i + 4]
        yield num_rows, ReadTimes(_SHORT, *short), ReadTimes(_LONG, *long)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReadShape:
    """Shape parameters that the times depend on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


@torch.inference_mode()
def _read_times(shape: _ReadShape, ops: Ops) -> Times:
    num_blocks = _NUM_RUNS * -(-_LONG // shape.block_size) + 1
    pools = random_tensors()(2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pools = pool_rows(pools, shape.kv_dtype)
    return tuple(
        seconds
        for num_rows in _READERS
        for num_tokens in (_SHORT, _LONG)
        for seconds in _read_s(shape, ops, pools, num_rows, num_tokens)
    )


def _read_s(
    shape: _ReadShape, ops: Ops, pools: torch.Tensor, num_rows: int, num_tokens: int
) -> tuple[float, float]:
    """Return the seconds of a step's attention with separate reads, and with cascade attention."""
    num_all = _NUM_RUNS * num_rows
    q = random_tensors()(num_all, shape.num_heads, shape.head_dim).to(shape.dtype)
    positions = torch.full((num_all,), num_tokens)
    plans = [_read_plan(shape, num_rows, num_tokens, is_shared=shared) for shared in (False, True)]
    prepare_s, attend_s = [float("inf")] * 2, [float("inf")] * 2
    # with one thread, use its CPU time, so that other load does not count
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    # in turns, so that a change of clock meets both
    for _ in range(_NUM_REPEATS):
        for i, plan in enumerate(plans):
            began = clock()
            prepared = ops.prepare_attention(
                plan, positions=positions, slot_mapping=positions, pool=pools[0], windows=(None,)
            )
            is_prepared = clock()
            ops.attend(q, pools[0], pools[1], pools[0], pools[1], prepared, None)
            prepare_s[i] = min(prepare_s[i], is_prepared - began)
            attend_s[i] = min(attend_s[i], clock() - is_prepared)
    separate, together = (
        once + shape.num_layers * each for once, each in zip(prepare_s, attend_s, strict=True)
    )
    return separate, together


def _read_plan(
    shape: _ReadShape, num_rows: int, num_tokens: int, *, is_shared: bool
) -> AttentionPlan:
    """Return a step in which rows read a shared prefix and one position of the last block."""
    block_size, num_blocks = shape.block_size, -(-num_tokens // shape.block_size)
    runs = torch.arange(_NUM_RUNS * num_blocks).view(_NUM_RUNS, num_blocks)
    rows = torch.arange(_NUM_RUNS * num_rows).view(_NUM_RUNS, num_rows)
    # (block, row) pairs: none if the segments cover them all
    num_readers = 0 if is_shared else num_rows
    firsts = (torch.arange(num_blocks) * block_size).repeat_interleave(num_readers)
    own = torch.full((rows.numel(),), _NUM_RUNS * -(-_LONG // block_size))
    first_positions = torch.cat((firsts.repeat(_NUM_RUNS), torch.full_like(own, num_tokens)))
    part = DecodePart(
        block_ids=torch.cat((runs.flatten().repeat_interleave(num_readers), own)),
        owners=torch.cat((rows[:, :num_readers].repeat(1, num_blocks).flatten(), rows.flatten())),
        num_valid=(num_tokens - first_positions).clamp(1, block_size),
        is_contiguous=False,
        first_positions=first_positions,
    )
    segments = (
        PrefixSegment(query_idx=readers, block_ids=run, num_tokens=num_tokens)
        for readers, run in zip(rows, runs, strict=True)
        if is_shared
    )
    return AttentionPlan(num_decode=len(own), decode=part, prefill=None, segments=tuple(segments))
