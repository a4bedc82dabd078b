"""Cuts linears by outputs or by inputs, keeping the memory layout.

A cut by inputs computes a partial sum of every output. 8-bit weights are cut the same way: scales
are per output, and every part keeps them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from raybatch.engine.weights.layout import FfnShard
from raybatch.kernels.linear import Linear

# cuts at multiples of these keep vector loads and torch's grouped products aligned
UNITS = (16, 4, 1)


def cut(total: int, rank: int, size: int, unit: int = 1) -> slice:
    """Return the range of `rank`, one of `size`, in `total`; ranges are cut at multiples of `unit`.

    Ranges differ by one unit at most, and the first is the largest, except for a partial last
    unit. With fewer units than ranks, cuts are anywhere.

    Example:
        >>> [cut(80, rank, 2, unit=32) for rank in range(2)]
        [slice(0, 64, None), slice(64, 80, None)]
    """
    unit = next(u for u in (unit, *UNITS) if u <= unit and (total // u >= size or u == 1))
    num_units = -(-total // unit)
    each, more = divmod(num_units, size)
    start = rank * each + min(rank, more)
    stop = start + each + (rank < more)
    return slice(start * unit, min(stop * unit, total))


def dense_part(shard: FfnShard, number: int, count: int) -> FfnShard:
    """Return part `number` of a dense block that is cut into `count` parts along F.

    The outputs of the parts sum to that of the block.
    """
    assert shard.gate_up is not None, "a dense shard has linears"
    assert shard.down is not None, "a dense shard has linears"
    ffn_dim = shard.gate_up.num_outputs // 2
    width = shard.gate_up.weight.shape[2] if shard.gate_up.is_panelled else UNITS[0]
    part = cut(ffn_dim, number, count, width)
    return FfnShard(
        gate_up=outputs_of(shard.gate_up, [part, behind(part, ffn_dim)]),
        down=inputs_of(shard.down, part, has_bias=number == 0),
    )


def behind(part: slice, count: int) -> slice:
    """Return a slice shifted by `count`."""
    return slice(part.start + count, part.stop + count)


def outputs_of(layer: Linear, ranges: Sequence[slice]) -> Linear:
    """Return `layer` with only the outputs in `ranges`, concatenated."""
    if len(ranges) == 1 and layer.can_start_at(ranges[0].start):
        return layer.take(ranges[0])
    weight = take_outputs(layer.weight, ranges, is_panelled=layer.is_panelled)
    pick = partial(_picked, ranges=ranges)
    num_outputs = sum(outputs.stop - outputs.start for outputs in ranges)
    return Linear(weight, num_outputs, pick(layer.bias), pick(layer.scales))


def _picked(values: torch.Tensor | None, ranges: Sequence[slice]) -> torch.Tensor | None:
    return None if values is None else torch.cat([values[outputs] for outputs in ranges])


def inputs_of(layer: Linear, part: slice, *, has_bias: bool) -> Linear:
    """Return `layer` with only the inputs in `part`; its bias is dropped without `has_bias`.

    The outputs of all parts are summed, so only one of them may have the bias.
    """
    weight = take_inputs(layer.weight, part, is_panelled=layer.is_panelled)
    return replace(layer, weight=weight, bias=layer.bias if has_bias else None)


def take_outputs(
    weight: torch.Tensor, ranges: Sequence[slice], *, is_panelled: bool
) -> torch.Tensor:
    """Return the outputs in `ranges` of a weight, concatenated.

    They have the layout of the weight, but are in rows if a range would cut a panel.
    """
    if is_panelled:
        width = weight.shape[-1]
        if not any(x.start % width or x.stop % width for x in ranges):
            panels = [slice(x.start // width, x.stop // width) for x in ranges]
            return torch.cat([weight[..., x, :, :] for x in panels], dim=-3)
        weight = as_rows(weight)
    if weight.stride(-1) == 1:
        return torch.cat([weight[..., x, :] for x in ranges], dim=-2)
    # keep the [in, out] memory order, which decides the speed
    return torch.cat([weight.mT[..., x] for x in ranges], dim=-1).mT


def take_inputs(weight: torch.Tensor, part: slice, *, is_panelled: bool) -> torch.Tensor:
    if is_panelled:
        return weight[..., part, :].contiguous()
    if weight.stride(-1) == 1:
        return weight[..., part].contiguous()
    return weight.mT[..., part, :].contiguous().mT


def as_rows(panels: torch.Tensor) -> torch.Tensor:
    """Convert panels [..., N, in, P] to rows [..., N * P, in]."""
    return panels.mT.flatten(-3, -2)
