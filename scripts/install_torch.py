"""Install torch into this environment: python scripts/install_torch.py OUT [--pinned].

An installed torch that fits is kept: 2.10 or newer, with --pinned the version of constraints.txt.
The torch of the Python that made the environment counts too. On a host without a GPU the script
installs the CPU build if one is available: from pip's sources, from the index that TORCH_INDEX
names, or by uv's --torch-backend. Otherwise it installs the CUDA build. It writes the constraints
for the next installs to OUT: those of the project, adapted to the installed torch.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
# as in pyproject.toml
MIN_TORCH = (2, 10)
CUDA_SIZE = "3 GB to fetch, 5 GB on disk"
# an older pip downloads packages even in a dry run
NEW_PIP = "pip>=25.3"
# prints the version of a Python's torch ("" if files are missing) and its dependencies
FACTS = """
import csv, importlib.metadata, json, os
torch = importlib.metadata.distribution("torch")
# torch.files leaves out missing files, from Python 3.12 on
files = [row[0] for row in csv.reader((torch.read_text("RECORD") or "").splitlines()) if row]
is_whole = all(os.path.exists(torch.locate_file(file)) for file in files)
print(json.dumps([torch.version if is_whole else "", torch.requires or []]))
"""


def main() -> None:
    """Install torch if no installed one fits, and write the constraints for the next installs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write constraints to")
    parser.add_argument("--pinned", action="store_true", help="keep no other version")
    args = parser.parse_args()
    pins = CONSTRAINTS.read_text()
    pinned = re.search(r"^torch==(\S+)", pins, re.MULTILINE)[1]
    kept = _kept_torch(pinned, pinned_alone=args.pinned)
    if kept is None:
        install(pinned)
    else:
        version, requires = kept
        brought = {re.match(r"[\w.-]+", need)[0].lower() for need in requires} | {"torch"}
        lines = [line for line in pins.splitlines() if line.partition("==")[0] not in brought]
        # dependencies of another build of torch have other versions
        lines = [line for line in lines if not re.match(r"(triton|nvidia-.*|cuda-.*)==", line)]
        pins = "\n".join([*lines, f"torch=={version}", ""])
    args.out.write_text(pins)


def install(pinned: str) -> None:
    """Install the pinned version; the CPU build if the host has no GPU and the build exists."""
    wanted = f"torch=={pinned}"
    index = os.environ.get("TORCH_INDEX")
    options = ("--extra-index-url", index) if index else ()
    _pip("install", "--quiet", NEW_PIP)
    if _brings_cuda(wanted, options):
        if _has_gpu():
            _say(f"this host has a GPU: installing torch's CUDA build, {CUDA_SIZE}")
        elif index:
            raise SystemExit(f"TORCH_INDEX={index} has no CPU build of {wanted} for this Python")
        elif _is_installed_by_uv(wanted):
            return
        else:
            _say(f"no CPU build of torch is available here: installing the CUDA build, {CUDA_SIZE}")
            _say("to name an index that has the CPU build: make demo TORCH_INDEX=URL")
    # not quiet: the download takes minutes and shows its progress
    _pip("install", *options, wanted)


def _kept_torch(pinned: str, *, pinned_alone: bool) -> tuple[str, list[str]] | None:
    """Return version and requirements of the torch to keep, here or in the base Python."""
    base = getattr(sys, "_base_executable", sys.executable)
    for python in dict.fromkeys((sys.executable, base)):
        found = subprocess.run([python, "-c", FACTS], capture_output=True, text=True)
        if found.returncode:
            continue
        version, requires = json.loads(found.stdout)
        release = tuple(map(int, re.findall(r"\d+", version)[:2]))
        is_pinned = version.partition("+")[0] == pinned
        if not is_pinned and (pinned_alone or release < MIN_TORCH):
            if python == sys.executable:
                _say(f"torch {version or '(incomplete)'} is replaced by {pinned}")
            continue
        if python != sys.executable:
            _say(f"torch {version} of {python} is used, with the packages there")
            options = ("--system-site-packages", "--without-pip")
            subprocess.run([python, "-m", "venv", *options, sys.prefix], check=True)
        elif not is_pinned:
            _say(f"torch {version} is kept; raybatch is tested with {pinned}")
        return version, requires
    return None


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _brings_cuda(wanted: str, options: tuple[str, ...]) -> bool:
    """Return whether the torch that pip would install comes with CUDA's libraries."""
    command = ("install", "--quiet", "--dry-run", "--report", "-", "--ignore-installed")
    report = json.loads(_pip(*command, *options, wanted))
    names = [found["metadata"]["name"] for found in report["install"]]
    return any(name.startswith("nvidia") for name in names)


def _is_installed_by_uv(wanted: str) -> bool:
    _say("this host has no GPU: asking uv for torch's CPU build")
    with tempfile.TemporaryDirectory() as folder:
        for uv in _uvs(Path(folder)):
            command = [uv, "pip", "install", "--python", sys.executable, "--torch-backend", "cpu"]
            command += ["--constraint", CONSTRAINTS, "--link-mode", "copy", wanted]
            environment = os.environ | {"UV_HTTP_RETRIES": "0"}
            done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
            if done.returncode == 0:
                return True
            _say(done.stderr.strip())
    return False


def _uvs(folder: Path) -> Iterator[str]:
    """Yield the uv of the host, then one from the index, which supports --torch-backend."""
    if here := shutil.which("uv"):
        yield here
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "uv"]
    fetched = folder / "bin" / "uv"
    if subprocess.run(command).returncode == 0 and fetched.exists():
        yield str(fetched)


def _pip(*arguments: str) -> str:
    """Run pip; its output goes to this standard output, but a --report is returned."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    output = subprocess.PIPE if "--report" in arguments else None
    done = subprocess.run([*command, "--constraint", CONSTRAINTS], stdout=output, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def _say(text: str) -> None:
    print(f"install_torch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; run the same command to resume") from None
