"""Triton's cache as it is carried from one call to the next."""

import gzip
import io
import json
import tarfile
from pathlib import Path


def relocate(folder: Path) -> int:
    """Let a cache that was made in another folder be found in this one; return its forms.

    Triton writes whole paths into it.
    """
    groups = list(folder.glob("*/__grp__*"))
    for path in groups:
        names = json.loads(path.read_text())["child_paths"]
        here = {name: str(path.parent / name) for name in names}
        path.write_text(json.dumps({"child_paths": here}))
    return len(groups)


def pack(folder: Path, path: Path, *, max_bytes: int) -> bool:
    """Write an archive of binaries and of what is known of them; False where it is too large."""
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
