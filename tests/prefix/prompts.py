"""Prompts for the tests of planning, and slow and obvious answers about them."""

import hashlib
from collections import Counter
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from raybatch.prefix.block_keys import BlockKeys, hash_blocks

# the six prompts of the figure in BatchLLM (arXiv 2412.03594), a letter per token
SLIDES = ("abcdea", "bab", "bacd", "baabcdeabc", "baabcdeadea", "bbcdeabc")

# few segments of few tokens, so that prompts share, repeat and contain each other
_SEGMENTS = ((0,), (1,), (2,), (0, 0, 0), (1, 2, 3), (4, 4, 4, 4), (5, 6, 7, 8, 9))

prompt_lists = st.lists(
    st.lists(st.sampled_from(_SEGMENTS), max_size=5).map(lambda parts: sum(parts, ())), max_size=9
)
block_sizes = st.integers(1, 4)


def keys_of(prompts, block_size) -> BlockKeys:
    """Hash prompts given as sequences of token ids."""
    flat = [token for prompt in prompts for token in prompt]
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    return hash_blocks(np.array(flat, np.int32), offsets, block_size)


def letters(words):
    return [[ord(letter) for letter in word] for word in words]


def num_common_blocks(a, b, block_size):
    count = 0
    while True:
        stop = (count + 1) * block_size
        if stop > min(len(a), len(b)) or tuple(a[:stop]) != tuple(b[:stop]):
            return count
        count += 1


def shared_prefixes(prompts, block_size):
    """Return every longest common prefix of two prompts, and the rows that begin with it."""
    prefixes = set()
    for a, b in combinations(prompts, 2):
        prefixes.add(tuple(a[: num_common_blocks(a, b, block_size) * block_size]))
    return {
        prefix: frozenset(i for i, p in enumerate(prompts) if tuple(p[: len(prefix)]) == prefix)
        for prefix in prefixes - {()}
    }


def cost_of(prompts, opened):
    """Compute each opened prefix once, and of each prompt what its longest one leaves."""
    total = sum(map(len, opened))
    for prompt in prompts:
        covered = [len(p) for p in opened if tuple(prompt[: len(p)]) == p]
        total += max(1, len(prompt) - max(covered, default=0))
    return total


def cheapest_cost(prompts, block_size):
    """Try every set of shared prefixes."""
    prefixes = sorted(shared_prefixes(prompts, block_size))
    return min(
        cost_of(prompts, opened)
        for size in range(len(prefixes) + 1)
        for opened in combinations(prefixes, size)
    )


def num_shared_block_tokens(prompts, block_size):
    """Count the tokens of the distinct whole-block prefixes that two prompts or more have."""
    seen = Counter()
    for prompt in prompts:
        state = hashlib.blake2b()
        for stop in range(block_size, len(prompt) + 1, block_size):
            state.update(np.asarray(prompt[stop - block_size : stop], np.int32).tobytes())
            seen[state.digest()] += 1
    return block_size * sum(1 for count in seen.values() if count > 1)


def draw_prefix_tree(seed, num_prompts):
    """Draw prompts from a random tree of segments, with the odd cases added (workload W10)."""
    rng = np.random.default_rng(seed)
    prefixes = [np.zeros(0, np.int32)]
    for _ in range(rng.integers(1, 5)):
        branching, length = rng.choice([1, 2, 3, 5, 20]), rng.choice([1, 5, 30, 200, 2000])
        prefixes = [
            np.concatenate([prefix, rng.integers(0, 1000, length, dtype=np.int32)])
            for prefix in prefixes[:20]
            for _ in range(branching)
        ]
    tail = rng.choice([50, 200])
    prompts = [
        np.concatenate([prefixes[i], rng.integers(0, 1000, tail, dtype=np.int32)])
        for i in rng.integers(0, len(prefixes), num_prompts)
    ]
    longest = max(prompts, key=len)
    odd = [longest, longest[: len(longest) // 2], longest[:5], prompts[0], longest[:0]]
    chain = [longest[:stop] for stop in range(0, len(longest), 97)]
    prompts = [*prompts, *odd, *chain]
    return [prompts[i].tolist() for i in rng.permutation(len(prompts))]
