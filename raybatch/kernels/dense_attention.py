"""Attention over contiguous keys, and merging of partial results by log-sum-exp.

KV heads are the batch dimension; their query heads share keys by a stride of 0.

All attention uses the softmax of this module: a row without a visible key has weights and output of
0 and a log-sum-exp of -inf, never NaN, which would indicate broken numbers of the model.
"""

import math

import torch

# queries per tile with a window: bounds the scores, and few keys outside the window are read
_TILE_QUERIES = 256

# outputs and their log-sum-exp
Part = tuple[torch.Tensor, torch.Tensor]


def base_of(highest: torch.Tensor) -> torch.Tensor:
    """Return what to subtract from the scores of a softmax: the highest one, or 0 if it is -inf."""
    return highest.masked_fill(highest == -math.inf, 0.0)


def shares_of(sums: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Divide weighted sums by the total weight of their row, in place; by 1 if that is 0."""
    return sums.div_(total.masked_fill(total == 0.0, 1.0))


def masked_softmax(
    scores: torch.Tensor,  # float32 [..., P], -inf where a key is hidden; overwritten
) -> Part:
    """Return the softmax of scores [..., P] over P, and its log-sum-exp [...]; P is at least 1."""
    base = base_of(scores.amax(dim=-1, keepdim=True))
    weights = scores.sub_(base).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return shares_of(weights, total), total.log().add_(base).squeeze(-1)


def merge_parts(
    output: torch.Tensor,  # [..., D]
    lse: torch.Tensor,  # float32 [...]
    other: torch.Tensor,  # [..., D]
    other_lse: torch.Tensor,  # float32 [...]
) -> Part:
    """Merge two results of the same queries, over disjoint positions: (output, log-sum-exp).

    The log is natural; the merge is associative and commutative. A result over no position has a
    log-sum-exp of -inf and any finite output; it has no weight.
    """
    # for two empty parts the difference is NaN, and either output is valid
    difference = (other_lse - lse).nan_to_num_(nan=0.0)
    weight = torch.sigmoid(difference).unsqueeze(-1).to(output.dtype)
    return torch.lerp(output, other, weight), torch.logaddexp(lse, other_lse)


def split_heads(
    q: torch.Tensor,  # [C * Q, H, D], C sets of queries
    num_sets: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Return the queries of each set by KV head, [C * G, n, Q, D]; a view if there is one set.

    n is the number of query heads of a KV head.
    """
    shape = num_sets, len(q) // num_sets, num_kv_heads, -1, q.shape[2]
    return q.view(shape).permute(0, 2, 3, 1, 4).flatten(0, 1)


def join_heads(part: Part, num_sets: int) -> Part:
    """Undo `split_heads` for outputs [C * G, n, Q, D] and log-sum-exps [C * G, n, Q].

    Returns [C * Q, H, D] and [C * Q, H].
    """
    output, lse = part
    shape = num_sets, -1, *lse.shape[1:]
    output = output.view(*shape, output.shape[-1]).permute(0, 3, 1, 2, 4)
    lse = lse.view(shape).permute(0, 3, 1, 2)
    return output.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1)


def attend_dense(
    q: torch.Tensor,  # [G, n, Q, D]
    k: torch.Tensor,  # [G, P, D]
    v: torch.Tensor,  # [G, P, D]
    *,
    is_causal: bool,
) -> Part:
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
) -> Part:
    """Like `attend_dense`, with a sliding window of `window` positions up to the query's own.

    A query without a visible key gets an output of 0 and a log-sum-exp of -inf, so that it has no
    weight in a merge.
    """
    parts = []
    for start in range(0, q.shape[2], _TILE_QUERIES):
        rows = slice(start, start + _TILE_QUERIES)
        distance = query_positions[rows].unsqueeze(1) - key_positions
        is_visible = (distance >= 0) & (distance < window)
        seen = is_visible.any(dim=0).nonzero().squeeze(1)
        keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
        parts.append(_attend_masked(q[:, :, rows], k[:, keys], v[:, keys], is_visible[:, keys]))
    outputs, sums = zip(*parts, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _attend_masked(
    q: torch.Tensor,  # [G, n, Q, D]
    k: torch.Tensor,  # [G, P, D]
    v: torch.Tensor,  # [G, P, D]
    is_visible: torch.Tensor | None,  # bool [Q, P]
) -> Part:
    # scale within the product, as unscaled sums may overflow float16
    scores = torch.baddbmm(
        q.new_zeros(1, 1, 1),
        q.flatten(1, 2),
        k.transpose(1, 2),
        beta=0,
        alpha=1.0 / math.sqrt(q.shape[3]),
    ).float()
    scores = scores.view(*q.shape[:3], -1)
    if is_visible is not None:
        scores = scores.masked_fill_(~is_visible, -math.inf)
    weights, lse = masked_softmax(scores)
    return torch.bmm(weights.flatten(1, 2).to(v.dtype), v).view(q.shape), lse
