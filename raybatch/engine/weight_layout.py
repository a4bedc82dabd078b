"""How the linears of a model lie in memory on a CPU, where that decides their speed.

A prepared tensor carries its layout at the end of its name. All shapes are those that the decoder
sees, [..., out, in], but for panels.
"""

from collections.abc import Callable

import torch

# Linears with at most so many outputs lie in memory as [in, out], which float32 products on a CPU
# read up to 1.4 times as fast at 16 to 128 rows; wider ones are faster as [out, in].
_MAX_OUTPUTS_ACROSS = 2048
_LINEARS = frozenset(("qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down"))
_ACROSS = ".across"

# Experts with a large gate_up have it in panels, [in, P] matrices of P outputs each: products of
# few rows with it read memory in order, which is up to twice as fast. Small ones stay in the
# processor's cache from one step to the next.
_PANELLED = "experts_gate_up"
_MIN_PANELLED_BYTES = 512 << 10
_PANEL_WIDTHS = (48, 32)
_PANELS = ".panels"

# a shape and the function that builds the tensor
Recipe = tuple[tuple[int, ...], Callable[[], torch.Tensor]]


def lay_out(name: str, recipe: Recipe, dtype: torch.dtype) -> tuple[str, Recipe]:
    """Return the name and recipe under which a tensor is prepared for a CPU.

    Args:
        name: of the tensor; in a layer "<index>.<field of LayerWeights>".
        recipe: of the tensor in the shape [..., out, in].
        dtype: that it will have.
    """
    shape, build = recipe
    field = name.rpartition(".")[2]
    if field == _PANELLED and dtype == torch.float32:
        width = _panel_width(shape)
        if width is not None:
            return name + _PANELS, _in_panels(recipe, width)
    if field in _LINEARS and shape[-2] <= _MAX_OUTPUTS_ACROSS:
        across = (*shape[:-2], shape[-1], shape[-2])
        return name + _ACROSS, (across, lambda: build().mT.contiguous())
    return name, recipe


def view_of(prepared_name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the plain name of a prepared tensor, and the view of it that the decoder uses."""
    if prepared_name.endswith(_ACROSS):
        return prepared_name.removesuffix(_ACROSS), tensor.mT
    return prepared_name.removesuffix(_PANELS), tensor


def _panel_width(shape: tuple[int, ...]) -> int | None:
    """Return the width of the panels of a float32 [E, 2F, M]; None where it is better without."""
    _, two_ffn, model_dim = shape
    if two_ffn * model_dim * torch.float32.itemsize < _MIN_PANELLED_BYTES:
        return None
    # gate and up each take whole panels
    return next((width for width in _PANEL_WIDTHS if (two_ffn // 2) % width == 0), None)


def _in_panels(recipe: Recipe, width: int) -> Recipe:
    (num_experts, num_outputs, num_inputs), build = recipe
    num_panels = num_outputs // width

    def build_panels() -> torch.Tensor:
        rows = build().view(num_experts, num_panels, width, num_inputs)
        return rows.transpose(2, 3).contiguous()

    return (num_experts, num_panels, num_inputs, width), build_panels
