"""Ops of fixed shapes in plain torch: for a CPU, in place of the Triton ops in CUDA graphs."""

from dataclasses import dataclass, replace

import torch

from raybatch.kernels.byte_numbers import read_rows
from raybatch.kernels.dense_attention import masked_softmax, merge_parts
from raybatch.kernels.dispatch import REFERENCE
from raybatch.kernels.linear import gated_linear, times_weight
from raybatch.kernels.moe import route
from raybatch.kernels.step_index import ENTRY_FIELDS, Item, Parts, StepSize, parts_of


def every_expert(x, router, gate_up, down, *, top_k, norm_topk_prob, **others):
    """Compute all experts for all tokens, so that no shape depends on the router."""
    assert not any(other is not None for other in others.values()), "floats of all experts"
    weights, experts = route(x, router, top_k, norm_topk_prob)
    shares = torch.zeros(len(x), len(gate_up), dtype=x.dtype, device=x.device)
    shares.scatter_(1, experts, weights)
    output = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        part = times_weight(gated_linear(x, gate_up[expert]), down[expert])
        output += shares[:, expert, None] * part
    return output


@dataclass
class Fixed:
    size: StepSize
    parts: Parts
    positions: torch.Tensor
    slots: torch.Tensor
    block_size: int = 0

    @property
    def block_ids(self):
        return self.slots // self.block_size

    @property
    def block_offsets(self):
        return self.slots % self.block_size


def prepare_fixed(size, index, *, positions, slot_mapping):
    return Fixed(size, parts_of(size, index.long()), positions, slot_mapping)


def finish_heads(projected, num_queries, norms, eps, rotation, k_pool, v_pool, prepared):
    if isinstance(prepared, Fixed):
        prepared.block_size = k_pool.shape[2]
    return REFERENCE.finish_heads(
        projected, num_queries, norms, eps, rotation, k_pool, v_pool, prepared
    )


def attend(q, k, v, k_pool, v_pool, prepared, window):
    """Compute each item, and all decode rows, as one product with every possible key."""
    if not isinstance(prepared, Fixed):
        return REFERENCE.attend(q, k, v, k_pool, v_pool, prepared, window)
    size, parts = prepared.size, prepared.parts
    # the last row is for padding queries
    num_rows = len(q) + 1
    q = torch.cat((q, torch.zeros_like(q[:1])))
    output, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    positions = torch.cat((prepared.positions, torch.zeros_like(prepared.positions[:1])))

    def cached(pool, blocks):
        """Return the positions of blocks [..., n] as [..., n * B, G, D]."""
        rows = read_rows(pool[blocks], q.shape[2], q.dtype)
        return rows.transpose(-3, -2).flatten(-4, -3)

    def add(rows, keys, values, is_visible):
        """Merge the attention of rows [Q] to keys [Q or 1, n, G, D]."""
        groups = q.shape[1] // keys.shape[2]
        is_used = is_visible if len(keys) > 1 else is_visible.any(dim=0, keepdim=True)
        # invisible entries may be NaN
        keys, values = (torch.where(is_used[..., None, None], x, 0.0) for x in (keys, values))
        keys, values = (x.repeat_interleave(groups, dim=2) for x in (keys, values))
        scores = torch.einsum("qhd,qnhd->qhn", q[rows], keys.expand(len(rows), *keys.shape[1:]))
        scores = scores.float() * q.shape[2] ** -0.5
        weights, sums = masked_softmax(scores.masked_fill(~is_visible.unsqueeze(1), -torch.inf))
        made = torch.einsum(
            "qhn,qnhd->qhd", weights.to(q.dtype), values.expand(len(rows), *values.shape[1:])
        )
        merged, merged_lse = merge_parts(output[rows], lse[rows], made, sums)
        output[rows], lse[rows] = merged, merged_lse

    def sees(rows, key_positions):
        distance = positions[rows].unsqueeze(1) - key_positions
        return distance < (window or 1 << 30)

    slots = torch.arange(k_pool.shape[2])
    if size.decode_rows:
        rows = torch.arange(size.decode_rows)
        limit = min(size.entries, size.row_blocks)
        numbers = parts.starts[:-1].unsqueeze(1) + torch.arange(limit)
        is_own = numbers < parts.starts[1:].unsqueeze(1)
        entries = parts.entries.view(-1, ENTRY_FIELDS)[numbers.clamp(max=size.entries - 1)]
        blocks, valid, first = torch.where(is_own.unsqueeze(2), entries, 0).unbind(2)
        is_visible = (slots < valid.unsqueeze(2)).flatten(1)
        is_visible &= sees(rows, (first.unsqueeze(2) + slots).flatten(1))
        add(rows, cached(k_pool, blocks), cached(v_pool, blocks), is_visible)
    for kind in ("chunks", "runs"):
        is_chunk = kind == "chunks"
        blocks_of = parts.chunk_blocks if is_chunk else parts.segment_blocks
        for item in getattr(parts, kind).view(-1, len(Item._fields)).unbind(0):
            query, num_queries, _, block, num_tokens, first, chunk_start = item.unbind(0)
            places = torch.arange(size.chunk_queries if is_chunk else size.segment_queries)
            rows = (query + places).clamp(max=num_rows - 1)
            if not is_chunk:
                rows = parts.segment_rows[(query + places).clamp(max=size.segment_rows - 1)]
            is_query = (places < num_queries).unsqueeze(1)
            rows = torch.where(is_query[:, 0], rows, num_rows - 1)
            if len(blocks_of):
                numbers = (block + torch.arange(len(blocks_of))).clamp(max=len(blocks_of) - 1)
                inside = torch.arange(len(blocks_of) * len(slots))
                is_visible = (inside < num_tokens) & is_query & sees(rows, first + inside)
                keys, values = (cached(pool, blocks_of[numbers][None]) for pool in (k_pool, v_pool))
                add(rows, keys, values, is_visible)
            if is_chunk:
                own = torch.arange(len(k))
                is_visible = (own >= chunk_start) & (own <= rows.unsqueeze(1)) & is_query
                if window:
                    is_visible = is_visible & (rows.unsqueeze(1) - own < window)
                add(rows, k[None], v[None], is_visible)
    return output[:-1].flatten(1)


FIXED = replace(
    REFERENCE,
    moe_ffn=every_expert,
    finish_heads=finish_heads,
    attend=attend,
    prepare_fixed=prepare_fixed,
)
