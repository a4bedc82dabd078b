"""Slow and obvious forms of what the kernels compute."""

import math

import torch


def dense_attention(
    q: torch.Tensor,  # [Q, H, D]
    k: torch.Tensor,  # [P, G, D]
    v: torch.Tensor,  # [P, G, D]
    query_positions: list[int],
    window: int | None = None,
) -> torch.Tensor:
    """Attend in float64, one query and head at a time; key j is at position j."""
    num_heads, head_dim = q.shape[1:]
    heads_per_kv = num_heads // k.shape[1]
    output = torch.empty_like(q)
    for i, position in enumerate(query_positions):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            keys = k[first : position + 1, head // heads_per_kv].double()
            values = v[first : position + 1, head // heads_per_kv].double()
            scores = keys @ q[i, head].double() / math.sqrt(head_dim)
            output[i, head] = (torch.softmax(scores, dim=0) @ values).to(q.dtype)
    return output


def moe_loop(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
) -> torch.Tensor:
    """Send one token at a time through its experts."""
    output = torch.zeros_like(x)
    for i, token in enumerate(x):
        probabilities = torch.softmax(router @ token, dim=0)
        chosen = probabilities.argsort(descending=True)[:top_k]
        weights = probabilities[chosen]
        if norm_topk_prob:
            weights = weights / weights.sum()
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            output[i] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return output
