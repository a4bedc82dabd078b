"""Picks the form of every op: Triton on CUDA, plain torch elsewhere, in parts compiled C."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from raybatch.kernels import attention, moe, norm, rotary
from raybatch.kernels.native.decode_attention import decode_form
from raybatch.kernels.native.moe_experts import panelled_experts
from raybatch.kernels.native.small_ops import small_ops

logger = logging.getLogger(__name__)

# a prepared plan; each form of the ops has a record of its own
Prepared = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The ops of a forward pass in one form; what they do is told where the references are.

    What `prepare_attention` returns is read by `store_kv` and `attend` of the same form alone.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotate_: Callable[[torch.Tensor, torch.Tensor], None]
    moe_ffn: Callable[..., torch.Tensor]
    prepare_attention: Callable[..., Prepared]
    store_kv: Callable[..., None]
    attend: Callable[..., torch.Tensor]


REFERENCE = Ops(
    rms_norm=norm.rms_norm,
    rotate_=rotary.rotate_,
    moe_ffn=moe.moe_ffn,
    prepare_attention=attention.prepare_attention,
    store_kv=attention.store_kv,
    attend=attention.attend,
)


def ops_for(device: torch.device) -> Ops:
    """Return the ops for tensors on `device`; Triton is imported when a GPU first asks."""
    return _on_gpu() if device.type == "cuda" else REFERENCE


def compiled_ops(
    *,
    head_dim: int,
    num_grouped: int,
    block_size: int,
    panel_widths: tuple[int, int] | None = None,
    kv_dtype: torch.dtype = torch.float32,
) -> Ops:
    """Return the references, in parts compiled for this host; for float32 on one thread of a CPU.

    Args:
        head_dim: of one head.
        num_grouped: query heads of one KV head.
        block_size: positions of one cache block.
        panel_widths: of the experts' gate and up, and of their down; None where they have no
            panels.
        kv_dtype: of the KV pool: float32, or of a quantised one.
    """
    ops, small = REFERENCE, small_ops()
    if small is not None:
        ops = replace(ops, rms_norm=small.rms_norm, rotate_=small.rotate_, store_kv=small.store_kv)
    decode = decode_form(
        head_dim=head_dim, num_grouped=num_grouped, block_size=block_size, kv_dtype=kv_dtype
    )
    if decode is not None:
        prepare = functools.partial(attention.prepare_attention, decode=decode)
        ops = replace(ops, prepare_attention=prepare)
    experts = None if panel_widths is None else panelled_experts(*panel_widths)
    if experts is not None:
        ops = replace(ops, moe_ffn=functools.partial(moe.moe_ffn, panelled=experts))
    return ops


@functools.cache
def _on_gpu() -> Ops:
    if find_spec("triton") is None:
        logger.warning("Triton is missing, so a GPU runs plain torch: pip install raybatch[gpu]")
        return REFERENCE
    # hundreds of modules that no CPU needs
    from raybatch.kernels.triton import attention, moe, norm, rotary

    return Ops(
        rms_norm=norm.rms_norm,
        rotate_=rotary.rotate_,
        moe_ffn=moe.moe_ffn,
        prepare_attention=attention.prepare_attention,
        store_kv=attention.store_kv,
        attend=attention.attend,
    )
