"""Chooses between expert kernels and torch's grouped product by batch size, timed at startup.

torch's grouped product is the fastest on some devices and missing on others, so both are timed on
a layer of the model.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from raybatch.engine.forward.step_graphs import CudaGraphs
from raybatch.engine.weights.layout import has_data
from raybatch.engine.weights.records import FfnShard, ModelWeights
from raybatch.errors import error_text
from raybatch.kernels.dispatch import Ops
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# tokens of the timed steps, largest first
_TOKENS = 2048, 256, 32
# allowed relative error of most rows, in bfloat16
_TOLERANCE = 5e-2
_NUM_RUNS = 8
# minimum gain to prefer another implementation
LEAST_GAIN = 0.03


def seconds_on(
    device: torch.device,
    run: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean seconds of a few calls of `run` on a device, after one warm-up."""
    is_gpu = device.type == "cuda"
    run()
    if is_gpu:
        torch.cuda.synchronize(device)
    began = clock()
    for _ in range(_NUM_RUNS):
        run()
    if is_gpu:
        torch.cuda.synchronize(device)
    return (clock() - began) / _NUM_RUNS


def replayed_s(
    device: torch.device,
    run: Callable[[], object],
    *,
    graphs: CudaGraphs | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean seconds of `run`, replayed as a CUDA graph to exclude launch overhead."""
    graph = (graphs or CudaGraphs(device)).capture(run)
    return seconds_on(device, graph.replay, clock=clock)


def can_group(shard: FfnShard, device: torch.device) -> bool:
    """Return whether torch has a real grouped product (no loop) for these experts."""
    gate_up, down = shard.experts_gate_up, shard.experts_down
    if gate_up is None or down is None or shard.experts_gate_up_scales is not None:
        return False
    is_plain = gate_up.dim() == down.dim() == 3 and gate_up.dtype == torch.bfloat16
    # rows must be multiples of 16 bytes
    is_aligned = not (gate_up.shape[2] % 8 or down.shape[2] % 8)
    return is_plain and is_aligned and torch.cuda.get_device_capability(device) == (9, 0)


def with_grouped_experts(
    ops: Ops,
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
) -> Ops:
    """Return the ops with torch's grouped product for experts if it is correct and faster.

    Otherwise return `ops`, whose experts are kernels. `seconds_of` times a function, by default as
    a CUDA graph.
    """
    device = weights.embed.device
    sparse = (layer.ffn for layer in weights.layers if layer.ffn.router is not None)
    here = (ffn for ffn in sparse if ffn.shard.experts is None and has_data(ffn.shard))
    ffn = next(here, None)
    if ffn is None or spec.moe is None or not can_group(ffn.shard, device):
        return ops
    seconds_of = seconds_of or partial(replayed_s, device)
    tensors = tuple(
        tensor.to(device)
        for tensor in (ffn.router, ffn.shard.experts_gate_up, ffn.shard.experts_down)
        if tensor is not None
    )
    options = {"top_k": spec.moe.top_k, "norm_topk_prob": spec.moe.norm_topk_prob}
    generator = torch.Generator().manual_seed(0)
    min_rows, reason = None, ""
    for num_tokens in _TOKENS:
        x = torch.randn(num_tokens, spec.model_dim, generator=generator)
        x = x.to(device, weights.embed.dtype)
        plain = partial(ops.moe_ffn, x, *tensors, **options)
        grouped = partial(plain, min_grouped_rows=0)
        try:
            wanted, made = plain().float(), grouped().float()
            error = ((made - wanted).norm(dim=1) / wanted.norm(dim=1)).median()
            if not error <= _TOLERANCE:
                reason = (
                    f"; torch's grouped product differs by a relative error of {float(error):.2g}"
                )
                break
            ours_s, theirs_s = seconds_of(plain), seconds_of(grouped)
        # a library may raise anything
        except Exception as failure:
            reason = f"; torch's grouped product failed: {error_text(failure)}"
            break
        reason = (
            f" ({ours_s * 1e3:.2f} ms for {num_tokens} tokens, grouped {theirs_s * 1e3:.2f} ms)"
        )
        if theirs_s > (1 - LEAST_GAIN) * ours_s:
            break
        min_rows = num_tokens * spec.moe.top_k
    if min_rows is None:
        _logger.info("expert layers use kernels%s", reason)
        return ops
    _logger.info(
        "expert layers use torch's grouped product in steps of at least %d tokens%s",
        min_rows // spec.moe.top_k,
        reason,
    )
    return replace(ops, moe_ffn=partial(ops.moe_ffn, min_grouped_rows=min_rows))
