"""Packs Triton's cache, and relocates it for the next call."""

import gzip
import io
import json
import tarfile
from pathlib import Path


def relocate(folder: Path) -> int:
    """Adapt a cache that was made in another folder; return the number of its compiled kernels.

    Triton writes absolute paths into it.
    """
    groups = list(folder.glob("*/__grp__*"))
    for path in groups:
        names = json.loads(path.read_text())["child_paths"]
        here = {name: str(path.parent / name) for name in names}
        path.write_text(json.dumps({"child_paths": here}))
    return len(groups)


def pack(folder: Path, path: Path, *, max_bytes: int) -> bool:
    """Write an archive of binaries and their metadata; False if it would be too large."""
    names = sorted(p for p in folder.glob("*/*") if p.suffix in (".json", ".cubin", ".so"))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            archive.add(name, arcname=str(name.relative_to(folder)))
    whole = gzip.compress(packed.getvalue(), 6)
    if len(whole) > max_bytes:
        return False
    path.write_bytes(whole)
    return True
