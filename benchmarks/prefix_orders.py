"""Orders in which a peer gets the same prompts, and what a prefix cache can save on them at best.

An order is a list of rows, so that outputs are compared row by row whatever the order.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from token_streams import stream
from workloads_e2e import TokenRequest, Workload, build

PromptOrder = Literal["shuffled", "sorted", "groups"]
# of any side, so that the same number of tokens is whole blocks for all
LARGEST_BLOCK = 32
W1_PREFIX_TOKENS = 64 * 256
PROMPT_ORDERS: tuple[PromptOrder, ...] = get_args(PromptOrder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What the prompts of a workload have in common, by tokens and by whole blocks.

    Args:
        prompt_tokens: of all prompts.
        shared_tokens: tokens of the prefix tree that two prompts or more run through.
        saveable_tokens: prompt tokens that need no computing when every whole block of the tree is
            computed once; the last token of a prompt is always computed.
        longest: prompt and output of one request, in tokens.
    """

    prompt_tokens: int
    shared_tokens: int
    saveable_tokens: int
    longest: int


@functools.lru_cache(maxsize=64)
def rows_in_order(workload: Workload, order: PromptOrder) -> tuple[int, ...]:
    """Return the rows of a workload in an order.

    shuffled  flat, as an input file that nobody arranged
    sorted    lexicographically by token ids, which is depth first in the prefix tree
    groups    groups as wholes in a random order, each group's members as in "shuffled"
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
    """Count what the prompts of a workload share; O(tokens) after a sort."""
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

    A workload that shares nothing takes what W1 takes. Two of the longest requests always fit.
    """
    prefixes = facts.shared_tokens or W1_PREFIX_TOKENS
    wanted = max(round(prefixes * fraction), 2 * (facts.longest + LARGEST_BLOCK))
    return -(-wanted // LARGEST_BLOCK) * LARGEST_BLOCK


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
