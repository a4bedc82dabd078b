"""Attention of rows over the segments of a plan (cascade attention and chunked prefill).

Call overhead dominates small segments. So segments of similar shape are batched, with short sets of
queries padded, and the results of all segments are merged into the output together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raybatch.kernels.attention_plan import PrefixSegment
from raybatch.kernels.byte_numbers import is_quantised, read_rows
from raybatch.kernels.dense_attention import (
    Part,
    attend_dense,
    attend_windowed,
    join_heads,
    merge_parts,
    split_heads,
)

# sets of up to this many queries are padded to a multiple of the step
_MAX_PADDED_QUERIES = 64
_QUERY_STEP = 8
# the copied KV of a batch must stay in the CPU cache until it is read
_MAX_BATCH_BYTES = 1 << 20
# row of padding
_PADDING = -1

_Rows = slice | torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """C segments of P cached positions, each read by Q rows of the forward batch.

    Args:
        num_tokens: P.
        rows: [C * Q], the row of each query; padding repeats the segment's last row.
        pool_rows: int64 [C * G * X], indices of their blocks in a pool viewed as [N * G, B * R].
        positions: int64 [C, Q], of the queries in their sequences.
        spans: first cached position and highest query position of each segment; empty if no layer
            has a window.
    """

    num_tokens: int
    rows: _Rows
    pool_rows: torch.Tensor
    positions: torch.Tensor
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSegments:
    """The segments of a plan, prepared for all layers of a step.

    Args:
        batches: segments that are computed together.
        rounds: results that are merged into the output at once, so that no row occurs twice in a
            round: (rows of the forward batch, int64 indices of their results in those of all
            batches, None: all in order).
    """

    batches: tuple[_Batch, ...]
    rounds: tuple[tuple[_Rows, torch.Tensor | None], ...]


def prepare_segments(
    parts: Sequence[PrefixSegment],
    *,
    positions: torch.Tensor,  # int64 [T]
    pool: torch.Tensor,  # [N, G, B, R]
    windows: tuple[int | None, ...],
) -> PreparedSegments:
    """Prepare once per step the data of segments that all layers share.

    `positions` are those of all rows of the forward batch. `pool` is the key pool of any layer;
    only its shape and dtype are used. `windows` are the distinct sliding windows of the layers.
    """
    num_kv_heads = pool.shape[1]
    has_windows = any(window is not None for window in windows)
    heads = torch.arange(num_kv_heads, device=pool.device).unsqueeze(1)
    batches: list[_Batch] = []
    rows: list[torch.Tensor] = []
    for members in _alike(parts, pool):
        batch_rows, is_query = _pad([part.query_idx for part in members])
        rows.append(torch.where(is_query, batch_rows, _PADDING).view(-1))
        blocks = torch.stack([part.block_ids for part in members]).unsqueeze(1)
        spans = ((p.first_position, int(positions[p.query_idx].max())) for p in members)
        batches.append(
            _Batch(
                num_tokens=members[0].num_tokens,
                rows=_as_slice(batch_rows.view(-1)),
                pool_rows=(blocks * num_kv_heads + heads).view(-1),
                positions=positions[batch_rows],
                spans=tuple(spans) if has_windows else (),
            )
        )
    return PreparedSegments(batches=tuple(batches), rounds=_rounds(torch.cat(rows)))


def _alike(parts: Sequence[PrefixSegment], pool: torch.Tensor) -> list[list[PrefixSegment]]:
    """Return the parts in batches of similar shape."""
    # quantized pools are dequantized into copies
    element_bytes = torch.float32.itemsize if is_quantised(pool.dtype) else pool.element_size()
    token_bytes = 2 * pool.shape[1] * pool.shape[3] * element_bytes
    batches: list[list[PrefixSegment]] = []
    last: dict[tuple[int, int], list[PrefixSegment]] = {}
    for part in parts:
        num_queries = len(part.query_idx)
        if num_queries <= _MAX_PADDED_QUERIES:
            num_queries = -(-num_queries // _QUERY_STEP) * _QUERY_STEP
        shape = part.num_tokens, num_queries
        batch = last.get(shape)
        if batch is None or (len(batch) + 1) * part.num_tokens * token_bytes > _MAX_BATCH_BYTES:
            batch = last[shape] = []
            batches.append(batch)
        batch.append(part)
    return batches


def _as_slice(rows: torch.Tensor) -> _Rows:
    """Return consecutive rows as a slice, which needs no copy, others unchanged."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and bool((rows.diff() == 1).all()):
        return slice(first, first + count)
    return rows


def _pad(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows to [C, Q], padded with the last of each; also return the mask of real rows."""
    ends = torch.tensor([len(r) for r in rows], device=rows[0].device).unsqueeze(1)
    places = torch.arange(int(ends.max()), device=rows[0].device)
    starts = ends.cumsum(0) - ends
    index = starts + torch.minimum(places, ends - 1)
    return torch.cat(tuple(rows))[index], places < ends


def _rounds(rows: torch.Tensor) -> tuple[tuple[_Rows, torch.Tensor | None], ...]:
    """Distribute the results over rounds with distinct rows; `rows` may contain padding."""
    places = (rows != _PADDING).nonzero().squeeze(1)
    ordered, order = rows[places].sort(stable=True)
    starts = torch.searchsorted(ordered, ordered)
    turn = torch.arange(len(ordered), device=rows.device) - starts
    num_rounds = int(turn.max()) + 1
    if num_rounds == 1 and len(places) == len(rows):
        return ((_as_slice(rows), None),)
    of_turn = [places[order[turn == number]] for number in range(num_rounds)]
    return tuple((_as_slice(rows[chosen]), chosen) for chosen in of_turn)


def merge_segments_(
    output: torch.Tensor,  # [T, H, D], modified in place
    lse: torch.Tensor,  # float32 [T, H], modified in place
    q: torch.Tensor,  # [T, H, D]
    k_pool: torch.Tensor,  # [N, G, B, R]
    v_pool: torch.Tensor,  # [N, G, B, R]
    prepared: PreparedSegments,
    window: int | None,
) -> None:
    """Compute the attention over the segments, and merge it into `output` and `lse` in place."""
    parts = [_attend(q, k_pool, v_pool, batch, window) for batch in prepared.batches]
    others, other_lses = zip(*parts, strict=True)
    other = torch.cat(others) if len(others) > 1 else others[0]
    other_lse = torch.cat(other_lses) if len(others) > 1 else other_lses[0]
    for rows, places in prepared.rounds:
        part = (other, other_lse)
        if places is not None:
            part = (other.index_select(0, places), other_lse.index_select(0, places))
        output[rows], lse[rows] = merge_parts(output[rows], lse[rows], *part)


def _attend(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: _Batch, window: int | None
) -> Part:
    """Return the outputs [C * Q, H, D] and their log-sum-exp [C * Q, H]."""
    num_segments, num_kv_heads = len(batch.positions), k_pool.shape[1]
    queries = split_heads(q[batch.rows], num_segments, num_kv_heads)
    keys, values = (
        # cached positions of all segments, [C * G, P, R]
        read_rows(
            pool.view(-1, pool.shape[2] * pool.shape[3])
            .index_select(0, batch.pool_rows)
            .view(len(queries), -1, pool.shape[3])[:, : batch.num_tokens],
            q.shape[2],
            q.dtype,
        )
        for pool in (k_pool, v_pool)
    )
    if window is None or all(highest - window < first for first, highest in batch.spans):
        return join_heads(attend_dense(queries, keys, values, is_causal=False), num_segments)
    # segment by segment, because positions differ
    places = torch.arange(batch.num_tokens, device=queries.device)
    parts = []
    for i, (first_position, _) in enumerate(batch.spans):
        heads = slice(i * num_kv_heads, (i + 1) * num_kv_heads)
        part = attend_windowed(
            queries[heads],
            keys[heads],
            values[heads],
            query_positions=batch.positions[i],
            key_positions=places + first_position,
            window=window,
        )
        parts.append(part)
    outputs, lses = zip(*parts, strict=True)
    return join_heads((torch.cat(outputs), torch.cat(lses)), num_segments)
