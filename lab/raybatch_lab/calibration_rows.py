"""Workloads that costs are fitted to, and others by which they are judged. Seeded, PCG64."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from raybatch.records.arrays import Floats, Ints
from raybatch_lab.simulator.rows import SimulatedRows

# rows of one length, so that every order of them is the same work
ALIKE = "alike"
# what does not fit into memory at once
SHORT_OF_MEMORY = "short of memory"
_NUM_ROWS = 1024

Order = Callable[[SimulatedRows], Ints]
ORDERS: dict[str, Order] = {
    "longest first": lambda rows: np.argsort(-rows.output, kind="stable"),
    "shortest first": lambda rows: np.argsort(rows.output, kind="stable"),
}


def training_rows(max_tokens: int) -> Iterator[tuple[str, str, SimulatedRows]]:
    """Yield workloads to fit costs to, as (name, key of its order in `ORDERS`, rows).

    Their lengths differ from those of the held-out workloads. They are of many kinds, so that a
    fit can separate the costs of rows, of prompt tokens and of KV reads.

    Args:
        max_tokens: context length of the model; lengths are scaled down to fit.
    """
    rng, num_rows = np.random.Generator(np.random.PCG64(3)), _NUM_ROWS
    longest, shortest = ORDERS

    def scaled(prompt: Ints, output: Ints) -> SimulatedRows:
        return _scaled(prompt, output, max_tokens)

    output = np.minimum(rng.geometric(1 / 24, num_rows), 100)
    yield "geometric", longest, scaled(rng.integers(8, 400, num_rows), output)
    output = rng.integers(20, 60, num_rows)
    yield "short prompts", shortest, scaled(np.full(num_rows, 12), output)
    output = rng.integers(60, 180, num_rows)
    yield SHORT_OF_MEMORY, longest, scaled(np.full(num_rows, 60), output)
    yield "waves", longest, scaled(np.full(num_rows, 100), np.full(num_rows, 24))
    output = rng.integers(4, 28, num_rows)
    yield "long prompts", shortest, scaled(rng.integers(240, 480, num_rows), output)
    output = rng.integers(40, 300, num_rows)
    yield "long outputs", longest, scaled(rng.integers(4, 64, num_rows), output)
    output = np.minimum(rng.geometric(1 / 12, num_rows), 200)
    yield "spread", shortest, scaled(rng.integers(4, 200, num_rows), output)
    output = np.where(rng.random(num_rows) < 1 / 8, rng.integers(120, 220, num_rows), 5)
    yield "stragglers", longest, scaled(np.full(num_rows, 48), output)


def held_out_rows(max_tokens: int) -> Iterator[tuple[str, SimulatedRows]]:
    """Yield the held-out workloads, which only judge fitted costs, as (name, rows)."""
    rng, num_rows = np.random.Generator(np.random.PCG64(7)), _NUM_ROWS
    yield ALIKE, _scaled(np.full(num_rows, 32), np.full(num_rows, 16), max_tokens)
    output = np.minimum(rng.lognormal(np.log(6), 1.95, num_rows), 240)
    yield "tail", _scaled(np.full(num_rows, 32), output, max_tokens)
    prompt, output = rng.integers(16, 240, num_rows), rng.integers(8, 120, num_rows)
    yield "mixed", _scaled(prompt, output, max_tokens)
    prompt, output = rng.integers(16, 120, num_rows), rng.integers(16, 240, num_rows)
    yield SHORT_OF_MEMORY, _scaled(prompt, output, max_tokens)


def _scaled(prompt: Ints | Floats, output: Ints | Floats, max_tokens: int) -> SimulatedRows:
    """Return rows with known lengths, for a model of this context length."""
    scale = min(1.0, max_tokens / 512)
    lengths = (np.maximum(np.rint(n * scale), 1).astype(np.int64) for n in (prompt, output))
    rows = SimulatedRows.of(*lengths).with_oracle()
    return replace(rows, max_tokens=rows.output)
