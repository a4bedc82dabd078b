"""Picks the form of the ops that suits a model's weights."""

import torch

from raybatch.engine.weights.loading import ModelWeights
from raybatch.kernels.dispatch import REFERENCE, Ops, compiled_ops
from raybatch.kernels.native.linears import PANEL_WIDTH, compiled_linears
from raybatch.models.config import ModelSpec


def pick_ops(
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    block_size: int,
    may_compile: bool,
    kv_dtype: torch.dtype | None = None,
) -> Ops:
    """Return the ops for these weights: compiled for float32 on a CPU, else torch's.

    `may_compile` false takes those of torch, which alone use several threads; a `kv_dtype` of None
    is that of the weights.
    """
    embed = weights.embed
    if not (may_compile and _is_for_compiled(embed.dtype, embed.device)):
        return REFERENCE
    return compiled_ops(
        head_dim=spec.head_dim,
        num_grouped=spec.num_heads // spec.num_kv_heads,
        block_size=block_size,
        panel_widths=_panel_widths(weights),
        byte_dtype=byte_dtype_of(weights),
        kv_dtype=kv_dtype or embed.dtype,
    )


def dense_panel_width(
    dtype: torch.dtype,
    device: torch.device,
    *,
    may_compile: bool,
    byte_dtype: torch.dtype | None = None,
) -> int | None:
    """Return the width of the panels in which dense linears are best; None for torch's layout.

    The ops are compiled for that, once per process.
    """
    if not (may_compile and _is_for_compiled(dtype, device)):
        return None
    return None if compiled_linears(byte_dtype) is None else PANEL_WIDTH


def _is_for_compiled(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 and device.type == "cpu"


def byte_dtype_of(weights: ModelWeights) -> torch.dtype | None:
    """Return the dtype of the weights that are bytes; None where none are."""
    linear = weights.layers[0].qkv
    return None if linear.scales is None else linear.weight.dtype


def _panel_widths(weights: ModelWeights) -> tuple[int, int] | None:
    """Return the widths of the experts' panels; None where a model has no such experts."""
    for layer in weights.layers:
        gate_up, down = layer.experts_gate_up, layer.experts_down
        if gate_up is not None and down is not None and gate_up.dim() == down.dim() == 4:
            return gate_up.shape[3], down.shape[3]
    return None
