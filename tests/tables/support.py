"""Tables on disk, and jobs whose rows go there."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from raybatch.durable.fault_points import EXIT_CODE
from tests.jobs import local_job
from tests.stages.support import fake_stage, write_parquet

KINDS = ("delta", "iceberg", "lance")
NUM_ROWS = 60


def address_of(kind: str, folder: Path, name: str = "answers") -> str:
    return f"iceberg:local.ns.{name}" if kind == "iceberg" else f"{kind}:{folder}/{name}"


def source_table(num_rows: int = NUM_ROWS, first: int = 0) -> pa.Table:
    """Return rows with types that tables of SQL do not all have."""
    numbers = range(first, first + num_rows)
    return pa.table(
        {
            "text": [f"question {i}" for i in numbers],
            "lang": [("en", "de", None)[i % 3] for i in numbers],
            "count": pa.array([i if i % 5 else None for i in numbers], pa.uint32()),
            "tags": pa.array([[i, i + 1][: i % 3] for i in numbers], pa.list_(pa.uint8())),
            "about": pa.array([{"n": i, "s": str(i)} for i in numbers]),
        }
    )


def write_source(folder: Path, table: pa.Table, num_files: int = 3) -> Path:
    size = -(-table.num_rows // num_files)
    for start in range(0, table.num_rows, size):
        write_parquet(folder / "in" / f"{start:04d}.parquet", table.slice(start, size))
    return folder / "in"


def make_job(model, source, sink, prompt="{text}", **options):
    options.setdefault("plan", {"unit_rows": 10, "max_unit_rows": 10})
    stage = fake_stage(model, prompt=prompt, replicas=1)
    return local_job(source, sink, stage, **options)


def publish_in_a_process(sink: Path, table: str, **environment: str) -> subprocess.Popen[bytes]:
    program = (
        "import sys\nfrom raybatch_tables import publish\nprint(publish(sys.argv[1], sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(sink), table]
    # the code of this tree, wherever that of another one is installed
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end_of(process: subprocess.Popen[bytes], expected: int = 0) -> str:
    out, error = process.communicate(timeout=120)
    assert process.returncode == expected, error.decode()
    return out.decode()


def is_killed_at(point: str, sink: Path, table: str) -> None:
    """Run a publication that dies at a fault point."""
    end_of(publish_in_a_process(sink, table, RAYBATCH_FAULT=point), EXIT_CODE)
