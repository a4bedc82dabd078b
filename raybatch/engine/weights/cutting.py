"""Parts of linears: some outputs or some inputs, in the form in which the whole lies in memory.

A part of the inputs makes a part of the sum of every output. Weights of 8 bits are cut like others:
a scale belongs to an output, whose parts all have it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from raybatch.engine.weights.records import FfnTile
from raybatch.kernels.linear import Linear

# borders at multiples of these keep vector loads and torch's grouped products whole
UNITS = (16, 4, 1)


def cut(total: int, rank: int, size: int, unit: int = 1) -> slice:
    """Return the part of a rank of `total`, with borders at multiples of `unit`.

    The parts differ by a unit at most, and the first is the largest, but where the last unit is
    not whole. Where there are fewer units than ranks, borders are anywhere.

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


def dense_part(tile: FfnTile, number: int, count: int) -> FfnTile:
    """Return one of `count` parts of a dense block, cut along F; the sum of all is the block."""
    assert tile.gate_up is not None, "a dense tile has linears"
    assert tile.down is not None, "a dense tile has linears"
    ffn_dim = tile.gate_up.num_outputs // 2
    width = tile.gate_up.weight.shape[2] if tile.gate_up.is_panelled else UNITS[0]
    part = cut(ffn_dim, number, count, width)
    return FfnTile(
        gate_up=outputs_of(tile.gate_up, [part, behind(part, ffn_dim)]),
        down=inputs_of(tile.down, part, has_bias=number == 0),
    )


def behind(part: slice, count: int) -> slice:
    """Return a slice of as many, `count` further on."""
    return slice(part.start + count, part.stop + count)


def outputs_of(layer: Linear, ranges: Sequence[slice]) -> Linear:
    """Return the linear that makes these outputs alone, one range behind the other."""
    if len(ranges) == 1 and layer.can_start_at(ranges[0].start):
        return layer.take(ranges[0])
    weight = take_outputs(layer.weight, ranges, is_panelled=layer.is_panelled)
    pick = partial(_picked, ranges=ranges)
    num_outputs = sum(outputs.stop - outputs.start for outputs in ranges)
    return Linear(weight, num_outputs, pick(layer.bias), pick(layer.scales))


def _picked(values: torch.Tensor | None, ranges: Sequence[slice]) -> torch.Tensor | None:
    return None if values is None else torch.cat([values[outputs] for outputs in ranges])


def inputs_of(layer: Linear, part: slice, *, has_bias: bool) -> Linear:
    """Return the linear that multiplies these inputs alone; one of the ranks adds the bias."""
    weight = take_inputs(layer.weight, part, is_panelled=layer.is_panelled)
    return replace(layer, weight=weight, bias=layer.bias if has_bias else None)


def take_outputs(
    weight: torch.Tensor, ranges: Sequence[slice], *, is_panelled: bool
) -> torch.Tensor:
    """Return outputs in the form of the weight; in rows where panels would be cut."""
    if is_panelled:
        width = weight.shape[-1]
        if not any(x.start % width or x.stop % width for x in ranges):
            panels = [slice(x.start // width, x.stop // width) for x in ranges]
            return torch.cat([weight[..., x, :, :] for x in panels], dim=-3)
        weight = as_rows(weight)
    if weight.stride(-1) == 1:
        return torch.cat([weight[..., x, :] for x in ranges], dim=-2)
    # it lies as [in, out], which decides its speed
    return torch.cat([weight.mT[..., x] for x in ranges], dim=-1).mT


def take_inputs(weight: torch.Tensor, part: slice, *, is_panelled: bool) -> torch.Tensor:
    if is_panelled:
        return weight[..., part, :].contiguous()
    if weight.stride(-1) == 1:
        return weight[..., part].contiguous()
    return weight.mT[..., part, :].contiguous().mT


def as_rows(panels: torch.Tensor) -> torch.Tensor:
    """Return panels [..., N, in, P] as rows [..., N * P, in]."""
    return panels.mT.flatten(-3, -2)
