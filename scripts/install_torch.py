"""Install torch into this environment: python scripts/install_torch.py OUT [--pinned].

A torch that is here and fits is kept: 2.10 or newer, with --pinned the version of constraints.txt.
On a host without a GPU the build for CPUs is taken where it can be had: from pip's own sources,
from the index that TORCH_INDEX names, or by uv's --torch-backend. Else it is the build for CUDA.
Writes constraints to OUT for what is installed next: the project's, for the torch that is here.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
# of pyproject.toml
LEAST = (2, 10)
# what torch brings in versions of its own
BROUGHT = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
CUDA_SIZE = "3 GB to fetch, 5 GB on disk"


def main() -> None:
    """Install torch where none fits, and write the constraints for what comes after it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="file of constraints")
    parser.add_argument("--pinned", action="store_true", help="keep no other version")
    args = parser.parse_args()
    pins = CONSTRAINTS.read_text()
    pinned = re.search(r"^torch==(\S+)", pins, re.MULTILINE)[1]
    here = _torch_here()
    if here is None or not _fits(here, pinned, pinned_alone=args.pinned):
        install(pinned)
    elif here.partition("+")[0] != pinned:
        _say(f"torch {here} is here and is kept; raybatch is tested with {pinned}")
        pins = "".join(line for line in pins.splitlines(True) if not BROUGHT.match(line))
    args.out.write_text(pins)


def install(pinned: str) -> None:
    """Install the pinned version, the build for CPUs where the host has no GPU."""
    index = os.environ.get("TORCH_INDEX")
    options = ["--extra-index-url", index] if index else []
    wants_cpu = sys.platform == "linux" and not _has_gpu()
    if wants_cpu and not index and _brings_cuda(pinned):
        _say("this host has no GPU: asking uv for the build of torch for CPUs")
        if _installed_by_uv(pinned):
            return
        _say(f"no build of torch for CPUs could be had: taking the one for CUDA, {CUDA_SIZE}")
        _say("an index that has it can be named: make demo TORCH_INDEX=URL")
    elif not wants_cpu and sys.platform == "linux":
        _say(f"this host has a GPU: taking the build of torch for CUDA, {CUDA_SIZE}")
    # not quiet: what takes minutes shows its progress
    _pip("install", *options, f"torch=={pinned}")


def _torch_here() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _fits(here: str, pinned: str, *, pinned_alone: bool) -> bool:
    if pinned_alone:
        return here.partition("+")[0] == pinned
    return tuple(map(int, re.findall(r"\d+", here)[:2])) >= LEAST


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _brings_cuda(pinned: str) -> bool:
    """Whether torch from pip's own sources comes with CUDA's libraries."""
    command = ("install", "--quiet", "--dry-run", "--report", "-")
    report = _pip(*command, f"torch=={pinned}", output=True)
    names = [found["metadata"]["name"] for found in json.loads(report)["install"]]
    return any(name.startswith("nvidia") for name in names)


def _installed_by_uv(pinned: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        uv = shutil.which("uv")
        if uv is None:
            _pip("install", "--quiet", "--target", folder, "uv")
            uv = str(Path(folder, "bin", "uv"))
        command = [uv, "pip", "install", "--python", sys.executable, "--constraint", CONSTRAINTS]
        command += ["--torch-backend", "cpu", "--link-mode", "copy", f"torch=={pinned}"]
        environment = os.environ | {"UV_HTTP_RETRIES": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        _say(done.stderr.strip())
    return done.returncode == 0


def _pip(*arguments: str, output: bool = False) -> str:
    options = ["--disable-pip-version-check", "--constraint", str(CONSTRAINTS)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, *options],
        stdout=subprocess.PIPE if output else None,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout if output else ""


def _say(text: str) -> None:
    print(f"install_torch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
