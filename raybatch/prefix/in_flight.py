"""Groups waiting rows by shared prefix, where no plan over all rows exists.

The name of a group is the block key at the end of its prefix, so the group has the same name
whenever some of its rows are grouped.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.groups import exact_single_level, make_groups, nearest_open
from raybatch.prefix.order import GroupLoad, order_in_tree
from raybatch.prefix.tree import build_tree
from raybatch.records.arrays import Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InFlightPlan:
    """Groups of rows and their order; a row that is alone has group -1."""

    group_id: Ints  # [R], name of each row's group
    prefix_len: Ints  # [R], tokens that the group shares
    order: Ints  # [R], rows as they should run, members of a group together


def plan_in_flight(keys: BlockKeys, output_tokens: Ints) -> InFlightPlan:
    """Group rows by the prefixes that save most, and order the groups; near-linear in rows.

    Groups with the most output per computed prompt token come first. Rows that share a prefix stay
    together, in the order of the prefix tree. A row that is alone counts as a group of one.
    """
    tree = build_tree(keys)
    is_open = exact_single_level(tree, keys)
    groups = make_groups(tree, keys, is_open)
    is_alone = groups.group_id < 0
    num_alone = np.count_nonzero(is_alone)
    element = groups.group_id.copy()
    element[is_alone] = groups.num_groups + np.arange(num_alone)
    load = GroupLoad(
        prefix_tokens=np.concatenate([groups.prefix_len, np.zeros(num_alone, np.int64)]),
        distinct_tokens=np.concatenate([groups.distinct_tokens, keys.num_tokens[is_alone]]),
        num_rows=np.concatenate([groups.num_rows, np.ones(num_alone, np.int64)]),
        output_tokens=np.bincount(
            element, weights=output_tokens, minlength=groups.num_groups + num_alone
        ).astype(float),
    )
    deepest = tree.deepest_nodes()
    of_groups = nearest_open(tree, is_open)[deepest[groups.first_row]]
    node = np.concatenate([of_groups, deepest[is_alone]])
    rank = np.empty(len(load), np.int64)
    rank[order_in_tree(tree, node, load, None)] = np.arange(len(load))
    place = np.empty(keys.num_rows, np.int64)
    place[tree.row_order] = np.arange(keys.num_rows)
    last_block = groups.prefix_len // keys.block_size - 1
    last_keys = keys.keys[keys.offsets[groups.first_row] + last_block]
    # a row that is alone has group -1, which indexes the last name
    names = np.append(_as_names(last_keys), -1)
    return InFlightPlan(
        group_id=names[groups.group_id],
        prefix_len=groups.prefix_tokens.astype(np.int64),
        order=np.lexsort((place, rank[element])),
    )


def match_prefixes(keys: BlockKeys, groups: Sequence[Set[int]]) -> tuple[Ints, Ints]:
    """Find for each row the longest prefix that names one of the groups; linear in the keys.

    Return the name of each row's group, -1 without any, and the tokens of the prefix; int64 [R].
    Groups are sets of names of any size, such as the keys of dictionaries.
    """
    names = _as_names(keys.keys)
    wanted = set(names.tolist())
    known = [name for some in groups for name in some & wanted]
    matches = np.flatnonzero(np.isin(names, known))
    rows = np.searchsorted(keys.offsets, matches, side="right") - 1
    # of several prefixes of one row, the last assignment is the longest
    group_id = np.full(keys.num_rows, -1, np.int64)
    group_id[rows] = names[matches]
    prefix_len = np.zeros(keys.num_rows, np.int64)
    prefix_len[rows] = (matches - keys.offsets[rows] + 1) * keys.block_size
    return group_id, prefix_len


def _as_names(keys: npt.NDArray[np.uint64]) -> Ints:
    return (keys >> np.uint64(1)).astype(np.int64)
