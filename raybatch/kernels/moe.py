"""Mixture of experts: route, permute by expert, two linears per expert, un-permute."""

import torch
from torch.nn import functional

# from this many tokens per expert on, one expert at a time keeps the activations in cache; below
# it, joined products and element-wise steps save the calls
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
    gate_up: torch.Tensor,  # [E, 2F, M], or in panels [E, 2F / P, M, P]
    down: torch.Tensor,  # [E, M, F]
    *,
    top_k: int,
    norm_topk_prob: bool,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs, [T, M].

    With panels, `gate_up[e, p, :, j]` are the weights of output `p * P + j`; F is a multiple of P.
    """
    weights, experts = route(x, router, top_k, norm_topk_prob)
    expert_of_row, order = experts.view(-1).sort(stable=True)
    tokens = order // top_k
    num_experts, is_panels = gate_up.shape[0], gate_up.dim() == 4
    is_small = len(order) < num_experts * _LOOP_MIN_TOKENS_PER_EXPERT
    if is_small and not is_panels and _can_group(x, gate_up):
        bounds = torch.arange(1, num_experts + 1, device=x.device)
        ends = torch.searchsorted(expert_of_row, bounds).to(torch.int32)
        outputs = _unsort(_grouped_experts(x.index_select(0, tokens), gate_up, down, ends), order)
    else:
        counts = torch.bincount(expert_of_row, minlength=num_experts).tolist()
        if is_small and is_panels:
            rows = x.index_select(0, tokens)
            outputs = _unsort(_panelled_experts(rows, gate_up, down, counts), order)
        else:
            outputs = _looped_experts(x, gate_up, down, tokens, order, counts)
    return torch.bmm(weights.unsqueeze(1), outputs.view(len(x), top_k, x.shape[1])).squeeze(1)


def _unsort(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=rows.device)
    return rows.index_select(0, places)


def _can_group(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Return whether the grouped product of torch can be used.

    It wants rows of a multiple of 16 bytes, and on CUDA dtypes and devices that differ by version.
    """
    _, two_ffn, model_dim = gate_up.shape
    step = 16 // x.element_size()
    return x.device.type == "cpu" and model_dim % step == 0 and (two_ffn // 2) % step == 0


def _grouped_experts(
    rows: torch.Tensor,  # [T * K, M], sorted by expert
    gate_up: torch.Tensor,  # [E, 2F, M]
    down: torch.Tensor,
    ends: torch.Tensor,  # int32 [E], end of each expert's rows
) -> torch.Tensor:
    hidden = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=-1)
    return torch._grouped_mm(functional.silu(gate).mul_(up), down.transpose(1, 2), offs=ends)


def _panelled_experts(
    rows: torch.Tensor,  # [T * K, M], sorted by expert
    gate_up: torch.Tensor,  # [E, 2F / P, M, P]
    down: torch.Tensor,
    counts: list[int],
) -> torch.Tensor:
    """Compute few rows per expert: products one by one, all else over all experts at once."""
    used = [expert for expert, count in enumerate(counts) if count]
    if not used:
        return torch.empty_like(rows)
    sizes = [counts[expert] for expert in used]
    hidden = torch.cat(
        [
            _times_panels(part, gate_up[e])
            for part, e in zip(torch.split(rows, sizes), used, strict=True)
        ],
        dim=1,
    )
    parts = torch.split(_gated(hidden), sizes)
    return torch.cat([part.mm(down[e].t()) for part, e in zip(parts, used, strict=True)])


def _looped_experts(
    x: torch.Tensor,  # [T, M]
    gate_up: torch.Tensor,
    down: torch.Tensor,
    tokens: torch.Tensor,  # int64 [T * K], the token of each row, sorted by expert
    order: torch.Tensor,  # int64 [T * K], where the output of each row belongs
    counts: list[int],
) -> torch.Tensor:
    """Compute one expert after the other, so that its activations stay in cache."""
    outputs = x.new_empty(len(order), x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            part, weight = x.index_select(0, tokens[rows]), gate_up[expert]
            if weight.dim() == 3:
                hidden = _gated(_times_panels(part, weight))
            else:
                gate, up = functional.linear(part, weight).chunk(2, dim=-1)
                hidden = functional.silu(gate).mul_(up)
            outputs.index_copy_(0, order[rows], hidden.mm(down[expert].t()))
            start += count
    return outputs


def _times_panels(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply rows [R, M] with panels [N, M, P] to [N, R, P]."""
    return torch.bmm(rows.expand(len(weight), -1, -1), weight)


def _gated(panels: torch.Tensor) -> torch.Tensor:
    """Turn gate and up in panels, [2F / P, R, P], into silu(gate) * up, [R, F]."""
    gate, up = panels.chunk(2)
    return functional.silu(gate, inplace=True).mul_(up).transpose(0, 1).flatten(1)
