"""The tensors of any record of weights: walked, packed into a buffer, and found there."""

from dataclasses import dataclass

import torch

from raybatch.engine.weights.layout import map_tensors, packed_bytes, packed_into, tensors_of


@dataclass(frozen=True)
class Linear:
    weight: torch.Tensor
    scale: torch.Tensor | None
    width: int = 7


@dataclass(frozen=True, slots=True)
class Layer:
    norm: torch.Tensor
    linears: dict[str, Linear]
    parts: tuple[torch.Tensor, ...]
    name: str = "layer"


def make_layer():
    torch.manual_seed(0)
    across = torch.randn(5, 3).mT
    return Layer(
        norm=torch.randn(9),
        linears={
            "up": Linear(weight=across, scale=None),
            "down": Linear(weight=torch.arange(6, dtype=torch.int8), scale=torch.randn(1)),
        },
        parts=(torch.randn(2, 2, 3)[:, :, 1], torch.randn(2, 2, 4).bfloat16()),
    )


def test_all_tensors_are_found_in_the_order_of_the_fields():
    layer = make_layer()
    shapes = [tuple(tensor.shape) for tensor in tensors_of(layer)]
    assert [(9,), (3, 5), (6,), (1,), (2, 2), (2, 2, 4)] == shapes


def test_what_is_no_tensor_stays():
    doubled = map_tensors(make_layer(), lambda tensor: tensor * 2)
    assert ("layer", 7, None) == (
        doubled.name,
        doubled.linears["up"].width,
        doubled.linears["up"].scale,
    )
    assert torch.equal(doubled.norm, make_layer().norm * 2)


def test_a_packed_record_has_the_values_and_the_layout_of_the_first():
    layer = make_layer()
    buffer = torch.full((packed_bytes(layer),), 255, dtype=torch.uint8)
    packed = packed_into(layer, buffer)
    for source, target in zip(tensors_of(layer), tensors_of(packed), strict=True):
        target.copy_(source)
    for source, target in zip(tensors_of(layer), tensors_of(packed), strict=True):
        assert torch.equal(source, target)
        assert (source.dtype, source.shape) == (target.dtype, target.shape)
        assert target.data_ptr() % 64 == buffer.data_ptr() % 64
    assert packed.linears["up"].weight.mT.is_contiguous()
    # a view with holes is packed without them
    assert packed.parts[0].is_contiguous()
