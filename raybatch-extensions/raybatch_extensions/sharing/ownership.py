"""Ownership of feed-forward weights in a group, and the orders of use and fetch per rank.

```
by layer, 3 ranks       layer 0   1   2   3   4      rank 1 fetches, shifted: 2 0 | 3 5 | ..
owner                         0   1   2   0   1      in order:                0 2 | 3 5 | ..

by shard, 3 ranks       shard 0   1   2              rank 1 uses and fetches in layer 0:
owner in layer 0              0   1   2              shards 1 2 0, in layer 1: 0 1 2; its own
owner in layer 1              1   2   0              shard comes first and is not fetched
```

Every unit, a layer or a shard of one, has one owner (SiDP, section 4.1). In shifted order, ranks
in lockstep read from different owners (section 4.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec
from raybatch.records.share import Unit

ShareBy = Literal["layer", "shard"]
Order = Literal["shifted", "in_order"]


def default_share_by(num_shards: int, size: int, *, shares_shards: bool = True) -> ShareBy:
    """Return what ranks own: shards if slots then need fewer bytes and blocks can be cut.

    With two ranks, layers and shards both need slots for two layers; layers are fewer pieces.

    Args:
        num_shards: most shards of a block, see `max_shards`.
        shares_shards: whether engines of the backend support shards.
    """
    can_be = shares_shards and why_not_sharded(num_shards, size) is None
    return "shard" if size > 2 and can_be else "layer"


def max_shards(spec: ModelSpec) -> int:
    """Return the most shards of a model's feed-forward block: its width, or its experts."""
    is_sparse = [spec.is_sparse(layer) for layer in range(spec.num_layers)]
    most = [] if all(is_sparse) else [spec.ffn_dim]
    if spec.moe is not None and any(is_sparse):
        most.append(spec.moe.num_experts)
    return min(most)


def why_not_sharded(most: int, count: int) -> str | None:
    """Return why blocks of at most `most` shards cannot be cut into `count`; None if they can."""
    if count <= most:
        return None
    return f"feed-forward blocks can be cut into at most {most} shards, not into {count}"


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Assigns the feed-forward blocks of `num_layers` layers to `size` ranks.

    By layer, a block is one unit, owned by rank `layer % size`. By shard, it is cut into `size`
    shards; shard `t` of layer `l` is owned by rank `(l + t) % size`.

    Raises ConfigError: fewer than two ranks, or no layers.
    """

    size: int
    num_layers: int
    by: ShareBy = "layer"
    order: Order = "shifted"

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(f"pool.share_group must be at least 2, got {self.size}")
        if self.num_layers < 1:
            raise ConfigError(f"num_layers must be at least 1, got {self.num_layers}")

    @property
    def num_shards(self) -> int:
        """Return the number of shards of a layer."""
        return self.size if self.by == "shard" else 1

    def owner(self, unit: Unit) -> int:
        return (unit.layer + unit.shard) % self.size

    def units(self) -> Iterator[Unit]:
        for layer in range(self.num_layers):
            yield from (Unit(layer, shard) for shard in range(self.num_shards))

    def owned_by(self, rank: int) -> list[Unit]:
        return [unit for unit in self.units() if self.owner(unit) == rank]

    def shards_of(self, layer: int, rank: int) -> list[int]:
        """Return the shards of a layer in the order in which a rank uses them."""
        if self.order == "in_order":
            return list(range(self.num_shards))
        return [(rank + i - layer) % self.num_shards for i in range(self.num_shards)]

    def uses(self, rank: int) -> list[Unit]:
        """Return the units of a pass in the order in which a rank uses them."""
        layers = range(self.num_layers)
        return [Unit(layer, shard) for layer in layers for shard in self.shards_of(layer, rank)]

    def fetches(self, rank: int) -> list[Unit]:
        """Return the units that a rank fetches from its peers in a pass, in order."""
        if self.by == "shard" or self.order == "in_order":
            wanted = self.uses(rank)
        else:
            cycles = range(0, self.num_layers, self.size)
            shifts = [(rank + i) % self.size for i in range(self.size)]
            wanted = [Unit(c + s) for c in cycles for s in shifts if c + s < self.num_layers]
        return [unit for unit in wanted if self.owner(unit) != rank]

    @cached_property
    def least_slots(self) -> int:
        """Return how many slots (buffers of fetched units) a rank needs, or a pass deadlocks."""
        return max(least_slots(self.fetches(rank), self.uses(rank)) for rank in range(self.size))

    @property
    def default_slots(self) -> int:
        """Return how many slots hide the fetch: a cycle of layers, or the shards of two layers."""
        return self.size if self.by == "layer" else 2 * self.size

    def check_slots(self, num_slots: int) -> None:
        """Raise ConfigError if there are fewer slots than the fetch order needs."""
        if num_slots < self.least_slots:
            raise ConfigError(
                f"engine.weight_buffers is {num_slots}, but a group of {self.size} replicas that "
                f"shares weights by {self.by} needs at least {self.least_slots}, or a rank whose "
                f"buffers hold later {self.by}s deadlocks; raise it to {self.least_slots} or more "
                f"({self.default_slots} is the default)"
            )


def least_slots(fetches: list[Unit], uses: list[Unit]) -> int:
    """Return how many slots a rank needs to fetch the units of a pass in order, at least 1.

    A slot is occupied from the start of a fetch to the end of its use; a fetch waits for a slot, a
    use for its fetch.
    """
    place = {unit: number for number, unit in enumerate(fetches)}
    used, least = 0, 1
    for unit in uses:
        if unit in place:
            least = max(least, place[unit] + 1 - used)
            used += 1
    return least
