"""Rows without an adapter, in vLLM on a CPU.

There vLLM 0.32 reads "no adapter", the index -1, as the last of its slots for adapters: once that
one is filled, such rows are answered by whichever adapter lies in it. Kernels of GPUs leave them
out.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

# each has the inputs, the adapters, the output and the adapter of each row in this order
_OPS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def leave_bare_rows_alone() -> None:
    """Have adapters add nothing to rows that have none; a second call changes nothing."""
    for name in _OPS:
        op = getattr(lora_ops, name)
        if hasattr(op, "__wrapped__"):
            continue
        # each of both modules calls them by its own name
        for module in (lora_ops, punica_cpu):
            setattr(module, name, _without_bare_rows(op))


def _without_bare_rows(op: Callable[..., None]) -> Callable[..., None]:
    @wraps(op)
    def masked(
        inputs: torch.Tensor,  # [T, in]
        weights: torch.Tensor,  # [adapters, out, in]
        output: torch.Tensor,  # [T, out]
        adapters: torch.Tensor,  # [T]
        *args: Any,  # noqa: ANN401 - vLLM's own
        **options: Any,  # noqa: ANN401
    ) -> None:
        zero = torch.zeros((), dtype=inputs.dtype, device=inputs.device)
        op(
            torch.where(adapters[:, None] < 0, zero, inputs),
            weights,
            output,
            adapters,
            *args,
            **options,
        )

    return masked
