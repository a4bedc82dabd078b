"""From how many positions on rows that decode read a run together: timed on this host, and kept."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time

import torch

from raybatch.engine.profile.host_times import Times, kept_times
from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart
from raybatch.kernels.byte_numbers import is_quantised, quantise
from raybatch.kernels.dispatch import REFERENCE, Ops
from raybatch.kernels.native.compiler import random_tensors
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.shared_reads import ReadTimes, SharedReads

# lanes fill up with rows; beyond the last a row costs what the ones before it do
_ROWS = (2, 3, 4, 6, 8, 12, 16, 32)
_SHORT, _LONG = 64, 512
# of a step, whose costs beside its arithmetic they share
_NUM_RUNS = 4
# time grows with KV heads, so that some of them tell
_MAX_KV_HEADS = 4
_NUM_REPEATS = 5

_logger = logging.getLogger(__name__)


def timed_reads(
    ops: Ops,
    spec: ModelSpec,
    *,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    folder: Path | None = None,
    measure: Callable[["_Shape", Ops], Times] | None = None,
) -> SharedReads:
    """Return the rule for the attention of `ops` on a CPU, timed once per host and shape.

    It takes about a tenth of a second. `folder` is that of `kept_times`; `measure` returns the
    seconds of separate and common reads of short and long runs, for each number of rows.
    """
    num_kv_heads = min(spec.num_kv_heads, _MAX_KV_HEADS)
    shape = _Shape(
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
    known = kept_times(
        [name], lambda _: (measure or _times)(shape, ops), kind="shared-read", folder=folder
    )
    num_runs = _NUM_RUNS * spec.num_layers * num_kv_heads / spec.num_kv_heads
    rule = SharedReads.of(_rows_of(known[name]), num_runs=num_runs)
    _logger.info(
        "rows that decode read a run together from so many positions on: %s",
        ", ".join(f"{r} rows {t:.0f}" for r, t in zip(rule.num_rows, rule.min_tokens, strict=True)),
    )
    return rule


def _rows_of(times: Times) -> Iterable[tuple[int, ReadTimes, ReadTimes]]:
    for i, num_rows in enumerate(_ROWS):
        short, long = times[4 * i : 4 * i + 2], times[4 * i + 2 : 4 * i + 4]
        yield num_rows, ReadTimes(_SHORT, *short), ReadTimes(_LONG, *long)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What the times depend on beside host and form."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


@torch.inference_mode()
def _times(shape: _Shape, ops: Ops) -> Times:
    num_blocks = _NUM_RUNS * -(-_LONG // shape.block_size) + 1
    pools = random_tensors()(2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    is_bytes = is_quantised(shape.kv_dtype)
    pools = quantise(pools, shape.kv_dtype) if is_bytes else pools.to(shape.kv_dtype)
    return tuple(
        seconds
        for num_rows in _ROWS
        for num_tokens in (_SHORT, _LONG)
        for seconds in _seconds(shape, ops, pools, num_rows, num_tokens)
    )


def _seconds(
    shape: _Shape, ops: Ops, pools: torch.Tensor, num_rows: int, num_tokens: int
) -> tuple[float, float]:
    """Return the time of a step's attention that reads its runs row by row, and together."""
    num_all = _NUM_RUNS * num_rows
    q = random_tensors()(num_all, shape.num_heads, shape.head_dim).to(shape.dtype)
    positions = torch.full((num_all,), num_tokens)
    plans = [_plan(shape, num_rows, num_tokens, is_shared=shared) for shared in (False, True)]
    prepare_s, attend_s = [float("inf")] * 2, [float("inf")] * 2
    # other work on the host must not count, where all of this is done by one thread
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


def _plan(shape: _Shape, num_rows: int, num_tokens: int, *, is_shared: bool) -> AttentionPlan:
    """Return a step in which rows read a run, and then a position of the last block."""
    block_size, num_blocks = shape.block_size, -(-num_tokens // shape.block_size)
    runs = torch.arange(_NUM_RUNS * num_blocks).view(_NUM_RUNS, num_blocks)
    rows = torch.arange(_NUM_RUNS * num_rows).view(_NUM_RUNS, num_rows)
    # of the pairs of a block and a row, which are none where contexts have them all
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
    contexts = (
        ContextPart(query_idx=readers, block_ids=run, num_tokens=num_tokens)
        for readers, run in zip(rows, runs, strict=True)
        if is_shared
    )
    return AttentionPlan(num_decode=len(own), decode=part, prefill=None, contexts=tuple(contexts))
