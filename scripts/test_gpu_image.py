"""Run all checks that need no GPU with the packages of a GPU host, and keep the results.

    python scripts/test_gpu_image.py [--only PART] [--out FILE]

Kernels run in Triton's interpreter and are compiled for an H100, engines and whole models on the
CPU; then `raybatch bench gpu` and the whole of `scripts/gpu_call.sh`. Versions, counts and seconds
are written to benchmarks/results; `--only` replaces one part in the existing file.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors", "pyarrow")
KERNELS = "tests/kernels/triton"
ENGINE = (
    *("forward/test_half_precision", "forward/test_step_graph", "forward/test_step_graphs"),
    *("forward/test_grouped_experts", "forward/test_models_match_transformers"),
    *("loading/test_graph_setup", "loading/test_peak_memory", "memory/test_pinned_memory"),
    *("test_gpu_calls", "test_phases", "test_step_ahead"),
)
# workers of pytest, and time limits of a test and of the call, which allow for a busy machine
WORKERS, TEST_S, CALL_S = 2, 900, 1200
# output lines that are shown of a part that fails
_SHOWN = 40
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|deselected|error)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    today = datetime.date.today().isoformat()
    default = ROOT / "benchmarks/results" / f"{today}-gpu-image.json"
    parser.add_argument("--only", action="append", choices=list(parts()), default=[])
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": cuda_version()}
    found["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    if not found["cuda"]:
        raise SystemExit("torch is a CPU build; install the CUDA build from PyPI, as in the image")
    is_there = args.only and args.out.exists()
    found["parts"] = json.loads(args.out.read_text())["parts"] if is_there else {}
    for name, run in parts().items():
        if args.only and name not in args.only:
            continue
        began = time.monotonic()
        result = run()
        result["seconds"] = round(time.monotonic() - began)
        found["parts"][name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {args.out}")
    sys.exit(any(part["exit_code"] for part in found["parts"].values()))


def parts() -> Mapping[str, Callable[[], dict[str, Any]]]:
    engine = [f"tests/engine/{name}.py" for name in ENGINE]
    engine.append("tests/backends/test_native_backend.py")
    compiled = f"{KERNELS}/test_triton_compile.py"
    models = f"{KERNELS}/test_triton_model.py"
    return {
        "kernels interpreted": partial(pytest, KERNELS, f"--ignore={compiled}"),
        "kernels compiled for an H100": partial(pytest, compiled, "-m", "not exhaustive"),
        "whole models": partial(pytest, models, "-m", "slow and not exhaustive"),
        "engine": partial(pytest, *engine),
        "raybatch bench gpu": bench,
        "scripts/gpu_call.sh": call,
    }


def cuda_version() -> str | None:
    import torch

    return torch.version.cuda


def pytest(*arguments: str) -> dict[str, Any]:
    """Run tests and return the exit code and the counts of outcomes."""
    options = ["-q", "-n", str(WORKERS), f"--timeout={TEST_S}", "-p", "no:cacheprovider"]
    done = run([sys.executable, "-m", "pytest", *options, *arguments])
    lines = done.stdout.strip().splitlines() or [""]
    if done.returncode:
        print("\n".join(lines[-_SHOWN:]), file=sys.stderr)
    counts = {name: int(count) for count, name in _COUNT.findall(lines[-1])}
    return {"exit_code": done.returncode, **counts}


def bench() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "raybatch", "bench", "gpu", "--device", "cpu"]
        options = ["--minutes", "10", "--engines", "native", "--out", str(out)]
        done = run([*command, *options])
        report = json.loads(out.read_text()) if out.exists() else {}
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    names = ("checked", "failures", "skipped")
    return {"exit_code": done.returncode, **{name: report.get(name) for name in names}}


def call() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        variables = {"PYTHON": sys.executable, "OUT": folder}
        done = run(["scripts/gpu_call.sh", str(CALL_S), "--device", "cpu"], variables)
        facts = Path(folder) / "facts.json"
        stages = json.loads(facts.read_text())["stages"] if facts.exists() else {}
    print(done.stdout)
    return {"exit_code": done.returncode, "stages": {n: s["status"] for n, s in stages.items()}}


def run(
    command: list[str], variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    # on a busy machine, OpenMP threads of several workers spend their time waiting for each other
    paths = f"{ROOT / 'lab'}{os.pathsep}{ROOT / 'scripts/stand_ins'}"
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **(variables or {})}
    environment = os.environ | settings
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    main()
