"""Prompts that share prefixes by class of group, or as random trees; standard library only.

A prompt comes with its exact output length. Prompts are listed group by group, and a caller with
another order picks rows (`prefix_orders.py`).
"""

import itertools
import random
from collections.abc import Iterator, Sequence

from token_streams import distinct_ids, random_ids, stream

# groups, members, prefix, distinct and output tokens
GroupClass = tuple[int, int, int, int, int]
Prompt = tuple[tuple[int, ...], int]

MAX_DEPTH = 4
BRANCHES = (1, 2, 3, 5, 20)
SEGMENTS = (1, 5, 30, 200)
TAILS = (50, 200)
# prompts that every set of trees has: identical ones, ones shorter than a block, ones alone
NUM_DUPLICATES, NUM_SHORT, NUM_ALONE = 8, 4, 16
SHORT_LEN = 5


def class_prompts(classes: Sequence[GroupClass], vocab_size: int, seed: int) -> Iterator[Prompt]:
    """Yield the prompts of group classes; groups of different classes take turns.

    First tokens of different prefixes differ, and so do first tokens of the distinct parts of a
    group, if the vocabulary is large enough: nothing is shared by accident.
    """
    tokens = stream(seed, "tokens")
    rounds = max((groups for groups, *_ in classes), default=0)
    in_turn = [c for number in range(rounds) for c in classes if number < c[0]]
    first_ids = distinct_ids(seed, "first", vocab_size, len(in_turn))
    for number, (_, members, prefix_len, distinct_len, output_len) in enumerate(in_turn):
        head = [first_ids[number], *random_ids(tokens, vocab_size, prefix_len - 1)]
        heads = head if prefix_len else []
        for first_id in distinct_ids(seed, f"members of {number}", vocab_size, members):
            own = [first_id if prefix_len else first_ids[number]]
            own += random_ids(tokens, vocab_size, distinct_len - 1)
            yield (*heads, *own), output_len


def tree_prompts(count: int, output_len: int, vocab_size: int, seed: int) -> Iterator[Prompt]:
    """Yield `count` prompts of random prefix trees, including cases that are hard for planners.

    The prompts always include identical ones, a proper prefix of another prompt, prompts shorter
    than a block, and prompts that share nothing.
    """
    shape, tokens = stream(seed, "shape"), stream(seed, "tokens")
    first_ids = iter(itertools.cycle(distinct_ids(seed, "first", vocab_size, count)))
    prompts: list[tuple[int, ...]] = []
    num_grown = count - NUM_DUPLICATES - NUM_SHORT - NUM_ALONE - 1
    while len(prompts) < num_grown:
        prompts += _grow((next(first_ids),), 1, shape, tokens, vocab_size)
    del prompts[num_grown:]
    longest = max(prompts, key=len)
    prompts.append(longest[: -TAILS[0]])
    prompts += [prompts[i * num_grown // NUM_DUPLICATES] for i in range(NUM_DUPLICATES)]
    for length, copies in ((SHORT_LEN, NUM_SHORT), (TAILS[1], NUM_ALONE)):
        for _ in range(copies):
            prompts.append((next(first_ids), *random_ids(tokens, vocab_size, length - 1)))
    yield from ((prompt, output_len) for prompt in prompts)


def _grow(
    path: tuple[int, ...], level: int, shape: random.Random, tokens: random.Random, vocab_size: int
) -> list[tuple[int, ...]]:
    """Return the prompts below a node, each with a distinct tail."""
    path += tuple(random_ids(tokens, vocab_size, shape.choice(SEGMENTS)))
    num_branches = shape.choice(BRANCHES)
    if level == MAX_DEPTH or shape.random() < level / MAX_DEPTH:
        tails = [shape.choice(TAILS) for _ in range(num_branches)]
        return [(*path, *random_ids(tokens, vocab_size, length)) for length in tails]
    below = [_grow(path, level + 1, shape, tokens, vocab_size) for _ in range(num_branches)]
    return list(itertools.chain.from_iterable(below))
