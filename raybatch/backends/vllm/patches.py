"""What is changed in vLLM: room for running requests, and rows without an adapter on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

# steps for which running requests find room, as in the native engine; more start requests later
_STEPS = 4
# each has the inputs, the adapters, the output and the adapter of each row in this order
_OPS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def blocks_to_grow(
    num_tokens: int, max_tokens: int, block_size: int, num_steps: int = _STEPS
) -> int:
    """Return how many KV blocks more a request will need within the next `num_steps` steps.

    It has `num_tokens` tokens of prompt and output now, gets one per step, and ends at
    `max_tokens`; the last token needs no KV.
    """
    grown = min(num_tokens + num_steps, max_tokens - 1)
    return max(0, -(-grown // block_size) - -(-num_tokens // block_size))


def leave_room(scheduler: Any, block_size: int) -> None:  # noqa: ANN401 - vLLM's own type
    """Patch vLLM's scheduler to start a request only if running ones can still grow for some steps.

    vLLM by default starts every request that fits at this moment; it then preempts and recomputes
    it when running requests grow. Its option `watermark`, a fixed number of blocks to keep free,
    still holds. A scheduler without that option is not changed.
    """
    manager = scheduler.kv_cache_manager
    fixed = getattr(manager, "watermark_blocks", None)
    if fixed is None:
        return
    schedule, allocate = scheduler.schedule, manager.allocate_slots
    # blocks that are left free in one step, counted when they are first asked for
    taken: int | None = None

    def room_of(requests: Iterable[Any]) -> int:
        return sum(
            blocks_to_grow(r.num_tokens, r.num_prompt_tokens + r.max_tokens, block_size)
            for r in requests
        )

    def scheduled(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        nonlocal taken
        taken = None
        return schedule(*args, **kwargs)

    def allocated(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        nonlocal taken
        if request.status.name not in ("WAITING", "PREEMPTED"):
            return allocate(request, *args, **kwargs)
        taken = room_of(scheduler.running) if taken is None else taken
        needed = room_of([request])
        manager.watermark_blocks = max(fixed, taken + needed)
        blocks = allocate(request, *args, **kwargs)
        if blocks is not None:
            taken += needed
        return blocks

    scheduler.schedule, manager.allocate_slots = scheduled, allocated


def leave_bare_rows_alone(vllm: Any) -> None:  # noqa: ANN401 - names of vLLM
    """Patch vLLM's CPU kernels so that they apply no adapter to rows that have none.

    These kernels read the adapter index -1, "none", as the last adapter slot: once that slot is
    used, rows without an adapter are answered with its adapter. The GPU kernels skip such rows. A
    second call has no effect.
    """
    for name in _OPS:
        op = getattr(vllm.lora_ops, name)
        if hasattr(op, "__wrapped__"):
            continue
        # each of both modules calls them by its own name
        for module in (vllm.lora_ops, vllm.punica_cpu):
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
        inputs = torch.where(adapters[:, None] < 0, zero, inputs)
        op(inputs, weights, output, adapters, *args, **options)

    return masked
