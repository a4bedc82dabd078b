"""From how many rows on experts are better computed by torch's grouped product: timed at the start.

It is the library's best on some devices, and has no form on others. Which one is faster is not
known before, so both are run on a layer of the model.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from raybatch.engine.forward.step_graphs import CudaGraphs
from raybatch.engine.weights.layout import has_data
from raybatch.engine.weights.records import FfnTile, ModelWeights
from raybatch.errors import error_text
from raybatch.kernels.dispatch import Ops
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# of steps that are timed, the largest first
_TOKENS = 2048, 256, 32
# relative error of most rows, of bfloat16
_TOLERANCE = 5e-2
_NUM_RUNS = 8
# by so much another form must be faster to be taken
LEAST_GAIN = 0.03


def seconds_on(
    device: torch.device,
    run: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean seconds of a few runs, behind one that does not count."""
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
    """Return the seconds of a graph: launches alone would take a host longer than this."""
    graph = (graphs or CudaGraphs(device)).capture(run)
    return seconds_on(device, graph.replay, clock=clock)


def can_group(tile: FfnTile, device: torch.device) -> bool:
    """Return whether torch has a grouped product for the experts of a tile, and no loop of it."""
    gate_up, down = tile.experts_gate_up, tile.experts_down
    if gate_up is None or down is None or tile.experts_gate_up_scales is not None:
        return False
    is_plain = gate_up.dim() == down.dim() == 3 and gate_up.dtype == torch.bfloat16
    # rows of a multiple of 16 bytes
    is_aligned = not (gate_up.shape[2] % 8 or down.shape[2] % 8)
    return is_plain and is_aligned and torch.cuda.get_device_capability(device) == (9, 0)


def with_grouped_experts(
    ops: Ops,
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
) -> Ops:
    """Return the ops with grouped products where these are right and faster, else as they are.

    The experts of `ops` are kernels; `seconds_of` times a function, by default as a graph.
    """
    device = weights.embed.device
    sparse = (layer.ffn for layer in weights.layers if layer.ffn.router is not None)
    here = (ffn for ffn in sparse if ffn.tile.experts is None and has_data(ffn.tile))
    ffn = next(here, None)
    if ffn is None or spec.moe is None or not can_group(ffn.tile, device):
        return ops
    seconds_of = seconds_of or partial(replayed_s, device)
    tensors = tuple(
        tensor.to(device)
        for tensor in (ffn.router, ffn.tile.experts_gate_up, ffn.tile.experts_down)
        if tensor is not None
    )
    options = {"top_k": spec.moe.top_k, "norm_topk_prob": spec.moe.norm_topk_prob}
    generator = torch.Generator().manual_seed(0)
    min_rows, told = None, ""
    for num_tokens in _TOKENS:
        x = torch.randn(num_tokens, spec.model_dim, generator=generator)
        x = x.to(device, weights.embed.dtype)
        plain = partial(ops.moe_ffn, x, *tensors, **options)
        grouped = partial(plain, min_grouped_rows=0)
        try:
            wanted, made = plain().float(), grouped().float()
            error = ((made - wanted).norm(dim=1) / wanted.norm(dim=1)).median()
            if not error <= _TOLERANCE:
                told = f"; grouped products of torch differ from them by {float(error):.2g}"
                break
            ours_s, theirs_s = seconds_of(plain), seconds_of(grouped)
        # a library has exceptions of its own
        except Exception as failure:
            told = f"; torch has no grouped product here: {error_text(failure)}"
            break
        told = f" ({ours_s * 1e3:.2f} ms for {num_tokens} tokens, grouped {theirs_s * 1e3:.2f} ms)"
        if theirs_s > (1 - LEAST_GAIN) * ours_s:
            break
        min_rows = num_tokens * spec.moe.top_k
    if min_rows is None:
        _logger.info("experts are computed by kernels%s", told)
        return ops
    _logger.info(
        "experts are computed by torch's grouped product from %d tokens on%s",
        min_rows // spec.moe.top_k,
        told,
    )
    return replace(ops, moe_ffn=partial(ops.moe_ffn, min_grouped_rows=min_rows))
