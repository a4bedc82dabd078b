"""How much disk Ray needs for objects that its object store cannot hold, from a source's size."""

import math
from collections.abc import Sequence

import fsspec

from raybatch.durable.storage import error_context
from raybatch.inputs.listing import ListedFile, list_files
from raybatch.inputs.parquet_files import sampled
from raybatch.inputs.source import scan_source
from raybatch.job.config import JobConfig
from raybatch.submission.options import WorkerShape

# A sort into the order of the plan writes rows as they are read, as they are cut, and as they are
# sorted. At most so much was on disk at a time (docs/how-to/sizing.md).
_COPIES = 3
# pods take unequal shares
_UNEVEN = 1.5
_LEAST_GIB = 10
_COMPRESSED, _TEXT_GROWTH = (".gz", ".zst"), 5.0


def spill_gib_of(num_bytes: int, shape: WorkerShape) -> int | None:
    """Return the disk of each host for rows of so many bytes; None where memory holds them."""
    needed = num_bytes * _COPIES * _UNEVEN / shape.num_hosts / (1 << 30)
    # the other half is for rows on their way to engines and back
    return None if needed <= shape.shared_memory_gib / 2 else max(_LEAST_GIB, math.ceil(needed))


def source_bytes(job: JobConfig) -> int:
    """Return about what the rows of a source take in memory, from a few of its files.

    Raises:
        ConfigError: it cannot be read from here.
    """
    with error_context(f"source {job.source!r} cannot be listed"):
        files = list_files(job.source, has_columns=job.columns is not None)
        sizes = {file.path: _stored_bytes(file.path) for file in files}
    parquet = [file for file in files if file.kind == "parquet"]
    growth = 1.0
    if few := sampled(parquet):
        scans = [scan_source(file.path, columns=_own_columns(file, job.columns)) for file in few]
        in_memory = sum(part.num_bytes for scan in scans for part in scan.slices)
        growth = in_memory / max(1, sum(sizes[file.path] for file in few))
    stored = sum(sizes[file.path] for file in parquet)
    others = sum(sizes.values()) - stored
    compressed = sum(size for path, size in sizes.items() if path.endswith(_COMPRESSED))
    return round(stored * growth + others + compressed * (_TEXT_GROWTH - 1))


def _own_columns(file: ListedFile, columns: Sequence[str] | None) -> list[str] | None:
    of_folders = dict(file.folder_columns)
    return None if columns is None else [name for name in columns if name not in of_folders]


def _stored_bytes(path: str) -> int:
    filesystem, inner = fsspec.core.url_to_fs(path)
    return int(filesystem.size(inner) or 0)
