"""Picks the form of every op: Triton on CUDA, plain torch elsewhere, in parts compiled C."""

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

# a prepared plan; each form of the ops has a record of its own
Prepared = Any
# copies the index of a step to the device
Upload = Callable[[Index, torch.device], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The ops of a step in one form: by default the references, where it is told what they do.

    What `prepare_attention` and `prepare_fixed` return is read by `finish_heads` and `attend` of
    the same form alone.

    With `prepare_fixed`, a step can be captured in a graph: no op reads a value back or has a shape
    or a launch that depends on one. The references have no such form.
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
    # how `StepIndex` is made for `prepare_fixed`
    joins_runs: bool = True

    @property
    def is_fixed(self) -> bool:
        return self.prepare_fixed is not None


REFERENCE = Ops()


def ops_for(device: torch.device) -> Ops:
    """Return the ops for tensors on `device`; Triton is imported when a GPU first asks."""
    return _on_gpu() if device.type == "cuda" else REFERENCE


def ranks_on_gpu() -> Callable[..., torch.Tensor] | None:
    """Return the kernel that finds tokens of ranks; None where Triton is missing."""
    if find_spec("triton") is None:
        return None
    from raybatch.kernels.triton.sampling import find_ranks

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
    """Return the references, in parts compiled for this host; for float32 on one thread of a CPU.

    `panel_widths` are those of the experts' gate and up, and of their down (None: no panels);
    `byte_dtype` is that of linears and experts kept as bytes.
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
    """Return ops of Triton with chunks of prompts by torch's `varlen_attn`; None if it has none."""
    try:
        from raybatch.kernels.triton import varlen
    except ImportError:
        return None
    assert ops.prepare_fixed is not None, "attention by Triton"
    return replace(
        ops,
        prepare_attention=functools.partial(ops.prepare_attention, pieces_of=varlen.pieces_of),
        prepare_fixed=functools.partial(ops.prepare_fixed, pieces_of=varlen.pieces_of),
        attend=functools.partial(ops.attend, attend_pieces=varlen.attend_pieces_into),
        joins_runs=False,
    )


@functools.cache
def _on_gpu() -> Ops:
    if find_spec("triton") is None:
        logger.warning("Triton is missing, so a GPU runs plain torch: %s", install_command("gpu"))
        return REFERENCE
    # hundreds of modules that no CPU needs
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
