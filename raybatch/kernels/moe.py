"""Mixture of experts: route, permute by expert, two linears per expert, un-permute."""

import torch
from torch.nn import functional

# from this many tokens per expert on, one expert at a time keeps the activations in cache and
# beats the grouped product; below it the grouped product saves the calls
_LOOP_MIN_TOKENS_PER_EXPERT = 64


def route(
    x: torch.Tensor,  # [T, M]
    router: torch.Tensor,  # [E, M]
    top_k: int,
    norm_topk_prob: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token: weights in the dtype of `x` [T, K], experts int64 [T, K].

    Probabilities are float32 over all experts, before the choice.
    """
    probabilities = torch.softmax(functional.linear(x, router), dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    if norm_topk_prob:
        weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), experts


def moe_ffn(
    x: torch.Tensor,  # [T, M]
    router: torch.Tensor,  # [E, M]
    gate_up: torch.Tensor,  # [E, 2F, M]
    down: torch.Tensor,  # [E, M, F]
    *,
    top_k: int,
    norm_topk_prob: bool,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs, [T, M]."""
    weights, experts = route(x, router, top_k, norm_topk_prob)
    num_tokens, num_experts = x.shape[0], gate_up.shape[0]
    expert_of_row, order = experts.view(-1).sort(stable=True)
    rows = x.index_select(0, order // top_k)
    if _prefers_grouped(rows, gate_up):
        bounds = torch.arange(1, num_experts + 1, device=x.device)
        ends = torch.searchsorted(expert_of_row, bounds).to(torch.int32)
        outputs = _grouped_experts(rows, gate_up, down, ends)
    else:
        counts = torch.bincount(expert_of_row, minlength=num_experts).tolist()
        outputs = _looped_experts(rows, gate_up, down, counts)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    unsorted = outputs.index_select(0, places)
    return torch.bmm(weights.unsqueeze(1), unsorted.view(num_tokens, top_k, x.shape[1])).squeeze(1)


def _prefers_grouped(rows: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Return whether the grouped product of torch can and should be used.

    It wants rows of a multiple of 16 bytes, and on CUDA dtypes and devices that differ by version.
    """
    num_experts, two_ffn, model_dim = gate_up.shape
    step = 16 // rows.element_size()
    return (
        rows.device.type == "cpu"
        and rows.shape[0] < num_experts * _LOOP_MIN_TOKENS_PER_EXPERT
        and model_dim % step == 0
        and (two_ffn // 2) % step == 0
    )


def _grouped_experts(
    rows: torch.Tensor,  # [T * K, M], sorted by expert
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ends: torch.Tensor,  # int32 [E], end of each expert's rows
) -> torch.Tensor:
    hidden = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=-1)
    return torch._grouped_mm(functional.silu(gate).mul_(up), down.transpose(1, 2), offs=ends)


def _looped_experts(
    rows: torch.Tensor,  # [T * K, M], sorted by expert
    gate_up: torch.Tensor,
    down: torch.Tensor,
    counts: list[int],
) -> torch.Tensor:
    outputs = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            gate, up = functional.linear(rows[start:stop], gate_up[expert]).chunk(2, dim=-1)
            torch.mm(functional.silu(gate).mul_(up), down[expert].t(), out=outputs[start:stop])
            start = stop
    return outputs
