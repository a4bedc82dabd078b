"""Attention of rows over runs of cached positions that they share: the contexts of a plan.

What a call costs beside its arithmetic is most of the time of small contexts. So contexts of like
shape are computed as one batch, short sets of queries padded to the same number, and the results
of all contexts are merged into the output together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raybatch.kernels.attention_plan import ContextPart
from raybatch.kernels.dense_attention import attend_dense, attend_windowed
from raybatch.kernels.kv_rows import is_quantised, read_rows
from raybatch.kernels.softmax import merge_parts

# sets of up to so many queries that differ by less than a step are padded to one size
_MAX_PADDED_QUERIES = 64
_QUERY_STEP = 8
# the copied KV of a batch has to stay in the processor's cache until it is read
_MAX_BATCH_BYTES = 1 << 20
# row of a padded place
_PADDING = -1


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
    rows: slice | torch.Tensor
    pool_rows: torch.Tensor
    positions: torch.Tensor
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """Results that are merged together: no row occurs twice.

    Args:
        rows: rows of the forward batch.
        places: int64, their results among those of all batches; None for all in order.
    """

    rows: slice | torch.Tensor
    places: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedContexts:
    """The contexts of a plan in the form that every layer of a step uses."""

    batches: tuple[_Batch, ...]
    rounds: tuple[_Round, ...]


def prepare_contexts(
    parts: Sequence[ContextPart],
    *,
    positions: torch.Tensor,  # int64 [T]
    pool: torch.Tensor,  # [N, G, B, R]
    has_windows: bool,
) -> PreparedContexts:
    """Do once per step what all layers share.

    `positions` are those of every row of the forward batch in its sequence; of `pool`, the keys of
    any layer, only shape and dtype are read.
    """
    num_kv_heads = pool.shape[1]
    batches: list[_Batch] = []
    rows: list[torch.Tensor] = []
    for members in _alike(parts, 2 * num_kv_heads * pool.shape[3] * _element_bytes(pool)):
        batch_rows, is_query = _pad([part.query_idx for part in members])
        rows.append(torch.where(is_query, batch_rows, _PADDING).view(-1))
        batches.append(
            _Batch(
                num_tokens=members[0].num_tokens,
                rows=as_slice(batch_rows.view(-1)),
                pool_rows=_pool_rows([part.block_ids for part in members], num_kv_heads),
                positions=positions[batch_rows],
                spans=_spans(members, positions) if has_windows else (),
            )
        )
    return PreparedContexts(batches=tuple(batches), rounds=_rounds(torch.cat(rows)))


def _element_bytes(pool: torch.Tensor) -> int:
    """Return the bytes of an element of a pool once it was copied."""
    return torch.float32.itemsize if is_quantised(pool.dtype) else pool.element_size()


def _alike(parts: Sequence[ContextPart], token_bytes: int) -> list[list[ContextPart]]:
    """Return the parts in batches of like shape."""
    batches: list[list[ContextPart]] = []
    last: dict[tuple[int, int], list[ContextPart]] = {}
    for part in parts:
        shape = part.num_tokens, _size_class(len(part.query_idx))
        batch = last.get(shape)
        if batch is None or (len(batch) + 1) * part.num_tokens * token_bytes > _MAX_BATCH_BYTES:
            batch = last[shape] = []
            batches.append(batch)
        batch.append(part)
    return batches


def as_slice(rows: torch.Tensor) -> slice | torch.Tensor:
    """Return ascending neighbours as a slice, which is read without a copy, and others as given."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and bool((rows.diff() == 1).all()):
        return slice(first, first + count)
    return rows


def _size_class(num_queries: int) -> int:
    """Return a number that is equal for sets of queries that may be padded to one size."""
    if num_queries > _MAX_PADDED_QUERIES:
        return num_queries
    return -(-num_queries // _QUERY_STEP) * _QUERY_STEP


def _pad(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows to [C, Q], the last of each repeated, and say which are no padding."""
    ends = torch.tensor([len(r) for r in rows], device=rows[0].device).unsqueeze(1)
    places = torch.arange(int(ends.max()), device=rows[0].device)
    starts = ends.cumsum(0) - ends
    index = starts + torch.minimum(places, ends - 1)
    return torch.cat(tuple(rows))[index], places < ends


def _pool_rows(block_ids: Sequence[torch.Tensor], num_kv_heads: int) -> torch.Tensor:
    blocks = torch.stack(tuple(block_ids)).unsqueeze(1)
    heads = torch.arange(num_kv_heads, device=blocks.device).unsqueeze(1)
    return (blocks * num_kv_heads + heads).view(-1)


def _spans(parts: Sequence[ContextPart], positions: torch.Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((part.first_position, int(positions[part.query_idx].max())) for part in parts)


def _rounds(rows: torch.Tensor) -> tuple[_Round, ...]:
    """Deal the results out to rounds; `rows` has the row of each, or padding."""
    places = (rows != _PADDING).nonzero().squeeze(1)
    ordered, order = rows[places].sort(stable=True)
    starts = torch.searchsorted(ordered, ordered)
    turn = torch.arange(len(ordered), device=rows.device) - starts
    num_rounds = int(turn.max()) + 1
    if num_rounds == 1 and len(places) == len(rows):
        return (_Round(rows=as_slice(rows), places=None),)
    of_turn = [places[order[turn == number]] for number in range(num_rounds)]
    return tuple(_Round(rows=as_slice(rows[chosen]), places=chosen) for chosen in of_turn)


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
    for merged in prepared.rounds:
        rows, places = merged.rows, merged.places
        part = (other, other_lse)
        if places is not None:
            part = (other.index_select(0, places), other_lse.index_select(0, places))
        output[rows], lse[rows] = merge_parts(output[rows], lse[rows], *part)


def _attend(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, batch: _Batch, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [C * Q, H, D] and their log-sum-exp [C * Q, H]."""
    num_contexts, num_queries = batch.positions.shape
    num_kv_heads, head_dim = k_pool.shape[1], q.shape[2]
    queries = q[batch.rows].view(num_contexts, num_queries, num_kv_heads, -1, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).flatten(0, 1)
    keys, values = (read_rows(_gather(pool, batch), head_dim, q.dtype) for pool in (k_pool, v_pool))
    if window is None or all(highest - window < first for first, highest in batch.spans):
        output, lse = attend_dense(queries, keys, values, is_causal=False)
    else:
        output, lse = _attend_windowed(queries, keys, values, batch, window)
    shape = (num_contexts, num_kv_heads, -1, num_queries)
    output = output.view(*shape, head_dim).permute(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:])
    return output, lse.view(shape).permute(0, 3, 1, 2).reshape(-1, q.shape[1])


def _attend_windowed(
    queries: torch.Tensor,  # [C * G, n, Q, D]
    keys: torch.Tensor,  # [C * G, P, D]
    values: torch.Tensor,  # [C * G, P, D]
    batch: _Batch,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend context by context, because each has positions of its own."""
    places = torch.arange(batch.num_tokens, device=queries.device)
    num_kv_heads = len(queries) // len(batch.spans)
    parts = []
    for i, (first_position, _) in enumerate(batch.spans):
        heads = slice(i * num_kv_heads, (i + 1) * num_kv_heads)
        parts.append(
            attend_windowed(
                queries[heads],
                keys[heads],
                values[heads],
                query_positions=batch.positions[i],
                key_positions=places + first_position,
                window=window,
            )
        )
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def _gather(pool: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """Copy the cached positions of all contexts to [C * G, P, R]."""
    num_blocks, num_kv_heads, block_size, width = pool.shape
    flat = pool.view(num_blocks * num_kv_heads, block_size * width)
    copied = flat.index_select(0, batch.pool_rows)
    num_groups = len(batch.positions) * num_kv_heads
    return copied.view(num_groups, -1, width)[:, : batch.num_tokens]
