"""Attention of some queries over contiguous keys, with the log-sum-exp that merging needs.

KV heads are the batch and their query heads share keys by a stride of 0, so nothing is repeated.
"""

import math

import torch

from raybatch.kernels.softmax import masked_softmax

# queries of one windowed tile: bounds the scores, and keeps keys outside the window cheap
_TILE_QUERIES = 256


def attend_dense(
    q: torch.Tensor,  # [G, n, Q, D]
    k: torch.Tensor,  # [G, P, D]
    v: torch.Tensor,  # [G, P, D]
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [G, n, Q, D] and their log-sum-exp, float32 [G, n, Q].

    With `is_causal`, Q equals P and query i sees the keys up to i.
    """
    if q.device.type == "cpu":
        shape = (*q.shape[:2], *k.shape[1:])
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k.unsqueeze(1).expand(shape), v.unsqueeze(1).expand(shape), 0.0, is_causal
        )
        return output, lse
    is_visible = None
    if is_causal:
        length = k.shape[1]
        is_visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()
    return _attend_masked(q, k, v, is_visible)


def attend_windowed(
    q: torch.Tensor,  # [G, n, Q, D]
    k: torch.Tensor,  # [G, P, D]
    v: torch.Tensor,  # [G, P, D]
    *,
    query_positions: torch.Tensor,  # [Q]
    key_positions: torch.Tensor,  # [P]
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `attend_dense`, where a query sees the last `window` positions up to its own.

    A query that sees no key at all gets an output of 0 and a log-sum-exp of -inf, so that it has
    no weight in a merge.
    """
    outputs, sums = [], []
    for start in range(0, q.shape[2], _TILE_QUERIES):
        rows = slice(start, start + _TILE_QUERIES)
        distance = query_positions[rows].unsqueeze(1) - key_positions
        is_visible = (distance >= 0) & (distance < window)
        seen = is_visible.any(dim=0).nonzero().squeeze(1)
        keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
        output, lse = _attend_masked(q[:, :, rows], k[:, keys], v[:, keys], is_visible[:, keys])
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _attend_masked(
    q: torch.Tensor,  # [G, n, Q, D]
    k: torch.Tensor,  # [G, P, D]
    v: torch.Tensor,  # [G, P, D]
    is_visible: torch.Tensor | None,  # bool [Q, P]
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, heads_per_kv, num_queries, head_dim = q.shape
    # scaled within the product, as sums before that can be more than float16 holds
    scores = torch.baddbmm(
        q.new_zeros(1, 1, 1),
        q.reshape(num_kv_heads, -1, head_dim),
        k.transpose(1, 2),
        beta=0,
        alpha=1.0 / math.sqrt(head_dim),
    ).float()
    scores = scores.view(num_kv_heads, heads_per_kv, num_queries, -1)
    if is_visible is not None:
        scores = scores.masked_fill_(~is_visible, -math.inf)
    weights, lse = masked_softmax(scores)
    output = torch.bmm(weights.flatten(1, 2).to(v.dtype), v).view(q.shape)
    return output, lse
