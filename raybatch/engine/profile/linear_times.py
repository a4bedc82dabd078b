"""Which dense linears torch computes faster than the compiled ops of this host: timed, and kept.

The compiled form reads panels and torch a plain matrix, so the choice is made before weights are
laid out, for each shape by itself.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter

import torch

from raybatch.engine.profile.host_times import kept_times
from raybatch.kernels import linear as reference
from raybatch.kernels.linear import Linear
from raybatch.kernels.native.compiler import random_tensors
from raybatch.kernels.native.linears import PANEL_WIDTH, CompiledLinears

# [out, in]
Shape = tuple[int, int]

# from a lone decoding row to a chunk of a prompt; more take as long per row
_ROWS = (1, 8, 64, 256)
# time grows with outputs and inputs, so that a part of a large linear tells
_MAX_OUTPUTS, _MAX_INPUTS = 512, 4096
# smaller ones take microseconds, most of them for the call
_MIN_WEIGHTS = 1 << 16
_NUM_REPEATS = 5

_logger = logging.getLogger(__name__)


def shapes_for_torch(
    shapes: Iterable[Shape],
    ops: CompiledLinears,
    *,
    folder: Path | None = None,
    measure: Callable[[Shape, CompiledLinears], tuple[float, ...]] | None = None,
) -> tuple[Shape, ...]:
    """Return those shapes that torch computes in less time, in the mean over numbers of rows.

    A shape is timed once per host, in less than a tenth of a second for most; small ones are not.
    `folder` of None is one below the cache folder, and `measure` returns compiled time over torch's
    for each number of rows.
    """
    shapes = sorted({shape for shape in shapes if shape[0] * shape[1] >= _MIN_WEIGHTS})
    named = {_name(shape): shape for shape in shapes}
    known = kept_times(
        named, lambda name: (measure or _ratios)(named[name], ops), kind="linear", folder=folder
    )
    slower = tuple(s for s in shapes if _mean(known[_name(s)]) > 1)
    if slower:
        _logger.info("torch computes linears of these shapes, as it is faster here: %s", slower)
    return slower


def _name(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


def _mean(ratios: tuple[float, ...]) -> float:
    return sum(ratios) / len(ratios)


def _ratios(shape: Shape, ops: CompiledLinears) -> tuple[float, ...]:
    """Return the time of the compiled form over that of torch, for each number of rows."""
    made, num_inputs = random_tensors(), min(shape[1], _MAX_INPUTS)
    num_panels = min(-(-shape[0] // PANEL_WIDTH), _MAX_OUTPUTS // PANEL_WIDTH)
    weight = made(num_panels * PANEL_WIDTH, num_inputs)
    plain = Linear(weight, len(weight))
    panels = Linear(weight.view(num_panels, PANEL_WIDTH, num_inputs).mT.contiguous(), len(weight))
    ratios = []
    for num_rows in _ROWS:
        x = made(num_rows, num_inputs)
        compiled = torchs = float("inf")
        # in turns, so that a change of clock meets both
        for _ in range(_NUM_REPEATS):
            compiled = min(compiled, _seconds(ops.linear, x, panels))
            torchs = min(torchs, _seconds(reference.linear, x, plain))
        ratios.append(compiled / torchs)
    return tuple(ratios)


def _seconds(
    op: Callable[[torch.Tensor, Linear], torch.Tensor], x: torch.Tensor, layer: Linear
) -> float:
    start = perf_counter()
    op(x, layer)
    return perf_counter() - start
