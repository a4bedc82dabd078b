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
from raybatch.kernels.context_attention import PreparedContexts, merge_contexts_, prepare_contexts
from raybatch.kernels.decode_attention import attend_decode, plan_walk
from raybatch.kernels.dense_attention import (
    Part,
    attend_dense,
    attend_windowed,
    join_heads,
    split_heads,
)
from raybatch.kernels.small_ops import rms_norm, rotate_
from raybatch.kernels.step_index import Index

# chunks up to this length are padded and computed together, longer ones one by one
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
    """A plan in the form that every layer of a step uses.

    What `decode` has made of the decode part is `walk`.
    """

    num_decode: int
    block_ids: torch.Tensor
    block_offsets: torch.Tensor
    decode: DecodeForm = TORCH_DECODE
    walk: Any
    chunks: tuple[tuple[int, int], ...] = ()
    buckets: tuple[_Bucket, ...] = ()
    contexts: PreparedContexts | None = None
    # a form that has an index may prepare the rows with logits along with all
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
    """Do once per step what all layers share.

    Of `pool`, the keys of any layer, only shape and dtype are read; `windows` are the different
    windows of the model's layers. `upload` is how an index gets to the device, where a form has
    one: by default a copy that is waited for. `last` is the plan of the rows with logits, and these
    rows: a form may bring it along, and is asked for it again if not.
    """
    del upload, last
    plan = plan.to(positions.device)
    walk, others = None, plan.contexts
    if plan.decode is not None and plan.num_decode:
        part, rows = plan.decode, positions[: plan.num_decode]
        if decode.reads_runs and others:
            is_run = [int(context.query_idx[-1]) < plan.num_decode for context in others]
            part = replace(part, runs=tuple(compress(others, is_run)))
            others = tuple(compress(others, map(not_, is_run)))
        walk = decode.plan(part, positions=rows, pool=pool, windows=windows)
    contexts = None
    if others:
        contexts = prepare_contexts(others, positions=positions, pool=pool, windows=windows)
    chunks, buckets = _split_prefill(plan.prefill, positions.device)
    return PreparedAttention(
        num_decode=plan.num_decode,
        block_ids=slot_mapping // pool.shape[2],
        block_offsets=slot_mapping % pool.shape[2],
        decode=decode,
        walk=walk,
        chunks=chunks,
        buckets=buckets,
        contexts=contexts,
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

    Keys and values become what a quantised pool gives back. Chunks attend to those of their own,
    and how a prompt is cut, or what of it was found in the pool, must not change what a token sees.
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
    """Normalise and turn queries and keys, and write keys and values to their slots.

    Heads are queries, keys and values, in that order, and so are the results; with queries alone
    nothing is written, and there is no plan.
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

    `window` is how many positions a token of this layer sees, itself included; None for all.
    """
    output = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if prepared.contexts else None
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
    if prepared.contexts is not None and lse is not None:
        merge_contexts_(output, lse, q, k_pool, v_pool, prepared.contexts, window)
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
    """Compute padded chunks with chunk and KV head as one batch; padding is never read."""
    count = bucket.num_chunks
    queries = split_heads(q.index_select(0, bucket.gather), count, k.shape[1])
    keys, values = (
        x.index_select(0, bucket.gather).view(count, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 1)
        for x in (k, v)
    )
    output, lse = join_heads(_attend_chunk(queries, keys, values, window), count)
    return output.index_select(0, bucket.valid), lse.index_select(0, bucket.valid)
