"""Executes an `AttentionPlan` on the KV pool of one layer.

`prepare_attention` turns a plan into index tensors once per step; `finish_heads`, which writes to
the pool, and `attend` run once per layer. Tokens that occur in several parts are merged by their
log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import Any

import torch

from raybatch.kernels.attention_plan import AttentionPlan, DecodeForm, PrefillPart
from raybatch.kernels.byte_numbers import dequantise, is_quantised, quantise
from raybatch.kernels.decode_attention import attend_decode, plan_walk
from raybatch.kernels.dense_attention import (
    Part,
    attend_dense,
    attend_windowed,
    join_heads,
    split_heads,
)
from raybatch.kernels.segment_attention import PreparedSegments, merge_segments_, prepare_segments
from raybatch.kernels.small_ops import rms_norm, rotate_
from raybatch.kernels.step_index import Index

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
