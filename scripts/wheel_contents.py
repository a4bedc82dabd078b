"""Compare a wheel with the package folder: python scripts/wheel_contents.py WHEEL.

Everything below raybatch/ belongs in the wheel (code, py.typed, the demo checkpoint), nothing else
does, and the wheel stays small.
"""

import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 10 << 20


def main() -> None:
    """Exit with a message if files are missing or foreign, or the wheel is too large."""
    wheel = Path(sys.argv[1])
    with ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = [path for path in (ROOT / "raybatch").rglob("*") if path.is_file()]
    package = {p.relative_to(ROOT).as_posix() for p in paths if "__pycache__" not in p.parts}
    if package - inside:
        raise SystemExit(f"the wheel lacks {', '.join(sorted(package - inside))}")
    if inside - package:
        raise SystemExit(f"the wheel also holds {', '.join(sorted(inside - package))}")
    num_bytes = wheel.stat().st_size
    if num_bytes > MAX_BYTES:
        raise SystemExit(f"the wheel has {num_bytes} bytes, more than {MAX_BYTES}")
    print(f"{wheel.name}: {len(inside)} files, {num_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
