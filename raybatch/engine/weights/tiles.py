"""Feed-forward blocks as tiles, of which each has one owner in a group of replicas."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from raybatch.engine.weights.cutting import dense_part
from raybatch.engine.weights.layout import map_tensors, tensors_of
from raybatch.engine.weights.records import FfnTile, LayerWeights, ModelWeights
from raybatch.policy.ownership import Unit


def tile_of(block: FfnTile, number: int, count: int) -> FfnTile:
    """Return a tile of a whole block: a part of F of a dense one, every `count`-th expert.

    It is a copy, unless it is all of the block.
    """
    if count == 1:
        return block
    if block.experts_gate_up is None:
        return dense_part(block, number, count)
    experts = slice(number, None, count)
    return replace(map_tensors(block, lambda x: x[experts].clone()), experts=experts)


def tiles_of(block: FfnTile, count: int) -> tuple[FfnTile, ...]:
    return tuple(tile_of(block, number, count) for number in range(count))


def with_tiles(weights: ModelWeights, tiles: Mapping[Unit, FfnTile]) -> ModelWeights:
    """Return a model with these tiles in the place of those that it has."""
    of_layers: dict[int, list[FfnTile]] = {}
    for unit in sorted(tiles):
        of_layers.setdefault(unit.layer, []).append(tiles[unit])
    layers = (
        replace(layer, ffn=replace(layer.ffn, tiles=tuple(of_layers[i])))
        for i, layer in enumerate(weights.layers)
    )
    return replace(weights, layers=tuple(layers))


def without_tiles(weights: ModelWeights) -> ModelWeights:
    """Return a model with placeholders for its tiles."""
    tiles = {
        Unit(layer, number): placeholder(tile)
        for layer, of_layer in enumerate(weights.layers)
        for number, tile in enumerate(of_layer.ffn.tiles)
    }
    return with_tiles(weights, tiles)


def with_tiles_here(layer: LayerWeights) -> LayerWeights:
    """Return a layer with those of its tiles alone that have data; maybe with none."""
    tiles = layer.ffn.tiles
    here = tuple(tile for tile in tiles if not any(x.is_meta for x in tensors_of(tile)))
    return replace(layer, ffn=replace(layer.ffn, tiles=here))


def placeholder(tile: FfnTile) -> FfnTile:
    """Return a tile of the same form without data; whatever reads it raises."""
    return map_tensors(tile, lambda tensor: torch.empty_like(tensor, device="meta"))
