"""The planned order of a peer's requests, made in its own process from their tokens alone.

Needs raybatch: only for its peers. Planning is part of what such a peer is measured on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from workloads_e2e import TokenRequest

from raybatch.prefix.block_keys import hash_blocks, start_offsets
from raybatch.prefix.enlarge import exact_single_level
from raybatch.prefix.groups import PrefixGroups, make_groups
from raybatch.prefix.load import GroupLoad
from raybatch.prefix.order import order_groups
from raybatch.prefix.tree import build_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a plan says about requests.

    Args:
        rows: indices of the requests in planned order.
        group_ids: prefix group of each request, by index; None for one that is alone.
        prefix_lens: tokens that each request's group shares, by index.
        plan_s: seconds that planning took.
    """

    rows: list[int]
    group_ids: list[int | None]
    prefix_lens: list[int]
    plan_s: float


def plan_requests(requests: Sequence[TokenRequest], block_size: int) -> Plan:
    """Group requests by shared prefixes and order the groups by decode/prefill ratio.

    Every request is generated, identical ones too: the peers get no such help.
    """
    began = time.perf_counter()
    prompts = [np.asarray(request.prompt_ids, np.int32) for request in requests]
    offsets = start_offsets(np.array([len(prompt) for prompt in prompts], np.int64))
    keys = hash_blocks(np.concatenate(prompts), offsets, block_size)
    tree = build_tree(keys)
    groups = make_groups(tree, keys, exact_single_level(tree, keys), dedup=False)
    # rows that are alone are groups of one behind the others
    label = groups.group_id.copy()
    alone = np.flatnonzero(label < 0)
    label[alone] = groups.num_groups + np.arange(len(alone))
    outputs = np.array([request.output_len for request in requests], float)
    load = _load(groups, keys.num_tokens[alone], label, outputs)
    rank = np.argsort(order_groups(load, by="ratio"))
    # neighbours in the tree stay neighbours inside a group
    place = np.argsort(tree.row_order)
    rows = np.lexsort((place, rank[label]))
    return Plan(
        rows=rows.tolist(),
        group_ids=[group if group >= 0 else None for group in groups.group_id.tolist()],
        prefix_lens=groups.prefix_tokens.tolist(),
        plan_s=time.perf_counter() - began,
    )


def _load(
    groups: PrefixGroups,
    alone_tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    label: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    outputs: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> GroupLoad:
    return GroupLoad(
        prefix_tokens=np.append(groups.prefix_len, np.zeros_like(alone_tokens)),
        distinct_tokens=np.append(groups.distinct_tokens, alone_tokens),
        num_rows=np.append(groups.num_rows, np.ones_like(alone_tokens)),
        output_tokens=np.bincount(label, outputs, minlength=len(groups.num_rows)),
    )
