"""Synthetic jobs by name, as lengths: heavy tails, groups, fixed lengths. Seeded, PCG64.

W1, W2: prefix groups. W3: classes of unlike density. W4: heavy tail. W5: rollouts. W6: fixed
lengths of long prompts and outputs. W7: a spread of lengths. W8: chunking mixes. W11: all alike.
Lengths and order come from separate random streams, so that one does not shift the other.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from raybatch.actors.queue.row_states import ALONE
from raybatch.errors import ConfigError
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.simulator.rows import SimulatedRows

# outputs of W4: log-normal, clipped at a multiple of their 95th percentile
_TAIL_SIGMA, _TAIL_CLIP = 1.95, 9.2

_Make = Callable[[int, np.random.Generator], SimulatedRows]


def make_rows(name: str, *, num_rows: int | None = None, seed: int = 42) -> SimulatedRows:
    """Return the rows of a named workload, `num_rows` of them or its usual number.

    Prefix groups stay whole. Raises ConfigError if the name is unknown, or `num_rows` is below 1.
    """
    known = _WORKLOADS.get(name.upper())
    if known is None:
        raise ConfigError(f"unknown workload {name!r}; choose one of {', '.join(_WORKLOADS)}")
    usual, make = known
    if num_rows is not None and num_rows < 1:
        raise ConfigError(f"a workload has {num_rows} rows; it needs at least 1")
    lengths, _ = np.random.SeedSequence(seed).spawn(2)
    return make(num_rows or usual, np.random.Generator(np.random.PCG64(lengths)))


def _whole(lengths: Floats, *, most: float = np.inf) -> Ints:
    return np.minimum(np.maximum(np.rint(lengths), 1), most).astype(np.int64)


def _fixed(prompt: int, output: int) -> _Make:
    return lambda num_rows, _: SimulatedRows.of(
        np.full(num_rows, prompt, np.int64), np.full(num_rows, output, np.int64)
    )


def _tail(num_rows: int, rng: np.random.Generator) -> SimulatedRows:
    output = _whole(rng.lognormal(np.log(200), _TAIL_SIGMA, num_rows))
    output = np.minimum(output, round(_TAIL_CLIP * float(np.quantile(output, 0.95))))
    return SimulatedRows.of(np.full(num_rows, 1024, np.int64), output)


def _rollouts(num_rows: int, rng: np.random.Generator) -> SimulatedRows:
    output = _whole(rng.lognormal(np.log(2000), 1.2, num_rows), most=64_000)
    return SimulatedRows.of(np.full(num_rows, 1024, np.int64), output, max_tokens=64_000)


def _spread(num_rows: int, rng: np.random.Generator) -> SimulatedRows:
    prompt = _whole(rng.lognormal(6, 1.3, num_rows), most=120_000)
    output = _whole(rng.lognormal(5.5, 1, num_rows), most=8_000)
    return SimulatedRows.of(prompt, np.minimum(output, 128_000 - prompt), max_tokens=8_000)


def _mix(num_rows: int, rng: np.random.Generator) -> SimulatedRows:
    prompt = _whole(rng.normal(1200, 360, num_rows))
    return SimulatedRows.of(prompt, _whole(rng.normal(128, 38, num_rows)))


def _in_groups(
    size: int, prefix: Ints, distinct: Ints, output: Ints, num_rows: int
) -> SimulatedRows:
    """Return whole groups of a size, whose lengths are in turn those of the arrays."""
    group = np.arange(-(-num_rows // size) * size) // size
    kind = group % len(prefix)
    rows = SimulatedRows.of(prefix[kind] + distinct[kind], output[kind])
    return replace(rows, group=group, prefix=prefix[kind])


def _groups(num_rows: int, _: np.random.Generator) -> SimulatedRows:
    return _in_groups(16, np.array([2000]), np.array([200]), np.array([100]), num_rows)


def _two_kinds(num_rows: int, _: np.random.Generator) -> SimulatedRows:
    lengths = np.array([400, 4000]), np.array([100, 200]), np.array([400, 40])
    return _in_groups(16, *lengths, num_rows)


def _classes(num_rows: int, rng: np.random.Generator) -> SimulatedRows:
    """Return W3 at a density of 1.2 and a sharing of 35 %."""
    counts = np.array([6000, 4881, 1767])
    num_grouped, num_long, _ = (counts * num_rows / counts.sum()).round().astype(int).tolist()
    kind = np.repeat([0, 1, 2], [num_grouped, num_long, num_rows - num_grouped - num_long])
    group = np.where(kind == 0, np.arange(num_rows) // 60, ALONE)
    # members of a group stay together
    place = rng.permutation(num_rows)
    place[kind == 0] = place[group[kind == 0] * 60]
    rows = SimulatedRows.of(np.array([680, 1200, 100])[kind], np.array([2, 120, 3000])[kind])
    rows = replace(rows, group=group, prefix=np.array([600, 0, 0])[kind])
    return rows.take(np.argsort(place, kind="stable"))


_WORKLOADS: dict[str, tuple[int, _Make]] = {
    "W1": (6_400, _groups),
    "W2": (3_200, _two_kinds),
    "W3": (12_648, _classes),
    "W4": (20_000, _tail),
    "W5": (1_024, _rollouts),
    "W6": (6_000, _fixed(8_000, 2_000)),
    "W7": (2_000, _spread),
    "W8": (512, _mix),
    "W11": (4_096, _fixed(128, 64)),
}
