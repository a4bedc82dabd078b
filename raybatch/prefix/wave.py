"""How many groups may be live at once, so that their prefixes and members fit the KV cache."""

from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.prefix.load import GroupLoad, Ints

__all__ = ["Waves", "kv_tokens_of_groups", "plan_waves"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waves:
    """Which groups fit the cache together, for every place in the order.

    Args:
        end: int64 [G], place after the last group that fits together with all from this place
            on; at least one after it, also where a group does not fit alone.
        num_members: int64 [G] by group id, members that fit beside the prefix while no other group
            is live; 0 where not even one does.
        num_live: groups that may be live anywhere in the order, at least 1.
    """

    end: Ints
    num_members: Ints
    num_live: int


def kv_tokens_of_groups(load: GroupLoad, block_size: int = 1) -> Ints:
    """Return the cache that each group fills when all its members are about to end.

    The prefix is held once. Every member rounds up to blocks, counted as equal to the others.

    Args:
        load: token counts; without outputs, prompts alone are counted.
        block_size: tokens of a KV block.
    """
    return _in_blocks(load.prefix_tokens, block_size) + load.num_rows * _per_member(
        load, block_size
    )


def plan_waves(load: GroupLoad, order: Ints, *, kv_tokens: int, block_size: int = 1) -> Waves:
    """Find, for every place in the order, the groups that may be live together.

    While no more than these are live, no live prefix is ever evicted. O(G log G).

    Args:
        load: token counts of the groups, with expected outputs.
        order: int64 [G], permutation of the groups.
        kv_tokens: size of the cache.
        block_size: tokens of a KV block.

    Raises:
        ConfigError: a size is not above 0.
    """
    if kv_tokens < 1 or block_size < 1:
        raise ConfigError(f"kv_tokens={kv_tokens}, block_size={block_size}: both are at least 1")
    sums = np.concatenate([[0], np.cumsum(kv_tokens_of_groups(load, block_size)[order])])
    places = np.arange(len(order))
    end = np.maximum(np.searchsorted(sums, sums[:-1] + kv_tokens, side="right") - 1, places + 1)
    # places from which everything left fits say nothing about the limit
    lengths = (end - places)[end < len(order)]
    room = np.maximum(kv_tokens - _in_blocks(load.prefix_tokens, block_size), 0)
    return Waves(
        end=end,
        num_members=np.minimum(room // _per_member(load, block_size), load.num_rows),
        num_live=int(lengths.min()) if len(lengths) else max(len(order), 1),
    )


def _per_member(load: GroupLoad, block_size: int) -> Ints:
    outputs = 0.0 if load.output_tokens is None else load.output_tokens
    tokens = np.ceil((load.distinct_tokens + outputs) / load.num_rows).astype(np.int64)
    return _in_blocks(np.maximum(tokens, 1), block_size)


def _in_blocks(tokens: Ints, block_size: int) -> Ints:
    return -(-tokens // block_size) * block_size
