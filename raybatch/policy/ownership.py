"""Who owns which feed-forward weights in a group, and in which order a rank uses and fetches them.

```
by layer, 3 ranks       layer 0   1   2   3   4      rank 1 fetches, shifted: 2 0 | 3 5 | ..
owner                         0   1   2   0   1      in order:                0 2 | 3 5 | ..

by tile, 3 ranks        tile  0   1   2              rank 1 multiplies and fetches in
owner in layer 0              0   1   2              layer 0: tiles 1 2 0, in layer 1: 0 1 2,
owner in layer 1              1   2   0              its own one first, which is not fetched
```

Every unit, a layer or a tile of one, has one owner (SiDP, section 4.1). Shifted,
ranks that are in step read from different owners (section 4.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec

ShareBy = Literal["layer", "tile"]
Order = Literal["shifted", "in_order"]


def usual_way(num_tiles: int, size: int, *, shares_tiles: bool = True) -> ShareBy:
    """Return what a group owns at once: tiles where slots take fewer bytes, and there are so many.

    Two ranks have slots for two layers either way, and whole layers are fewer pieces.

    Args:
        num_tiles: that each block can be cut into, see `most_tiles`.
        shares_tiles: whether engines of the backend know tiles.
    """
    can_be = shares_tiles and why_not_tiled(num_tiles, size) is None
    return "tile" if size > 2 and can_be else "layer"


def most_tiles(spec: ModelSpec) -> int:
    """Return how many tiles each block of a model can be cut into: parts of F, or experts."""
    is_sparse = [spec.is_sparse(layer) for layer in range(spec.num_layers)]
    most = [] if all(is_sparse) else [spec.ffn_dim]
    if spec.moe is not None and any(is_sparse):
        most.append(spec.moe.num_experts)
    return min(most)


def why_not_tiled(most: int, count: int) -> str | None:
    """Return why blocks of `most` tiles cannot be cut into so many; None where they can."""
    if count <= most:
        return None
    return f"feed-forward blocks can be cut into {most} tiles at most, not into {count}"


@dataclass(frozen=True, order=True, slots=True)
class Unit:
    """What is owned, fetched and multiplied at once: a layer's feed-forward block, or a tile."""

    layer: int
    tile: int = 0


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """How a group of `size` ranks shares the feed-forward blocks of `num_layers` layers.

    By layer, a block is one unit, owned by rank `layer % size`. By tile, it is cut into `size`
    tiles; tile `t` of layer `l` is owned by rank `(l + t) % size`.

    Raises ConfigError: a group of fewer than two ranks, or a model without layers.
    """

    size: int
    num_layers: int
    by: ShareBy = "layer"
    order: Order = "shifted"

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(f"pool.share_group is {self.size}; a group has at least 2 replicas")
        if self.num_layers < 1:
            raise ConfigError(f"a model has {self.num_layers} layers; it must have at least 1")

    @property
    def num_tiles(self) -> int:
        """Return the tiles of a layer."""
        return self.size if self.by == "tile" else 1

    def owner(self, unit: Unit) -> int:
        return (unit.layer + unit.tile) % self.size

    def units(self) -> Iterator[Unit]:
        for layer in range(self.num_layers):
            yield from (Unit(layer, tile) for tile in range(self.num_tiles))

    def owned_by(self, rank: int) -> list[Unit]:
        return [unit for unit in self.units() if self.owner(unit) == rank]

    def tiles_of(self, layer: int, rank: int) -> list[int]:
        """Return the tiles of a layer in the order in which a rank multiplies them."""
        if self.order == "in_order":
            return list(range(self.num_tiles))
        return [(rank + i - layer) % self.num_tiles for i in range(self.num_tiles)]

    def uses(self, rank: int) -> list[Unit]:
        """Return the units of a pass in the order in which a rank multiplies them."""
        layers = range(self.num_layers)
        return [Unit(layer, tile) for layer in layers for tile in self.tiles_of(layer, rank)]

    def fetches(self, rank: int) -> list[Unit]:
        """Return the units of others in the order in which a rank fetches them in a pass."""
        if self.by == "tile" or self.order == "in_order":
            wanted = self.uses(rank)
        else:
            cycles = range(0, self.num_layers, self.size)
            shifts = [(rank + i) % self.size for i in range(self.size)]
            wanted = [Unit(c + s) for c in cycles for s in shifts if c + s < self.num_layers]
        return [unit for unit in wanted if self.owner(unit) != rank]

    @cached_property
    def least_slots(self) -> int:
        """Return the slots that every rank needs to end a pass: with fewer, one waits for ever."""
        return max(least_slots(self.fetches(rank), self.uses(rank)) for rank in range(self.size))

    @property
    def default_slots(self) -> int:
        """Return the slots that hide copies: a cycle of layers, or the tiles of two layers."""
        return self.size if self.by == "layer" else 2 * self.size

    def check_slots(self, num_slots: int) -> None:
        """Raise ConfigError where there are fewer slots than the order of fetches needs."""
        if num_slots < self.least_slots:
            raise ConfigError(
                f"engine.weight_buffers is {num_slots}, but a group of {self.size} replicas that "
                f"shares weights by {self.by} needs {self.least_slots} at least: a rank that has "
                f"filled its buffers with later {self.by}s would wait for ever; raise it to "
                f"{self.least_slots} or more ({self.default_slots} is the default)"
            )


def least_slots(fetches: list[Unit], uses: list[Unit]) -> int:
    """Return the slots with which all fetches of a pass can be made in order, 1 at least.

    A slot is taken when a fetch begins and free once its unit was used; a fetch waits for a slot,
    a use for its fetch.
    """
    place = {unit: number for number, unit in enumerate(fetches)}
    used, least = 0, 1
    for unit in uses:
        if unit in place:
            least = max(least, place[unit] + 1 - used)
            used += 1
    return least
