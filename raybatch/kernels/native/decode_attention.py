"""Attention of one token per sequence in C: runs that many read, then each sequence's own blocks.

On a CPU two to five times as fast as the form of `raybatch.kernels.decode_attention`, which has to
write scores and weights of all blocks to memory between its products. A shared run is read once for
all its readers, in the same call.
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from raybatch.kernels.attention_plan import ContextPart, DecodeForm, DecodePart
from raybatch.kernels.byte_numbers import FP8, INT8, is_quantised, quantise, row_width
from raybatch.kernels.decode_attention import attend_decode, plan_walk
from raybatch.kernels.dense_attention import Part
from raybatch.kernels.native.compiler import (
    CompiledOnce,
    call,
    compile_library,
    random_tensors,
    resemble,
)

# what a pool holds, by the type of its elements
_KV_FORMS = {torch.float32: 0, INT8: 1, FP8: 2}
# of weights on the stack: query heads of one KV head times positions of a block
_MAX_WEIGHTS = 1 << 18

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLists:
    """A `DecodePart` ordered by owner; P entries.

    Args:
        block_ids: int64 [P].
        stops: int64 [P], valid positions of each block.
        offsets: int64 [S + 1], where the blocks of each decode row start.
        firsts: for each window of the model the first position of each block that its owner still
            sees, int64 [P]; None where it sees all.
    """

    block_ids: torch.Tensor
    stops: torch.Tensor
    offsets: torch.Tensor
    firsts: dict[int | None, torch.Tensor | None]
    runs: "RunLists"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLists:
    """The shared runs of a `DecodePart`, one after the other; int64.

    Args:
        rows: [Q], readers of each run.
        row_starts: [R + 1], where those of a run start.
        block_ids: [P], its blocks in order of position.
        block_starts: [R], where they start.
        num_tokens: [R].
        seen: for each window of the model the first position of its run that a reader sees, [Q];
            None where it sees all.
    """

    rows: torch.Tensor
    row_starts: torch.Tensor
    block_ids: torch.Tensor
    block_starts: torch.Tensor
    num_tokens: torch.Tensor
    seen: dict[int | None, torch.Tensor | None]


def _plan_runs(
    runs: tuple[ContextPart, ...], positions: torch.Tensor, windows: tuple[int | None, ...]
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
    """Turn a part into what the kernel reads.

    Raises:
        ValueError: the pool is not one of `dtype` with blocks of `tile`, (B, R), for which the
            kernel was compiled; or a window needs what the part lacks.
    """
    if pool.dtype != dtype or pool.shape[2:] != tile or not pool.is_contiguous():
        raise ValueError(f"the kernel was compiled for another pool than {tuple(pool.shape)}")
    owners, order = part.owners.sort(stable=True)
    firsts: dict[int | None, torch.Tensor | None] = dict.fromkeys(windows)
    for window in windows:
        if window is not None and int(positions.max()) >= window:
            if part.first_positions is None:
                raise ValueError("DecodePart.first_positions is needed by a sliding window")
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
    """Return the kernel for one shape, compiled once per process; None where there is none.

    `kv_dtype` is that of the pool: float32, or of a quantised one.
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
        reads_runs=True,
    )
    if not _agrees_with_torch(form, head_dim, num_grouped, block_size, kv_dtype):
        _logger.warning("the compiled attention is wrong on this host, so torch computes it")
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
    # whatever the process takes by default
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
    """Return whether two sequences of two blocks, and one of none, get what torch computes."""
    made = random_tensors()
    q = made(3, num_grouped, head_dim)
    pools = made(2, 4, 1, block_size, head_dim)
    if is_quantised(kv_dtype):
        pools = quantise(pools, kv_dtype)
    part = DecodePart(
        block_ids=torch.arange(4),
        owners=torch.tensor([0, 0, 1, 1]),
        num_valid=torch.tensor([block_size, 1, block_size, block_size]),
        is_contiguous=True,
    )
    step: dict[str, Any] = {"positions": torch.arange(3), "pool": pools[0], "windows": (None,)}
    actual = form.attend(q, pools[0], pools[1], form.plan(part, **step), None)
    expected = attend_decode(q, pools[0], pools[1], plan_walk(part, **step), None)
    return all(map(resemble, actual, expected))
