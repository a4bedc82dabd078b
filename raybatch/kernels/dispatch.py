"""Selects the implementation of every op: Triton on CUDA, else torch, partly compiled C."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from raybatch.installation import install_command
from raybatch.kernels import attention, moe, small_ops
from raybatch.kernels import linear as linears
from raybatch.kernels.linear import Linear
from raybatch.kernels.native.decode_attention import decode_form
from raybatch.kernels.native.linears import compiled_linears, panelled_experts
from raybatch.kernels.native.small_ops import compiled_small_ops
from raybatch.kernels.step_index import Index

logger = logging.getLogger(__name__)

# a prepared plan; each implementation has its own type
Prepared = Any
# copies the index of a step to the device
Upload = Callable[[Index, torch.device], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """One implementation of the ops of a step; the defaults are the documented references.

    The results of `prepare_attention` and `prepare_fixed` are only valid for `finish_heads` and
    `attend` of the same implementation.

    With `prepare_fixed`, a step can be captured in a CUDA graph: no op reads values back, and no
    shape or launch depends on values. The references do not support it.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = small_ops.rms_norm
    linear: Callable[[torch.Tensor, Linear], torch.Tensor] = linears.linear
    add_linear_: Callable[[torch.Tensor, torch.Tensor, Linear], None] = linears.add_linear_
    add_mlp_: Callable[[torch.Tensor, torch.Tensor, Linear, Linear], None] = linears.add_mlp_
    route: Callable[[torch.Tensor, torch.Tensor, int, bool], moe.Chosen] = moe.route
    moe_ffn: Callable[..., torch.Tensor] = moe.moe_ffn
    finish_heads: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = (
        attention.finish_heads
    )
    prepare_attention: Callable[..., Prepared] = attention.prepare_attention
    attend: Callable[..., torch.Tensor] = attention.attend
    prepare_fixed: Callable[..., Prepared] | None = None
    # argument of `StepIndex` for `prepare_fixed`
    joins_segments: bool = True

    @property
    def is_fixed(self) -> bool:
        return self.prepare_fixed is not None


REFERENCE = Ops()


def ops_for(device: torch.device) -> Ops:
    """Return the ops for tensors on `device`; imports Triton on the first GPU call."""
    return _on_gpu() if device.type == "cuda" else REFERENCE


def ranks_on_gpu() -> Callable[..., torch.Tensor] | None:
    """Return `raybatch.kernels.triton.small_ops.find_ranks`; None if Triton is missing."""
    if find_spec("triton") is None:
        return None
    from raybatch.kernels.triton.small_ops import find_ranks

    return find_ranks


def compiled_ops(
    *,
    head_dim: int,
    num_grouped: int,
    block_size: int,
    panel_widths: tuple[int, int] | None = None,
    byte_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype = torch.float32,
) -> Ops:
    """Return the reference ops, some replaced by C kernels compiled for this host.

    They are for float32 activations and one CPU thread. `panel_widths` are the panel widths of the
    experts' gate_up and down; None: no panels. `byte_dtype` is the dtype of quantized linears and
    experts.
    """
    ops = REFERENCE
    if small := compiled_small_ops():
        finish = functools.partial(
            attention.finish_heads,
            rms_norm=small.rms_norm,
            rotate_=small.rotate_,
            store_kv=small.store_kv,
        )
        ops = replace(ops, rms_norm=small.rms_norm, finish_heads=finish)
    if dense := compiled_linears(byte_dtype):
        ops = replace(
            ops, linear=dense.linear, add_linear_=dense.add_linear_, add_mlp_=dense.add_mlp_
        )
    if decode := decode_form(
        head_dim=head_dim, num_grouped=num_grouped, block_size=block_size, kv_dtype=kv_dtype
    ):
        prepare = functools.partial(attention.prepare_attention, decode=decode)
        ops = replace(ops, prepare_attention=prepare)
    if panel_widths and (experts := panelled_experts(*panel_widths, byte_dtype or torch.float32)):
        ops = replace(ops, moe_ffn=functools.partial(moe.moe_ffn, panelled=experts))
    return ops


def with_varlen(ops: Ops) -> Ops | None:
    """Return Triton ops with torch's `varlen_attn` for prompt chunks; None if torch lacks it."""
    try:
        from raybatch.kernels.triton import varlen
    except ImportError:
        return None
    assert ops.prepare_fixed is not None, "needs Triton's attention"
    return replace(
        ops,
        prepare_attention=functools.partial(ops.prepare_attention, pieces_of=varlen.pieces_of),
        prepare_fixed=functools.partial(ops.prepare_fixed, pieces_of=varlen.pieces_of),
        attend=functools.partial(ops.attend, attend_pieces=varlen.attend_pieces_into),
        joins_segments=False,
    )


@functools.cache
def _on_gpu() -> Ops:
    if find_spec("triton") is None:
        logger.warning(
            "Triton is not installed, so slower torch ops are used; to install it: %s",
            install_command("gpu"),
        )
        return REFERENCE
    # imports hundreds of modules that a CPU does not need
    from raybatch.kernels.triton import attention, linear, moe, small_ops

    return Ops(
        rms_norm=small_ops.rms_norm,
        linear=linear.linear,
        add_linear_=linear.add_linear_,
        add_mlp_=linear.add_mlp_,
        route=moe.route,
        moe_ffn=moe.moe_ffn,
        finish_heads=attention.finish_heads,
        prepare_attention=attention.prepare_attention,
        attend=attention.attend,
        prepare_fixed=attention.prepare_fixed,
    )
