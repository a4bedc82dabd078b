"""Measures the planning of a dataset: block keys, prefix tree, groups, order and units.

Run: OMP_NUM_THREADS=1 python benchmarks/prefix_plan.py --rows 100000 1000000
Prompts are drawn as block keys, the input of planning: 30 blocks, of which a topic shares 4 and a
document of 16 prompts 16 more, in random order; "zero" shares nothing. The baseline is `pyarrow`
sorting the same rows by their keys as bytes. The sort makes shared prefixes adjacent like the tree,
but finds neither the shared parts nor what to compute once. Times are CPU seconds of one thread.
The peak memory is that of the whole process, including the drawn keys.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import conditions
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.config import PlanConfig
from raybatch.prefix.block_keys import BlockKeys, hash_blocks, start_offsets
from raybatch.prefix.plan import RowFeatures, plan_rows

BLOCK_SIZE = 16
NUM_BLOCKS = 30
TOPIC_BLOCKS, DOCUMENT_BLOCKS = 4, 20
ROWS_PER_DOCUMENT = 16
DOCUMENTS_PER_TOPIC = 200
ROWS_PER_BATCH = 10_000


def draw_keys(num_rows: int, *, shares: bool, seed: int) -> BlockKeys:
    """Draw prompts whose keys agree up to the end of a shared topic or document."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**64, (num_rows, NUM_BLOCKS), dtype=np.uint64)
    if shares:
        document = rng.permutation(num_rows) // ROWS_PER_DOCUMENT
        topic = document // DOCUMENTS_PER_TOPIC
        for labels, start, stop in (
            (topic, 0, TOPIC_BLOCKS),
            (document, TOPIC_BLOCKS, DOCUMENT_BLOCKS),
        ):
            drawn = rng.integers(0, 2**64, (labels.max() + 1, stop - start), dtype=np.uint64)
            for column in range(start, stop):
                keys[:, column] = drawn[labels, column - start]
    return BlockKeys(
        keys=keys.reshape(-1),
        offsets=start_offsets(np.full(num_rows, NUM_BLOCKS)),
        num_tokens=rng.integers(0, BLOCK_SIZE, num_rows) + NUM_BLOCKS * BLOCK_SIZE,
        digest=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        block_size=BLOCK_SIZE,
    )


def sort_rows(keys: BlockKeys) -> None:
    """Sort rows by their keys as bytes; the bytes are not copied."""
    buffers = [None, pa.py_buffer(keys.offsets * 8), pa.py_buffer(keys.keys)]
    rows = pa.LargeBinaryArray.from_buffers(pa.large_binary(), keys.num_rows, buffers)
    pc.sort_indices(rows)


class Stopwatch:
    """Measures CPU seconds of named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.seconds[name] = time.process_time() - begin


def measure(num_rows: int, *, shares: bool, seed: int, with_sort: bool) -> dict[str, object]:
    """Plan one dataset and return time and memory."""
    keys = draw_keys(num_rows, shares=shares, seed=seed)
    rows = RowFeatures(keys=keys, expected_tokens=np.full(num_rows, 16.0))
    watch = Stopwatch()
    with watch.part("plan"):
        plan, found = plan_rows(rows, PlanConfig())
    plan_s, plan_peak = watch.seconds["plan"], peak_gib()
    if with_sort:
        with watch.part("sort"):
            sort_rows(keys)
    return {
        "rows": num_rows,
        "data": "shared" if shares else "zero",
        "seconds": {name: round(spent, 3) for name, spent in watch.seconds.items()},
        "plan_us_per_row": round(plan_s / num_rows * 1e6, 3),
        "plan_over_sort": round(plan_s / watch.seconds["sort"], 2) if with_sort else None,
        "plan_peak_gib": round(plan_peak, 2),
        "keys_gib": round(keys.keys.nbytes / 2**30, 2),
        "num_groups": found.groups.num_groups,
        "num_units": plan.num_units,
        "saved_multi_level": round(
            found.stats.saved_tokens / max(1, found.stats.logical_tokens), 4
        ),
        "saved_single_level": round(found.saved_fraction, 4),
    }


def measure_hashing(num_rows: int, seed: int) -> dict[str, object]:
    """Hash random prompts of the same length in row batches, and join their keys."""
    rng = np.random.default_rng(seed)
    prompt_len = NUM_BLOCKS * BLOCK_SIZE + 8
    tokens = rng.integers(0, 150_000, num_rows * prompt_len, dtype=np.int32)
    offsets = start_offsets(np.full(ROWS_PER_BATCH, prompt_len))
    watch = Stopwatch()
    with watch.part("hash"):
        parts = [
            hash_blocks(batch, offsets, BLOCK_SIZE)
            for batch in tokens.reshape(-1, ROWS_PER_BATCH * prompt_len)
        ]
        BlockKeys.concat(parts)
    return {
        "rows": num_rows,
        "seconds": {"hash": round(watch.seconds["hash"], 3)},
        "hash_us_per_row": round(watch.seconds["hash"] / num_rows * 1e6, 3),
        "hash_ns_per_token": round(watch.seconds["hash"] / len(tokens) * 1e9, 2),
    }


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    yield measure_hashing(100_000, args.seed)
    for num_rows in args.rows:
        for data in args.data:
            shares, with_sort = data == "shared", not args.no_sort
            yield measure(num_rows, shares=shares, seed=args.seed, with_sort=with_sort)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--data", choices=["shared", "zero"], nargs="+", default=["shared", "zero"])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--no-sort", action="store_true", help="leave the baseline out")
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    args = parser.parse_args()
    results = []
    for found in measure_all(args):
        results.append(found)
        print(json.dumps(found), flush=True)
    conditions.write_result(
        args.out,
        "prefix_plan.py",
        results=results,
        versions=f"numpy {np.__version__} pyarrow {pa.__version__}",
    )


if __name__ == "__main__":
    main()
