"""Measures the cost of exactly-once writing compared with plain Parquet of the same rows.

Run: OMP_NUM_THREADS=1 python benchmarks/durability.py [--rows 1024] [--units 200] [--out FILE]
A unit is written by `pyarrow.parquet.write_table`, and by the commit of a unit (checks, footer, a
synced file, a link, a synced folder), in turns, into folders on the same file system. The share is
the difference over the time of a job whose engines take `--unit-s` seconds for a unit.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import conditions
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.audit import audit
from raybatch.durable.commit import commit_unit, committed
from raybatch.durable.storage import open_store
from raybatch.durable.units import UnitPlan, row_sum
from raybatch.planning.tally import unit_counts
from raybatch.rows.schema import OutputSchema


def rows_of_unit(num_rows: int, seed: int) -> pa.Table:
    """Return finished rows: documents of 300 words, questions, answers of 64 tokens."""
    rng = np.random.default_rng(seed)
    words = [f"word{i}" for i in range(2000)]
    documents = [" ".join(rng.choice(words, 300)) for _ in range(max(1, num_rows // 16))]
    output = OutputSchema().arrow()
    columns = {
        "document": [documents[i % len(documents)] for i in range(num_rows)],
        "question": [" ".join(rng.choice(words, 12)) for _ in range(num_rows)],
        "row_id": [f"part.parquet:{seed * num_rows + i}" for i in range(num_rows)],
        "generated_text": [" ".join(rng.choice(words, 40)) for _ in range(num_rows)],
        "generated_tokens": list(rng.integers(0, 150_000, (num_rows, 64), dtype=np.int32)),
        "num_input_tokens": np.full(num_rows, 500, np.int32),
        "num_generated_tokens": np.full(num_rows, 64, np.int32),
        "num_cached_tokens": np.full(num_rows, 448, np.int32),
        "finish_reason": ["stop"] * num_rows,
        "group_id": np.arange(num_rows) // 16,
        "attempts": np.ones(num_rows, np.int32),
        "__inference_error__": [""] * num_rows,
    }
    schema = pa.schema([("document", pa.string()), ("question", pa.string()), *output])
    return pa.table(columns, schema=schema)


def measure(num_rows: int, num_units: int, folder: Path) -> dict[str, float]:
    """Write units in both ways, in turns; return medians in milliseconds."""
    tables = [rows_of_unit(num_rows, seed) for seed in range(8)]
    starts = np.arange(num_units) * num_rows
    rows = [np.arange(start, start + num_rows) for start in starts]
    sums = np.array([row_sum(row) for row in rows], np.uint64)
    plan = UnitPlan(hash="bench", unit_rows=np.full(num_units, num_rows), row_sums=sums)
    store, output = open_store(str(folder / "committed")), OutputSchema()
    (folder / "plain").mkdir()
    plain, own = [], []
    for number in range(num_units):
        table = tables[number % len(tables)]
        began = time.perf_counter()
        pq.write_table(table, folder / "plain" / f"part-{number:06d}.parquet")
        between = time.perf_counter()
        commit_unit(
            store,
            plan.unit(number),
            table,
            pos=np.arange(num_rows),
            row=rows[number],
            count=lambda table: unit_counts(table, output),
            plan_hash="bench",
            attempt="bench",
        )
        plain.append(between - began)
        own.append(time.perf_counter() - between)
    began = time.perf_counter()
    found = audit(store, plan)
    assert found.is_clean
    assert committed(store, plan).all()
    return {
        "plain_ms": 1e3 * statistics.median(plain),
        "commit_ms": 1e3 * statistics.median(own),
        "audit_ms_per_unit": 1e3 * (time.perf_counter() - began) / num_units,
    }


def main() -> None:
    """Print the cost per unit and its share, and write it with its conditions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1024, help="rows of a unit")
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--unit-s", type=float, default=10.0, help="seconds of engines per unit")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        found = measure(args.rows, args.units, folder)
    finally:
        shutil.rmtree(folder)
    extra_ms = found["commit_ms"] + found["audit_ms_per_unit"] - found["plain_ms"]
    found["share_of_job"] = extra_ms / 1e3 / args.unit_s
    print(f"plain Parquet {found['plain_ms']:.1f} ms, commit {found['commit_ms']:.1f} ms a unit of")
    print(
        f"{args.rows} rows, audit {found['audit_ms_per_unit']:.2f} ms; {args.unit_s} s of engines"
    )
    print(f"a unit make that {100 * found['share_of_job']:.2f} % of the job")
    conditions.write_result(args.out, "durability.py", rows=[found])


if __name__ == "__main__":
    main()
