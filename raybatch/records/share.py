"""Units of feed-forward weights, and records of a group of engines that share them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Unit:
    """What is shared, or copied in, at a time: a layer's feed-forward block, or one shard of it."""

    layer: int
    shard: int = 0


@dataclass(frozen=True, slots=True)
class ShareRank:
    """Rank of an engine, from 0, in its weight-sharing group of `size` engines."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class ShareLink:
    """Connection of an engine to its weight-sharing group while it loads.

    Args:
        exchange: all-gathers a text: returns the texts of all ranks, in order. It raises RankError
            if a rank has ended.
    """

    share_rank: ShareRank
    exchange: Callable[[str], list[str]]
