"""Attention of decode tokens over the KV pool, block by block in memory order.

KV is not copied, unless it is quantized: the pool is sliced in runs of neighbouring blocks, each
(block, KV head) is one small product, and a segment softmax by owner combines the blocks of a
sequence. A few foreign blocks between two own ones are computed rather than skipped; their results
are ignored.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from raybatch.kernels.attention_plan import DecodePart
from raybatch.kernels.byte_numbers import is_quantised, read_rows
from raybatch.kernels.dense_attention import Part, base_of, shares_of

# starting another run costs about as much as reading this many bytes of foreign KV
_RUN_COST_BYTES = 128 << 10
# bytes of a quantized pool that are dequantized at once; must fit the CPU cache
_MAX_READ_BYTES = 1 << 20


class _Run(NamedTuple):
    """Rows `start..stop` of the walk are the blocks from `block` on."""

    start: int
    stop: int
    block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWalk:
    """A `DecodePart` prepared for all layers of a step: the R blocks to read, in order.

    Args:
        runs: slices of the pool to read, which may include blocks that no decode row attends to;
            empty if the blocks are gathered by `block_ids`.
        block_ids: int64 [R], the blocks.
        owners: int64 [R], the decode row that attends to each block; 0 if none does.
        rows_by_owner: int64 [P], indices (0 to R - 1) of blocks with an owner, ordered by owner.
        offsets: int64 [S], where the indices of each owner start in `rows_by_owner`.
        masks: for each window of the model (None: no window) what is added to the scores of each
            position, [R * G, 1, B]: 0 or -inf.
    """

    runs: tuple[_Run, ...]
    block_ids: torch.Tensor
    owners: torch.Tensor
    rows_by_owner: torch.Tensor
    offsets: torch.Tensor
    masks: dict[int | None, torch.Tensor]


def plan_walk(
    part: DecodePart,
    *,
    positions: torch.Tensor,  # int64 [S], of the decode tokens
    pool: torch.Tensor,  # [N, G, B, R], keys of any layer
    windows: tuple[int | None, ...],
) -> DecodeWalk:
    """Prepare a part for `attend_decode`; `windows` are the distinct windows of the layers."""
    num_kv_heads, block_size, width = pool.shape[1:]
    block_ids, device = part.block_ids, part.block_ids.device
    runs: tuple[_Run, ...] = ()
    rows = torch.arange(len(block_ids), device=device)
    # no blocks if all rows read only segments
    if len(block_ids) and part.is_contiguous:
        runs = (_Run(0, len(block_ids), int(block_ids[0])),)
    elif len(block_ids) and device.type == "cpu":
        block_bytes = 2 * num_kv_heads * block_size * width * pool.element_size()
        runs, rows, block_ids = _plan_runs(block_ids, _RUN_COST_BYTES // block_bytes)
    if is_quantised(pool.dtype):
        read_bytes = num_kv_heads * block_size * width * torch.float32.itemsize
        runs = _cut(runs, max(1, _MAX_READ_BYTES // read_bytes))
    owners = torch.zeros(len(block_ids), dtype=torch.int64, device=device)
    owners[rows] = part.owners
    sorted_owners, order = part.owners.sort(stable=True)
    offsets = torch.searchsorted(sorted_owners, torch.arange(len(positions), device=device))
    masks = {}
    for window in windows:
        hides = window is not None and int(positions.max()) >= window
        bias = _bias(part, part.owners, positions, pool, window if hides else None)
        # results of foreign blocks are ignored
        walked = bias.new_zeros(len(block_ids), block_size)
        walked[rows] = bias
        masks[window] = walked.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1)
    return DecodeWalk(
        runs=runs,
        block_ids=block_ids,
        owners=owners,
        rows_by_owner=rows.index_select(0, order),
        offsets=offsets,
        masks=masks,
    )


def _bias(
    part: DecodePart,
    owners: torch.Tensor,  # int64 [P]
    positions: torch.Tensor,  # int64 [S]
    pool: torch.Tensor,  # [N, G, B, R]
    window: int | None,
) -> torch.Tensor:
    """Return the mask bias of each entry's positions, [P, B]: 0 or -inf."""
    slots = torch.arange(pool.shape[2], device=positions.device)
    is_hidden = slots >= part.num_valid.unsqueeze(1)
    if window is not None:
        if part.first_positions is None:
            raise ValueError(
                "DecodePart.first_positions is None, but the model has a sliding window"
            )
        first_seen = (positions - window + 1).index_select(0, owners)
        is_hidden |= part.first_positions.unsqueeze(1) + slots < first_seen.unsqueeze(1)
    dtype = torch.float32 if is_quantised(pool.dtype) else pool.dtype
    bias = torch.zeros(is_hidden.shape, dtype=dtype, device=pool.device)
    return bias.masked_fill_(is_hidden, -math.inf)


def _plan_runs(
    block_ids: torch.Tensor, max_gap: int
) -> tuple[tuple[_Run, ...], torch.Tensor, torch.Tensor]:
    """Return the runs, the row of each given block, and the block of each row.

    A run continues over up to `max_gap` foreign blocks. A block with several owners occurs once
    for each; the first occurrences of all blocks come first, then the second ones, and so on,
    because a repetition ends a run.
    """
    ascending = block_ids.numpy()
    occurrence = np.arange(len(ascending)) - np.searchsorted(ascending, ascending)
    order = np.argsort(occurrence, kind="stable")
    ids = ascending[order]
    steps = np.diff(ids)
    breaks = np.flatnonzero((steps < 1) | (steps > max_gap + 1)) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(ids)]))
    first_blocks = ids[starts]
    lengths = ids[ends - 1] - first_blocks + 1
    first_rows = np.concatenate(([0], np.cumsum(lengths)))
    run_of_id = np.repeat(np.arange(len(starts)), ends - starts)
    rows = np.empty_like(ids)
    rows[order] = first_rows[run_of_id] + ids - first_blocks[run_of_id]
    run_of_row = np.repeat(np.arange(len(starts)), lengths)
    blocks = np.arange(first_rows[-1]) - first_rows[run_of_row] + first_blocks[run_of_row]
    runs = tuple(
        _Run(int(row), int(row + length), int(block))
        for row, length, block in zip(first_rows, lengths, first_blocks, strict=False)
    )
    return runs, torch.from_numpy(rows), torch.from_numpy(blocks)


def _cut(runs: tuple[_Run, ...], max_row_blocks: int) -> tuple[_Run, ...]:
    """Cut the runs into pieces of at most `max_row_blocks` blocks."""
    return tuple(
        _Run(start, min(start + max_row_blocks, run.stop), run.block + start - run.start)
        for run in runs
        for start in range(run.start, run.stop, max_row_blocks)
    )


def attend_decode(
    q: torch.Tensor,  # [S, H, D]
    k_pool: torch.Tensor,  # [N, G, B, R]
    v_pool: torch.Tensor,  # [N, G, B, R]
    walk: DecodeWalk,
    window: int | None,
) -> Part:
    """Return the outputs of the decode rows, [S, H, D], and their log-sum-exp, float32 [S, H]."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_pool.shape[1:3]
    num_rows = len(walk.owners)
    # `view` cannot infer a dimension of an empty tensor
    batch, num_grouped = num_rows * num_kv_heads, num_heads // num_kv_heads
    queries = q.index_select(0, walk.owners).view(batch, num_grouped, head_dim)
    scores = queries.new_empty(batch, num_grouped, block_size)
    scale = 1.0 / math.sqrt(head_dim)
    for rows, keys in _slices(k_pool, walk, q):
        torch.baddbmm(
            walk.masks[window][rows].to(q.dtype),
            queries[rows],
            keys.transpose(1, 2),
            alpha=scale,
            out=scores[rows],
        )
    weights = scores.float()
    # the highest score of an owner without rows is 0 here
    highest = functional.embedding_bag(
        walk.rows_by_owner, weights.amax(dim=-1).view(num_rows, num_heads), walk.offsets, mode="max"
    )
    base = base_of(highest)
    weights = weights.sub_(base.index_select(0, walk.owners).view(batch, num_grouped, 1)).exp_()
    total = _sum_by_owner(weights.sum(dim=-1).view(num_rows, num_heads), walk)
    weights = weights.to(q.dtype)
    partial = torch.empty_like(queries)
    for rows, values in _slices(v_pool, walk, q):
        torch.bmm(weights[rows], values, out=partial[rows])
    output = _sum_by_owner(partial.view(num_rows, num_heads * head_dim).float(), walk)
    output = shares_of(output.view(num_seqs, num_heads, head_dim), total.unsqueeze(-1))
    return output.to(q.dtype), total.log().add_(base)


def _slices(
    pool: torch.Tensor, walk: DecodeWalk, q: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of the walk (rows times KV heads), and their keys or values as numbers."""
    num_kv_heads, head_dim = pool.shape[1], q.shape[2]
    if not walk.runs:
        gathered = pool.index_select(0, walk.block_ids).flatten(0, 1)
        yield slice(None), read_rows(gathered, head_dim, q.dtype)
    for run in walk.runs:
        rows = slice(run.start * num_kv_heads, run.stop * num_kv_heads)
        blocks = pool[run.block : run.block + run.stop - run.start].flatten(0, 1)
        yield rows, read_rows(blocks, head_dim, q.dtype)


def _sum_by_owner(rows: torch.Tensor, walk: DecodeWalk) -> torch.Tensor:
    return functional.embedding_bag(walk.rows_by_owner, rows, walk.offsets, mode="sum")
