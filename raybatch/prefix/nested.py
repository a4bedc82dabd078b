"""Prompts that come grouped already, as `[[prefix], [context, ..]]` per group, and the way back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.prefix.block_keys import BlockKeys, Int64s, start_offsets
from raybatch.prefix.groups import PrefixGroups, collect_groups
from raybatch.types import TokenIds

__all__ = ["NestedGroup", "NestedRows", "flatten_nested", "nest_rows", "nested_groups"]

# the tokens that a group shares, and what each of its rows adds
NestedGroup = tuple[Sequence[int], Sequence[Sequence[int]]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NestedRows:
    """The prompts of a nested input, numbered group by group.

    Args:
        token_ids: the prompts one after another, each with its prefix.
        offsets: the tokens of row r are `token_ids[offsets[r]:offsets[r + 1]]`.
        group_of_row: position of each row's group in the input.
        prefix_len: tokens of each group's prefix, as given.
    """

    token_ids: TokenIds  # [T]
    offsets: Int64s  # [R + 1]
    group_of_row: Int64s  # [R]
    prefix_len: Int64s  # [groups]


def flatten_nested(nested: Sequence[NestedGroup]) -> NestedRows:
    """Return the prompts of a nested input; a context may be empty.

    Raises:
        ConfigError: a group is not a pair of a prefix and a list of contexts.
    """
    prompts: list[TokenIds] = []
    sizes = []
    for number, group in enumerate(nested):
        if len(group) != 2:
            raise ConfigError(
                f"group {number} has {len(group)} parts; a group is [[prefix], [context, ..]]"
            )
        prefix, contexts = group
        sizes.append(len(contexts))
        for context in contexts:
            prompts += [np.asarray(prefix, np.int32), np.asarray(context, np.int32)]
    lengths = [len(part) for part in prompts]
    return NestedRows(
        token_ids=np.concatenate([np.zeros(0, np.int32), *prompts]),
        offsets=start_offsets(np.array(lengths, np.int64).reshape(-1, 2).sum(axis=1)),
        group_of_row=np.repeat(np.arange(len(sizes)), sizes),
        prefix_len=np.array([len(group[0]) for group in nested], np.int64),
    )


def nested_groups(rows: NestedRows, keys: BlockKeys, *, dedup: bool) -> PrefixGroups:
    """Return the groups as they were given; of each prefix only whole blocks can be shared.

    Args:
        rows: the prompts.
        keys: their hashes, in the same order.
        dedup: generate identical rows once.
    """
    shared = rows.prefix_len // keys.block_size * keys.block_size
    return collect_groups(rows.group_of_row, shared, keys, dedup=dedup)


def nest_rows(
    token_ids: TokenIds, offsets: Int64s, groups: PrefixGroups
) -> tuple[list[NestedGroup], list[Int64s]]:
    """Return the nested form of grouped rows, and the row numbers of each group's contexts.

    Results go back to their rows by these numbers, never by content. A row that is alone becomes
    a group with an empty prefix. Makes Python objects for every row: for small inputs.
    """
    alone = np.flatnonzero(groups.group_id < 0)
    labels = groups.group_id.copy()
    labels[alone] = groups.num_groups + np.arange(len(alone))
    order = np.argsort(labels, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []
    nested: list[NestedGroup] = []
    for rows in members:
        prefix_len = int(groups.prefix_tokens[rows[0]])
        starts, stops = offsets[rows], offsets[rows + 1]
        prefix = token_ids[starts[0] : starts[0] + prefix_len].tolist()
        contexts = [
            token_ids[start + prefix_len : stop].tolist()
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        nested.append((prefix, contexts))
    return nested, members
