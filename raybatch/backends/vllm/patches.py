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
    """Return the blocks that a request will need beyond those of its tokens within some steps.

    It has `num_tokens` of prompt and output, and can come to `max_tokens`, of which the last has no
    KV; a step makes one.
    """
    grown = min(num_tokens + num_steps, max_tokens - 1)
    return max(0, -(-grown // block_size) - -(-num_tokens // block_size))


def leave_room(scheduler: Any, block_size: int) -> None:  # noqa: ANN401 - vLLM's own type
    """Let vLLM start requests only where those that run can grow for some steps.

    Its own measure is a fixed number of blocks (`watermark`, which still holds), 0 unless given:
    then it starts what fits at this moment, preempts it where running requests grow, and computes
    it again. An engine without that measure is left as it is. The scheduler is in this
    process.
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
    """Have adapters add nothing to rows that have none; a second call changes nothing.

    On a CPU vLLM reads "no adapter", the index -1, as the last of its slots for adapters: once
    that one is filled, such rows are answered by whichever adapter lies in it. Kernels of GPUs
    leave them out.
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
