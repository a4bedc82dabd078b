"""Checks that the host has what the call needs, before the call spends its seconds."""

import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

LEAST_SECONDS = 300
_MOST_S = 60
_PACKAGES = (
    *("torch", "triton", "transformers", "numpy", "pyarrow", "typer", "rich"),
    *("pytest", "pytest_timeout", "xdist", "hypothesis"),
)
# in a separate process, so that this one has no context on the GPU
_SEES_GPU = (
    "import torch; print(torch.__version__); raise SystemExit(not torch.cuda.is_available())"
)


def lacking(seconds: float, device: str) -> str:
    """Return what the host lacks and how to get it; "" if it lacks nothing."""
    if seconds < LEAST_SECONDS:
        return f"SECONDS must be at least {LEAST_SECONDS} (510 fill ten minutes), got {seconds:g}"
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        return f"missing here: {', '.join(missing)}; pip install -r requirements/gpu-image.txt"
    if device == "cpu":
        return ""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists() or not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "no C compiler (gcc or clang) or no Python.h: Triton needs both"
    command = [sys.executable, "-c", _SEES_GPU]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"torch has not found a GPU within {_MOST_S} s: does nvidia-smi answer?"
    if done.returncode:
        why = f"torch {done.stdout.strip()} sees no GPU"
        if not done.stdout:
            why = (
                f"torch cannot be loaded: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"
            )
        return f"{why}; --device cpu is a rehearsal on the CPU"
    return ""
