"""Attention of rows over runs of cached positions that they share: the contexts of a plan.

What a call costs beside its arithmetic is most of the time of small contexts. So contexts of like
shape are computed as one batch, short sets of queries padded to the same number, and the results
of all contexts are merged into the output together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raybatch.kernels.attention_plan import ContextPart
from raybatch.kernels.byte_numbers import is_quantised, read_rows
from raybatch.kernels.dense_attention import (
    Part,
    attend_dense,
    attend_windowed,
    join_heads,
    merge_parts,
    split_heads,
)

# sets of up to so many queries that differ by less than a step are padded to one size
_MAX_PADDED_QUERIES = 64
_QUERY_STEP = 8
# the copied KV of a batch has to stay in the processor's cache until it is read
_MAX_BATCH_BYTES = 1 << 20
# row of a padded place
_PADDING = -1

_Rows = slice | torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """C contexts of P cached positions, each read by Q rows of the forward batch.

    Args:
        num_tokens: P.
        rows: [C * Q], the row of each query; a padded place repeats the context's last row.
        pool_rows: int64 [C * G * X], where their blocks lie in a pool viewed as [N * G, B * R].
        positions: int64 [C, Q], of the queries in their sequences.
        spans: first cached position and highest query position of each context; empty where no
            layer has a window.
    """

    num_tokens: int
    rows: _Rows
    pool_rows: torch.Tensor
    positions: torch.Tensor
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedContexts:
    """The contexts of a plan in the form that every layer of a step uses.

    Args:
        rounds: results that are merged together, of which no row occurs twice: rows of the forward
            batch, and their results among those of all batches, int64 (None for all in order).
    """

    batches: tuple[_Batch, ...]
    rounds: tuple[tuple[_Rows, torch.Tensor | None], ...]


def prepare_contexts(
    parts: Sequence[ContextPart],
    *,
    positions: torch.Tensor,  # int64 [T]
    pool: torch.Tensor,  # [N, G, B, R]
    windows: tuple[int | None, ...],
) -> PreparedContexts:
    """Do once per step what all layers share.

    `positions` are those of every row of the forward batch in its sequence; of `pool`, the keys of
    any layer, only shape and dtype are read.
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
    return PreparedContexts(batches=tuple(batches), rounds=_rounds(torch.cat(rows)))


def _alike(parts: Sequence[ContextPart], pool: torch.Tensor) -> list[list[ContextPart]]:
    """Return the parts in batches of like shape."""
    # of a quantised pool numbers are copied
    element_bytes = torch.float32.itemsize if is_quantised(pool.dtype) else pool.element_size()
    token_bytes = 2 * pool.shape[1] * pool.shape[3] * element_bytes
    batches: list[list[ContextPart]] = []
    last: dict[tuple[int, int], list[ContextPart]] = {}
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
    """Return ascending neighbours as a slice, which is read without a copy, and others as given."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and bool((rows.diff() == 1).all()):
        return slice(first, first + count)
    return rows


def _pad(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows to [C, Q], the last of each repeated, and say which are no padding."""
    ends = torch.tensor([len(r) for r in rows], device=rows[0].device).unsqueeze(1)
    places = torch.arange(int(ends.max()), device=rows[0].device)
    starts = ends.cumsum(0) - ends
    index = starts + torch.minimum(places, ends - 1)
    return torch.cat(tuple(rows))[index], places < ends


def _rounds(rows: torch.Tensor) -> tuple[tuple[_Rows, torch.Tensor | None], ...]:
    """Deal the results out to rounds; `rows` has the row of each, or padding."""
    places = (rows != _PADDING).nonzero().squeeze(1)
    ordered, order = rows[places].sort(stable=True)
    starts = torch.searchsorted(ordered, ordered)
    turn = torch.arange(len(ordered), device=rows.device) - starts
    num_rounds = int(turn.max()) + 1
    if num_rounds == 1 and len(places) == len(rows):
        return ((_as_slice(rows), None),)
    of_turn = [places[order[turn == number]] for number in range(num_rounds)]
    return tuple((_as_slice(rows[chosen]), chosen) for chosen in of_turn)


def merge_contexts_(
    output: torch.Tensor,  # [T, H, D], modified in place
    lse: torch.Tensor,  # float32 [T, H], modified in place
    q: torch.Tensor,  # [T, H, D]
    k_pool: torch.Tensor,  # [N, G, B, R]
    v_pool: torch.Tensor,  # [N, G, B, R]
    prepared: PreparedContexts,
    window: int | None,
) -> None:
    """Add what the rows see of their contexts to what they have seen so far."""
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
    num_contexts, num_kv_heads = len(batch.positions), k_pool.shape[1]
    queries = split_heads(q[batch.rows], num_contexts, num_kv_heads)
    keys, values = (
        # the cached positions of all contexts, [C * G, P, R]
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
        return join_heads(attend_dense(queries, keys, values, is_causal=False), num_contexts)
    # context by context, because each has positions of its own
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
    return join_heads((torch.cat(outputs), torch.cat(lses)), num_contexts)
