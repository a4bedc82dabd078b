"""Seeded streams of token ids, the same in every peer; imports only the standard library.

Each purpose has its own stream, so that changing one does not shift the others.
"""

import random

# ids below are the toy tokenizers' special tokens
FIRST_TOKEN_ID = 16


def stream(seed: int, purpose: str) -> random.Random:
    """Return the stream of one purpose."""
    return random.Random(f"{seed}/{purpose}")


def random_ids(tokens: random.Random, vocab_size: int, length: int) -> list[int]:
    """Draw `length` token ids of the whole vocabulary except special tokens."""
    span = vocab_size - FIRST_TOKEN_ID
    return [FIRST_TOKEN_ID + int(tokens.random() * span) for _ in range(length)]


def distinct_ids(seed: int, purpose: str, vocab_size: int, count: int) -> list[int]:
    """Return `count` first tokens, all different if the vocabulary is large enough."""
    ids = list(range(FIRST_TOKEN_ID, vocab_size))
    stream(seed, purpose).shuffle(ids)
    return [ids[i % len(ids)] for i in range(count)]
