"""Records the conditions that a reader needs to judge numbers; no host names, no paths."""

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

# CPU features that decide which kernels run
FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)


def gather(root: Path, arguments: Sequence[str], *, script: str = "e2e.py") -> dict[str, Any]:
    """Describe machine, software and the state of the source tree.

    Args:
        root: root of the git checkout.
        arguments: arguments of the command line; folders in them are left out.
        script: script in this folder that the command line started.
    """
    model, features = _cpu()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu_model": model,
        "cpu_features": features,
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        # the part after the dash names a build, which may identify the host's owner
        "os": f"{_distribution()}, kernel {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "commit": _git(root, "rev-parse", "--short=12", "HEAD"),
        "is_tree_clean": _git(root, "status", "--porcelain", "--untracked-files=no") == "",
        "command": " ".join([f"python benchmarks/{script}", *without_folders(arguments)]),
    }


def write_result(out: Path | None, script: str, **parts: object) -> None:
    """Write the conditions of a run and its results as JSON, if `out` is given.

    Args:
        out: file, or a folder for a file that is named after the day, the script and the processor;
            None writes nothing.
        script: script in this folder that the command line started.
        parts: further fields of the file, by name.
    """
    if out is None:
        return
    described = gather(Path(__file__).parent.parent, sys.argv[1:], script=script)
    if out.is_dir():
        vectors = [
            name for name in ("avx512", "avx2") if name in "".join(described["cpu_features"])
        ]
        day, stem = described["date"].partition(" ")[0], Path(script).stem.replace("_", "-")
        processor = "-".join([f"{described['cores']}core", *vectors[:1]])
        out /= f"{day}-{stem}-{processor}.json"
    text = json.dumps({"conditions": described, **parts}, indent=1)
    out.write_text(text + "\n", encoding="utf-8")


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Replace every part of an argument that names a folder by a placeholder."""
    cleaned = []
    for argument in arguments:
        name, separator, value = argument.rpartition("=")
        cleaned.append(f"{name}{separator}FOLDER" if "/" in value else argument)
    return cleaned


def label(conditions: dict[str, Any]) -> str:
    """Return a short name of the kind of machine, such as "2core-avx512-amx"."""
    features = conditions["cpu_features"]
    kinds = [
        kind
        for kind, is_there in (
            ("avx512", "avx512f" in features),
            ("amx", "amx_bf16" in features),
            ("neon", "asimd" in features),
        )
        if is_there
    ]
    return "-".join([f"{conditions['cores']}core", *kinds])


def _cpu() -> tuple[str, list[str]]:
    model, flags = platform.processor() or platform.machine(), ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            model = value
        elif key in ("flags", "Features"):
            flags = value
    present = set(flags.split())
    return model, [feature for feature in FEATURES if feature in present]


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", sys.platform)
    except OSError:
        return platform.system()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None
    return done.stdout.strip()
