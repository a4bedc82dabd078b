"""Mixture of experts: route, permute by expert, two linears per expert, un-permute."""

from collections.abc import Callable

import torch
from torch.nn import functional

from raybatch.kernels.byte_numbers import dequantise_weight
from raybatch.kernels.linear import (
    gate_panels_,
    gated_linear,
    join_panels,
    times_panels,
    times_weight,
)

# from this many tokens per expert on, one expert at a time keeps the activations in cache; below
# it, joined products and element-wise steps save the calls
_LOOP_MIN_TOKENS_PER_EXPERT = 64

# x [T, M], both weights in panels, the token of each row and where its output belongs (int64
# [T * K], rows sorted by expert), and where each expert's rows start (int64 [E + 1]); returns the
# outputs [T * K, M] at their places
PanelledExperts = Callable[..., torch.Tensor]

# weights of all experts, and the scales of those that are bytes
Scaled = tuple[torch.Tensor, torch.Tensor | None]


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
    down: torch.Tensor,  # [E, M, F], or in panels [E, M / P, F, P]
    *,
    top_k: int,
    norm_topk_prob: bool,
    gate_up_scales: torch.Tensor | None = None,  # float32 [E, 2F]
    down_scales: torch.Tensor | None = None,  # float32 [E, M]
    panelled: PanelledExperts | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs, [T, M].

    For panels see `raybatch.kernels.linear`; gate and up must not share one. Weights that are bytes
    have scales (see `raybatch.kernels.byte_numbers`), both or none. With `panelled`, that computes
    weights in panels, however many rows there are.
    """
    weights, experts = route(x, router, top_k, norm_topk_prob)
    expert_of_row, order = experts.view(-1).sort(stable=True)
    tokens = order // top_k
    num_experts = gate_up.shape[0]
    is_panelled, is_plain = (gate_up.dim() == down.dim() == num_dims for num_dims in (4, 3))
    # small, and of no scales, which one expert at a time reads
    is_joined = gate_up_scales is None and len(order) < num_experts * _LOOP_MIN_TOKENS_PER_EXPERT
    if panelled is not None and is_panelled:
        bounds = torch.arange(num_experts + 1, device=x.device)
        starts = torch.searchsorted(expert_of_row, bounds)
        scales = {"up_scales": gate_up_scales, "down_scales": down_scales}
        outputs = panelled(x, gate_up, down, tokens, order, starts, **scales)
    elif is_joined and is_plain and _can_group(x, gate_up):
        bounds = torch.arange(1, num_experts + 1, device=x.device)
        ends = torch.searchsorted(expert_of_row, bounds).to(torch.int32)
        hidden = torch._grouped_mm(x.index_select(0, tokens), gate_up.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        hidden = functional.silu(gate).mul_(up)
        outputs = _unsort(torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends), order)
    else:
        counts = torch.bincount(expert_of_row, minlength=num_experts).tolist()
        if is_joined and is_panelled:
            rows = x.index_select(0, tokens)
            outputs = _unsort(_panelled_experts(rows, gate_up, down, counts), order)
        else:
            scaled = (gate_up, gate_up_scales), (down, down_scales)
            outputs = looped_experts(x, scaled, tokens, order, counts)
    return _weighted(weights, outputs)


def moe_part(
    x: torch.Tensor,  # [T, M]
    router: torch.Tensor,  # [E, M], of all experts
    gate_up: torch.Tensor,  # of the experts that are here, as for `moe_ffn`
    down: torch.Tensor,
    *,
    experts: slice,
    top_k: int,
    norm_topk_prob: bool,
    gate_up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what some experts, `experts` of all, make of the rows that chose them, [T, M].

    The parts of all experts add up to what `moe_ffn` returns. One expert after the other.
    """
    weights, chosen = route(x, router, top_k, norm_topk_prob)
    return chosen_part(
        x,
        weights,
        chosen,
        gate_up,
        down,
        experts=experts,
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
    )


def chosen_part(
    x: torch.Tensor,  # [T, M]
    weights: torch.Tensor,  # [T, K]
    chosen: torch.Tensor,  # int [T, K], of all experts
    gate_up: torch.Tensor,  # of the experts that are here, as for `moe_ffn`
    down: torch.Tensor,
    *,
    experts: slice,
    gate_up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `moe_part` does of rows whose experts have been chosen, [T, M]."""
    first, step, top_k = experts.start or 0, experts.step or 1, chosen.shape[1]
    numbers = chosen.reshape(-1)
    places = (numbers % step == first).nonzero().squeeze(1)
    expert_of_row, order = ((numbers[places] - first) // step).sort(stable=True)
    places = places[order]
    counts = torch.bincount(expert_of_row, minlength=len(gate_up)).tolist()
    scaled = (gate_up, gate_up_scales), (down, down_scales)
    outputs = x.new_zeros(numbers.numel(), x.shape[1])
    looped_experts(x, scaled, places // top_k, places, counts, outputs)
    return _weighted(weights, outputs)


def _weighted(weights: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return the sums [T, M] of outputs [T * K, M] by weights [T, K]."""
    outputs = outputs.view(*weights.shape, outputs.shape[1])
    return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)


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


def _panelled_experts(
    rows: torch.Tensor,  # [T * K, M], sorted by expert
    gate_up: torch.Tensor,  # [E, 2F / P, M, P]
    down: torch.Tensor,  # [E, M / P, F, P]
    counts: list[int],
) -> torch.Tensor:
    """Compute few rows per expert: products one by one, all else over all experts at once."""
    used = [expert for expert, count in enumerate(counts) if count]
    if not used:
        return torch.empty_like(rows)
    sizes = [counts[expert] for expert in used]
    for weight, finish in ((gate_up, gate_panels_), (down, join_panels)):
        parts = zip(torch.split(rows, sizes), used, strict=True)
        rows = finish(torch.cat([times_panels(part, weight[e]) for part, e in parts], dim=1))
    return rows


def looped_experts(
    x: torch.Tensor,  # [T, M]
    scaled: tuple[Scaled, Scaled],  # gate and up, then down
    tokens: torch.Tensor,  # int64 [T * K], the token of each row, sorted by expert
    order: torch.Tensor,  # int64 [T * K], where the output of each row belongs
    counts: list[int],
    outputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one expert after the other, so that its activations stay in cache.

    With `outputs` [N, M], rows are written there, and others stay as they are.
    """
    outputs = x.new_empty(len(order), x.shape[1]) if outputs is None else outputs
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            gate_up, down = (
                part[expert] if of is None else dequantise_weight(part[expert], of[expert], x.dtype)
                for part, of in scaled
            )
            hidden = gated_linear(x.index_select(0, tokens[rows]), gate_up)
            outputs.index_copy_(0, order[rows], times_weight(hidden, down))
            start += count
    return outputs
