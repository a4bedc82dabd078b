"""What the engines of a group that shares feed-forward weights are told of it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShareSeat:
    """The place of an engine in its group of `size`, from 0 on."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class ShareLink:
    """How an engine reaches the others of its group while it loads.

    Args:
        exchange: leaves a text and returns those of all ranks, in order, once they are there. It
            raises TeamError where one of them has ended.
    """

    seat: ShareSeat
    exchange: Callable[[str], list[str]]
