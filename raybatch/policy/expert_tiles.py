"""Experts as the tiles of a layer that a group shares: who owns them, and where rows travel to.

Expert `e` of layer `l` is owned by rank `(l + e) % size`, so tile `t` of a layer has the experts
`t, t + size, t + 2 * size, ...` of it, and `Ownership` by tile holds as it is. Where weights travel
a layer's experts are all copied; where rows do, each goes to the owners of those that it chose.
"""

from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.ownership import Ownership, Unit
from raybatch.records.arrays import Ints


def experts_of(tile: int, num_tiles: int, num_experts: int) -> range:
    """Return the experts in one of so many tiles of a layer.

    Raises ConfigError: there are more tiles than experts, so that some would be empty.
    """
    if num_experts < num_tiles:
        raise ConfigError(
            f"{num_experts} experts of a layer cannot be shared by {num_tiles} ranks; at most "
            f"{num_experts} can share them"
        )
    return range(tile, num_experts, num_tiles)


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows of one rank that go to others at one layer.

    Args:
        by_owner: rows that go to each rank, once each however many of its experts they chose; none
            go to the rank itself.
        products: rows times experts that each rank multiplies of them.
    """

    by_owner: tuple[int, ...]
    products: tuple[int, ...]


def sent_rows(ownership: Ownership, layer: int, rank: int, chosen: Ints) -> SentRows:
    """Return which rows of a rank go to whom, by the experts that they chose.

    Args:
        chosen: experts of each row, int64 [T, K], read only.

    Raises ConfigError: the ownership is by layer.
    """
    if ownership.by != "tile":
        raise ConfigError("experts are tiles of a layer, so a group shares them by tile")
    size = ownership.size
    by_owner, products = [0] * size, [0] * size
    tiles = chosen % size
    for tile in range(size):
        owner = ownership.owner(Unit(layer, tile))
        is_here = tiles == tile
        products[owner] += int(np.count_nonzero(is_here))
        if owner != rank:
            by_owner[owner] += int(np.count_nonzero(is_here.any(axis=1)))
    return SentRows(by_owner=tuple(by_owner), products=tuple(products))
