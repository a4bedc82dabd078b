"""Executes an `AttentionPlan` on the KV pool of one layer.

`prepare_attention` turns a plan into index tensors once per step; `finish_heads`, which writes to
the pool, and `attend` run once per layer. Tokens that occur in several parts are merged by their
log-sum-exp.

Call overhead dominates small segments (cascade attention and chunked prefill). So segments of
similar shape are batched, with short sets of queries padded, and the results of all segments are
merged into the output together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import Any

import torch

from raybatch.kernels.attention_plan import AttentionPlan, DecodeForm, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import dequantise, is_quantised, quantise, read_rows
from raybatch.kernels.decode_attention import attend_decode, plan_walk
from raybatch.kernels.dense_attention import (
    Part,
    attend_dense,
    attend_windowed,
    join_heads,
    merge_parts,
    split_heads,
)
from raybatch.kernels.small_ops import rms_norm, rotate_
from raybatch.kernels.step_index import Index

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
    parts = [_attend_segments(q, k_pool, v_pool, batch, window) for batch in prepared.batches]
    others, other_lses = zip(*parts, strict=True)
    other = torch.cat(others) if len(others) > 1 else others[0]
    other_lse = torch.cat(other_lses) if len(others) > 1 else other_lses[0]
    for rows, places in prepared.rounds:
        part = (other, other_lse)
        if places is not None:
            part = (other.index_select(0, places), other_lse.index_select(0, places))
        output[rows], lse[rows] = merge_parts(output[rows], lse[rows], *part)


def _attend_segments(
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


# chunks up to this length are padded and batched, longer ones run one by one
_MAX_BUCKET_TOKENS = 48

TORCH_DECODE = DecodeForm(plan=plan_walk, attend=attend_decode)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """Short chunks of similar length, padded on the right to W tokens.

    Args:
        gather: int64 [C * W], the row of the forward batch for each padded place.
        valid: int64 [R], padded places that hold a token.
        rows: int64 [R], their rows of the forward batch.
    """

    num_chunks: int
    gather: torch.Tensor
    valid: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedAttention:
    """An `AttentionPlan` prepared for all layers of a step.

    `walk` is its decode part, as `decode.plan` has prepared it.
    """

    num_decode: int
    block_ids: torch.Tensor
    block_offsets: torch.Tensor
    decode: DecodeForm = TORCH_DECODE
    walk: Any
    chunks: tuple[tuple[int, int], ...] = ()
    buckets: tuple[_Bucket, ...] = ()
    segments: PreparedSegments | None = None
    # implementations with an index may prepare the rows with logits here
    last: None = None


def prepare_attention(
    plan: AttentionPlan,
    *,
    positions: torch.Tensor,  # int64 [T]
    slot_mapping: torch.Tensor,  # int64 [T]
    pool: torch.Tensor,  # [N, G, B, R]
    windows: tuple[int | None, ...],
    upload: Callable[[Index, torch.device], torch.Tensor] | None = None,
    last: tuple[AttentionPlan, torch.Tensor] | None = None,
    decode: DecodeForm = TORCH_DECODE,
) -> PreparedAttention:
    """Prepare once per step the data of `plan` that all layers share.

    `pool` is the key pool of any layer; only its shape and dtype are used. `windows` are the
    distinct sliding windows of the layers (None: no window). `upload` copies an array to the
    device, by default synchronously. `last` is (plan, indices) of the rows with logits.
    Implementations may ignore `upload` and `last`, as this one does.
    """
    del upload, last
    plan = plan.to(positions.device)
    walk, others = None, plan.segments
    if plan.decode is not None and plan.num_decode:
        part, rows = plan.decode, positions[: plan.num_decode]
        if decode.reads_segments and others:
            is_run = [int(context.query_idx[-1]) < plan.num_decode for context in others]
            part = replace(part, runs=tuple(compress(others, is_run)))
            others = tuple(compress(others, map(not_, is_run)))
        walk = decode.plan(part, positions=rows, pool=pool, windows=windows)
    segments = None
    if others:
        segments = prepare_segments(others, positions=positions, pool=pool, windows=windows)
    chunks, buckets = _split_prefill(plan.prefill, positions.device)
    return PreparedAttention(
        num_decode=plan.num_decode,
        block_ids=slot_mapping // pool.shape[2],
        block_offsets=slot_mapping % pool.shape[2],
        decode=decode,
        walk=walk,
        chunks=chunks,
        buckets=buckets,
        segments=segments,
    )


def _split_prefill(
    part: PrefillPart | None, device: torch.device
) -> tuple[tuple[tuple[int, int], ...], tuple[_Bucket, ...]]:
    """Return the long chunks, (start, length), and the short ones by length."""
    long: list[tuple[int, int]] = []
    by_width: dict[int, list[tuple[int, int]]] = {}
    for chunk in zip(part.starts, part.lens, strict=True) if part else ():
        if chunk[1] > _MAX_BUCKET_TOKENS:
            long.append(chunk)
        else:
            by_width.setdefault((chunk[1] + 7) // 8 * 8, []).append(chunk)
    buckets = []
    for width, chunks in by_width.items():
        starts, lens = torch.tensor(chunks, device=device).unsqueeze(2).unbind(1)
        places = torch.arange(width, device=device)
        gather = (starts + torch.minimum(places, lens - 1)).view(-1)
        valid = (places < lens).view(-1).nonzero().squeeze(1)
        rows = gather.index_select(0, valid)
        buckets.append(_Bucket(num_chunks=len(chunks), gather=gather, valid=valid, rows=rows))
    return tuple(long), tuple(buckets)


def store_kv(
    k: torch.Tensor,  # [T, G, D], modified in place where the pool is quantised
    v: torch.Tensor,  # [T, G, D], modified in place where the pool is quantised
    k_pool: torch.Tensor,  # [N, G, B, R], modified in place
    v_pool: torch.Tensor,  # [N, G, B, R], modified in place
    prepared: PreparedAttention,
) -> None:
    """Write the KV of this step's tokens to their slots.

    With a quantized pool, `k` and `v` are replaced by their dequantized values: chunks attend to
    their own tokens, and chunking or caching of a prompt must not change results.
    """
    for rows, pool in ((k, k_pool), (v, v_pool)):
        stored = rows
        if is_quantised(pool.dtype):
            stored = quantise(rows, pool.dtype)
            rows.copy_(dequantise(stored, rows.shape[2], rows.dtype))
        pool[prepared.block_ids, :, prepared.block_offsets] = stored


def finish_heads(
    projected: torch.Tensor,  # [T, heads, D], modified in place
    num_queries: int,
    norms: torch.Tensor | None,  # [heads of queries and keys, D]
    eps: float,
    rotation: torch.Tensor,  # complex64 [T, 1, D / 2]
    k_pool: torch.Tensor,  # [N, G, B, R], modified in place
    v_pool: torch.Tensor,  # [N, G, B, R], modified in place
    prepared: PreparedAttention | None,
    *,
    rms_norm: Callable[..., torch.Tensor] = rms_norm,
    rotate_: Callable[..., None] = rotate_,
    store_kv: Callable[..., None] = store_kv,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate queries and keys, and write keys and values to their slots in the pools.

    Returns (queries, keys, values), each [T, heads, D], which are also the order of the heads in
    `projected`. `prepared` of None writes nothing, for heads that are queries only.
    """
    num_kv_heads = (projected.shape[1] - num_queries) // 2
    num_turned = num_queries + num_kv_heads
    turned, v = projected[:, :num_turned], projected[:, num_turned:]
    if norms is not None:
        turned = rms_norm(turned, norms, eps)
    rotate_(turned, rotation)
    q, k = turned[:, :num_queries], turned[:, num_queries:]
    if prepared is not None:
        store_kv(k, v, k_pool, v_pool, prepared)
    return q, k, v


def attend(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [T, G, D]
    v: torch.Tensor,  # [T, G, D]
    k_pool: torch.Tensor,  # [N, G, B, R]
    v_pool: torch.Tensor,  # [N, G, B, R]
    prepared: PreparedAttention,
    window: int | None,
) -> torch.Tensor:
    """Return the attention output of every token, [T, H * D].

    `window` is the number of positions that a token attends to, including itself; None for all.
    """
    output = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if prepared.segments else None
    if prepared.walk is not None:
        rows = slice(0, prepared.num_decode)
        part = prepared.decode.attend(q[rows], k_pool, v_pool, prepared.walk, window)
        _write(output, lse, rows, part)
    for start, length in prepared.chunks:
        rows = slice(start, start + length)
        heads = split_heads(q[rows], 1, k.shape[1])
        part = _attend_chunk(heads, k[rows].transpose(0, 1), v[rows].transpose(0, 1), window)
        _write(output, lse, rows, join_heads(part, 1))
    for bucket in prepared.buckets:
        _write(output, lse, bucket.rows, _attend_bucket(q, k, v, bucket, window))
    if prepared.segments is not None and lse is not None:
        merge_segments_(output, lse, q, k_pool, v_pool, prepared.segments, window)
    return output.flatten(1)


def _write(
    output: torch.Tensor, lse: torch.Tensor | None, rows: slice | torch.Tensor, part: Part
) -> None:
    output[rows] = part[0]
    if lse is not None:
        lse[rows] = part[1]


def _attend_chunk(
    q: torch.Tensor,  # [G, n, Q, D]
    k: torch.Tensor,  # [G, Q, D]
    v: torch.Tensor,  # [G, Q, D]
    window: int | None,
) -> Part:
    length = k.shape[1]
    if window is None or length <= window:
        return attend_dense(q, k, v, is_causal=True)
    places = torch.arange(length, device=q.device)
    return attend_windowed(q, k, v, query_positions=places, key_positions=places, window=window)


def _attend_bucket(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: _Bucket, window: int | None
) -> Part:
    """Compute padded chunks, batched over chunks and KV heads; padding is never read."""
    count = bucket.num_chunks
    queries = split_heads(q.index_select(0, bucket.gather), count, k.shape[1])
    keys, values = (
        x.index_select(0, bucket.gather).view(count, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 1)
        for x in (k, v)
    )
    output, lse = join_heads(_attend_chunk(queries, keys, values, window), count)
    return output.index_select(0, bucket.valid), lse.index_select(0, bucket.valid)
