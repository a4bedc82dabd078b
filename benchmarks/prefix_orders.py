"""Orders in which a peer gets the same prompts, and the most that a prefix cache can save on them.

An order is a list of rows, so outputs can be compared row by row in any order.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from token_streams import stream
from workloads_e2e import TokenRequest, Workload, build

PromptOrder = Literal["shuffled", "sorted", "groups"]
# largest block size of any side, of which KV sizes are multiples, so that all sides get the same
LARGEST_BLOCK = 32
W1_PREFIX_TOKENS = 64 * 256
PROMPT_ORDERS: tuple[PromptOrder, ...] = get_args(PromptOrder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Shared tokens of a workload's prompts, by tokens and by whole blocks.

    Args:
        prompt_tokens: tokens of all prompts.
        shared_tokens: tokens of the prefix tree that two or more prompts share.
        saveable_tokens: prompt tokens that need no computing if every whole block of the tree is
            computed once; the last token of a prompt is always computed.
        longest: prompt and output tokens of the longest request.
    """

    prompt_tokens: int
    shared_tokens: int
    saveable_tokens: int
    longest: int


@functools.lru_cache(maxsize=64)
def rows_in_order(workload: Workload, order: PromptOrder) -> tuple[int, ...]:
    """Return the rows of a workload in an order.

    shuffled  rows in random order, as in an unordered input file
    sorted    lexicographically by token ids, which is depth first in the prefix tree
    groups    whole groups in random order, the members of a group as in "shuffled"
    """
    requests = build(workload)
    rows = list(range(len(requests)))
    if order == "sorted":
        return tuple(sorted(rows, key=lambda row: requests[row].prompt_ids))
    stream(workload.seed, "order").shuffle(rows)
    if order == "shuffled":
        return tuple(rows)
    group_of_row = _first_tokens(requests)
    groups = sorted(set(group_of_row))
    stream(workload.seed, "order of groups").shuffle(groups)
    rank = {group: number for number, group in enumerate(groups)}
    return tuple(sorted(rows, key=lambda row: rank[group_of_row[row]]))


def _first_tokens(requests: Sequence[TokenRequest]) -> list[int]:
    """Return a group of each row: prompts that differ in their first token share nothing."""
    return [request.prompt_ids[0] for request in requests]


@functools.lru_cache(maxsize=64)
def sharing(workload: Workload, block_size: int) -> Sharing:
    """Count the shared tokens of a workload's prompts; O(tokens) after a sort."""
    requests = build(workload)
    prompts = sorted(request.prompt_ids for request in requests)
    common = [0, *(_common_len(a, b) for a, b in pairwise(prompts))]
    saveable = (
        min(length, len(prompt) - 1) // block_size * block_size
        for length, prompt in zip(common, prompts, strict=True)
    )
    return Sharing(
        prompt_tokens=sum(map(len, prompts)),
        shared_tokens=sum(max(0, b - a) for a, b in pairwise(common)),
        saveable_tokens=sum(saveable),
        longest=max(len(request.prompt_ids) + request.output_len for request in requests),
    )


def kv_tokens_for(facts: Sharing, fraction: float) -> int:
    """Return a KV size as a fraction of the shared prefixes, in whole blocks of every side.

    A workload that shares nothing gets the KV size of W1. Two of the longest requests always fit.
    """
    prefixes = facts.shared_tokens or W1_PREFIX_TOKENS
    wanted = max(round(prefixes * fraction), 2 * (facts.longest + LARGEST_BLOCK))
    return -(-wanted // LARGEST_BLOCK) * LARGEST_BLOCK


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
