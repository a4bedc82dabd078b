"""What a coordinator tells the engines of a group that shares feed-forward weights."""

from dataclasses import dataclass
from typing import Literal

from raybatch.records.team import TeamCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareCall:
    """What one rank is told of its group.

    Args:
        meeting: where the ranks find each other while they load; its rank and size are the group's.
        by: what is owned at once, a layer's block or a tile of one.
    """

    meeting: TeamCall
    by: Literal["layer", "tile"] = "layer"
