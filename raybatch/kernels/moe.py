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

# from this many tokens per expert on, a loop over experts keeps activations in cache; below,
# batched products and element-wise ops save calls
_LOOP_MIN_TOKENS_PER_EXPERT = 64

# most rows of an expert in one GPU program
MAX_ROW_TILE = 128

# x [T, M], both weights in panels, the token of each row and where its output belongs (int64 [R],
# rows sorted by expert), where each expert's rows start (int64 [E + 1]), and the outputs [N, M]
PanelledExperts = Callable[..., None]

# the weights of each token's experts [T, K], and their numbers [T, K]
Chosen = tuple[torch.Tensor, torch.Tensor]

# weights of all experts, and their scales if quantized
Scaled = tuple[torch.Tensor, torch.Tensor | None]


def route(
    x: torch.Tensor,  # [T, M]
    router: torch.Tensor,  # [E, M]
    top_k: int,
    norm_topk_prob: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token; return (weights [T, K], expert numbers int64 [T, K]).

    Weights have the dtype of `x`. They are probabilities over all experts, computed in float32;
    with `norm_topk_prob` those of the chosen experts are scaled to sum to 1.
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
    experts: slice | None = None,
    chosen: Chosen | None = None,
    panelled: PanelledExperts | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs, [T, M].

    Weights may be in panels (see `raybatch.kernels.linear`); gate and up must not share one. Either
    both are quantized and have scales (see `raybatch.kernels.byte_numbers`), or none is. `panelled`
    is a kernel for weights in panels.

    Args:
        experts: subset of the experts that is present, such as `slice(2, None, 4)`; only these are
            summed. None if all are.
        chosen: the result of `route` for `x`; then no router is needed.
    """
    weights, numbers = route(x, router, top_k, norm_topk_prob) if chosen is None else chosen
    num_experts, num_outputs = gate_up.shape[0], numbers.numel()
    expert_of_row, order = numbers_here(numbers, experts, num_experts).view(-1).sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=numbers.dtype, device=x.device)
    starts = torch.searchsorted(expert_of_row, bounds)
    if experts is None:
        outputs = x.new_empty(num_outputs, x.shape[1])
    else:
        order, outputs = order[: int(starts[-1])], x.new_zeros(num_outputs, x.shape[1])
    tokens = order // top_k
    is_panelled, is_plain = (gate_up.dim() == down.dim() == num_dims for num_dims in (4, 3))
    # batched only for few rows, and without scales
    is_joined = gate_up_scales is None and len(order) < num_experts * _LOOP_MIN_TOKENS_PER_EXPERT
    if panelled is not None and is_panelled:
        scales = {"up_scales": gate_up_scales, "down_scales": down_scales}
        panelled(x, gate_up, down, tokens, order, starts, outputs, **scales)
    elif is_joined and is_plain and _can_group(x, gate_up):
        ends = starts[1:].to(torch.int32)
        hidden = torch._grouped_mm(x.index_select(0, tokens), gate_up.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        hidden = functional.silu(gate).mul_(up)
        outputs.index_copy_(0, order, torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends))
    else:
        counts = starts.diff().tolist()
        if is_joined and is_panelled:
            rows = x.index_select(0, tokens)
            outputs.index_copy_(0, order, _panelled_experts(rows, gate_up, down, counts))
        else:
            scaled = (gate_up, gate_up_scales), (down, down_scales)
            looped_experts(x, scaled, tokens, order, counts, outputs)
    outputs = outputs.view(*weights.shape, outputs.shape[1])
    return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)


def numbers_here(numbers: torch.Tensor, experts: slice | None, num_here: int) -> torch.Tensor:
    """Return the indices of experts among the `num_here` ones that are present.

    The index of an absent expert is `num_here`. With experts 1, 3 and 5 present, the numbers 0, 1
    and 5 become 3, 0 and 2.
    """
    if experts is None:
        return numbers
    first, step = experts.start or 0, experts.step or 1
    return torch.where(numbers % step == first, numbers // step, num_here)


def _can_group(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Return whether torch's grouped product can be used.

    It needs rows of a multiple of 16 bytes; on CUDA supported dtypes and devices vary by version.
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
    """Compute few rows per expert: products per expert, other ops batched over all experts."""
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
    outputs: torch.Tensor,  # [N, M], of which others stay as they are
) -> None:
    """Write the output of each expert for its rows into `outputs`, one expert after the other.

    So the activations stay in the CPU cache. `counts` are the rows of each expert.
    """
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
