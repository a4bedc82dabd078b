"""Decode attention in C: shared segments (cascade attention), then each sequence's own blocks.

Two to five times as fast on a CPU as `raybatch.kernels.decode_attention`, which writes scores and
weights of all blocks to memory. A shared segment is read once for all its readers, in the same
call.
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from raybatch.kernels.attention_plan import DecodeForm, DecodePart, PrefixSegment
from raybatch.kernels.byte_numbers import FP8, INT8, pool_rows, row_width
from raybatch.kernels.decode_attention import attend_decode, plan_walk
from raybatch.kernels.dense_attention import Part
from raybatch.kernels.native.compiler import (
    CompiledOnce,
    call,
    compile_library,
    random_tensors,
    resemble,
)

# KV formats of the C source by pool dtype
_KV_FORMS = {torch.float32: 0, INT8: 1, FP8: 2}
# limit of weights on the stack: query heads per KV head times positions of a block
_MAX_WEIGHTS = 1 << 18

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLists:
    """The P entries of a `DecodePart`, ordered by owner.

    Args:
        block_ids: int64 [P], the block of each entry.
        stops: int64 [P], number of valid positions in each block.
        offsets: int64 [S + 1], where the entries of each decode row start, then P.
        firsts: per window of the model, the first visible position of each block, int64 [P]; None
            if all are visible.
    """

    block_ids: torch.Tensor
    stops: torch.Tensor
    offsets: torch.Tensor
    firsts: dict[int | None, torch.Tensor | None]
    runs: "RunLists"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLists:
    """The segments of a `DecodePart`, concatenated; int64.

    Args:
        rows: [Q], decode rows that read the segments, one segment after the other.
        row_starts: [R + 1], where the rows of each segment start in `rows`, then Q.
        block_ids: [P], blocks of the segments, in order of position.
        block_starts: [R], where the blocks of each segment start in `block_ids`.
        num_tokens: [R], valid positions of each segment.
        seen: per window of the model, the first visible position of the segment for each reader,
            [Q]; None if all are visible.
    """

    rows: torch.Tensor
    row_starts: torch.Tensor
    block_ids: torch.Tensor
    block_starts: torch.Tensor
    num_tokens: torch.Tensor
    seen: dict[int | None, torch.Tensor | None]


def _plan_runs(
    runs: tuple[PrefixSegment, ...], positions: torch.Tensor, windows: tuple[int | None, ...]
) -> RunLists:
    num_rows = torch.tensor([len(run.query_idx) for run in runs], dtype=torch.int64)
    num_blocks = torch.tensor([len(run.block_ids) for run in runs], dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    rows = torch.cat([none, *(run.query_idx for run in runs)])
    seen: dict[int | None, torch.Tensor | None] = dict.fromkeys(windows)
    for window in windows:
        if runs and window is not None and int(positions.max()) >= window:
            firsts = torch.tensor([run.first_position for run in runs]).repeat_interleave(num_rows)
            seen[window] = (positions[rows] - window + 1 - firsts).clamp_(0)
    return RunLists(
        rows=rows,
        row_starts=functional.pad(num_rows.cumsum(0), (1, 0)),
        block_ids=torch.cat([none, *(run.block_ids for run in runs)]),
        block_starts=num_blocks.cumsum(0) - num_blocks,
        num_tokens=torch.tensor([run.num_tokens for run in runs], dtype=torch.int64),
        seen=seen,
    )


def _plan_lists(
    part: DecodePart,
    *,
    positions: torch.Tensor,  # int64 [S], of the decode tokens
    pool: torch.Tensor,  # [N, G, B, R], keys of any layer
    windows: tuple[int | None, ...],
    tile: tuple[int, int],
    dtype: torch.dtype,
) -> BlockLists:
    """Prepare a part for the kernel.

    Raises:
        ValueError: the pool differs from `dtype` and the block shape `tile`, (B, R), for which the
            kernel was compiled; or a window needs missing `first_positions`.
    """
    if pool.dtype != dtype or pool.shape[2:] != tile or not pool.is_contiguous():
        raise ValueError(
            "the C attention kernel was compiled for another pool than one of shape "
            f"{tuple(pool.shape)}"
        )
    owners, order = part.owners.sort(stable=True)
    firsts: dict[int | None, torch.Tensor | None] = dict.fromkeys(windows)
    for window in windows:
        if window is not None and int(positions.max()) >= window:
            if part.first_positions is None:
                raise ValueError(
                    "DecodePart.first_positions is None, but the model has a sliding window"
                )
            first_seen = (positions - window + 1).index_select(0, owners)
            firsts[window] = (first_seen - part.first_positions.index_select(0, order)).clamp_(0)
    return BlockLists(
        block_ids=part.block_ids.index_select(0, order),
        stops=part.num_valid.index_select(0, order),
        offsets=torch.searchsorted(owners, torch.arange(len(positions) + 1, device=owners.device)),
        firsts=firsts,
        runs=_plan_runs(part.runs, positions, windows),
    )


@CompiledOnce
def decode_form(
    *, head_dim: int, num_grouped: int, block_size: int, kv_dtype: torch.dtype
) -> DecodeForm | None:
    """Return the C kernel for one shape, compiled once per process; None if not available.

    `num_grouped` is the number of query heads of a KV head.

    `kv_dtype` is that of the pool: float32, or a quantized one.
    """
    if num_grouped * block_size > _MAX_WEIGHTS:
        return None
    names = {
        "HEAD_DIM": head_dim,
        "NUM_GROUPED": num_grouped,
        "BLOCK_SIZE": block_size,
        "KV_FORM": _KV_FORMS[kv_dtype],
    }
    library = compile_library("decode_attention.c", names)
    if library is None:
        return None
    tile = (block_size, row_width(head_dim, kv_dtype))
    form = DecodeForm(
        plan=functools.partial(_plan_lists, tile=tile, dtype=kv_dtype),
        attend=functools.partial(_attend, library.attend_decode),
        reads_segments=True,
    )
    if not _agrees_with_torch(form, head_dim, num_grouped, block_size, kv_dtype):
        _logger.warning(
            "the C attention kernel gives wrong results on this host; falling back to torch"
        )
        return None
    return form


def _attend(
    kernel: Callable[..., None],
    q: torch.Tensor,  # [S, H, D]
    k_pool: torch.Tensor,  # [N, G, B, R]
    v_pool: torch.Tensor,  # [N, G, B, R]
    lists: BlockLists,
    window: int | None,
) -> Part:
    """Return the outputs [S, H, D] and their log-sum-exp, float32 [S, H]."""
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()
    # new_empty: independent of torch's default dtype
    output, lse, totals = q.new_empty(q.shape), *q.new_empty(2, *q.shape[:2])
    own = lists.block_ids, lists.firsts[window], lists.stops, lists.offsets
    runs = lists.runs
    shared = runs.rows, runs.seen[window], runs.row_starts, runs.block_ids, runs.block_starts
    sizes = len(runs.num_tokens), len(q), k_pool.shape[1], 1.0 / math.sqrt(q.shape[2])
    rows = q, q.stride(0), k_pool, v_pool, output, lse, totals
    call(kernel, *rows, *own, *shared, runs.num_tokens, *sizes)
    return output, lse


def _agrees_with_torch(
    form: DecodeForm, head_dim: int, num_grouped: int, block_size: int, kv_dtype: torch.dtype
) -> bool:
    """Return whether a small test (two sequences of two blocks, one without) matches torch."""
    made = random_tensors()
    q = made(3, num_grouped, head_dim)
    pools = pool_rows(made(2, 4, 1, block_size, head_dim), kv_dtype)
    num_valid = torch.tensor([1, block_size])
    part = DecodePart.of_rows(torch.arange(4).view(2, 2), num_valid, block_size=block_size)
    step: dict[str, Any] = {"positions": torch.arange(3), "pool": pools[0], "windows": (None,)}
    actual = form.attend(q, pools[0], pools[1], form.plan(part, **step), None)
    expected = attend_decode(q, pools[0], pools[1], plan_walk(part, **step), None)
    return all(map(resemble, actual, expected))
