"""Runs the tests of the kernels, compiled on a GPU, and the tests that need a GPU."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from gpu_call.stage import Stage, num_processors, run_stage

ROOT = Path(__file__).resolve().parents[2]
_KERNELS = "tests/kernels/triton"
# these compile or interpret, whatever the device
_IGNORED = ("compile", "far_rows", "forms", "meta", "order", "programs", "varlen")
_FOR_GPUS = (
    "tests/engine/forward/test_step_graphs.py",
    "tests/engine/memory/test_kv_tiers.py",
    "tests/engine/weights/test_streamed_layers.py",
    "tests/extensions/sharing/test_segments.py",
)
_FEW = ("tests/kernels/triton/test_triton_rows_without_keys.py",)
# the CUDA context of each worker takes memory and seconds
_MOST_WORKERS = 12
_SHARE_OF_KERNELS = 0.75


def main(stage: Stage) -> None:
    kernels = [_KERNELS, *(f"--ignore={_KERNELS}/test_triton_{name}.py" for name in _IGNORED)]
    if stage.is_gpu:
        runs = {"kernels": (kernels, _SHARE_OF_KERNELS), "gpu": ([*_FOR_GPUS, "-m", "gpu"], 1.0)}
    else:
        runs = {"kernels": (list(_FEW), 1.0)}
    counts: Counter[str] = Counter()
    for name, (arguments, share) in runs.items():
        path = stage.work / f"junit-{name}.xml"
        code = _pytest(arguments, path, seconds=share * stage.left_s(), device=stage.device)
        outcome = _outcome(path)
        counts.update(outcome)
        stage.put(**{name: {"exit_code": code, **outcome}})
        if not outcome:
            stage.found["failed"].append(f"pytest of {name} ended with {code} and left no report")
        elif code and not {"failure", "error"} & outcome.keys():
            message = (
                f"pytest of {name} stopped after {sum(outcome.values())} tests (exit code {code})"
            )
            stage.found["failed"].append(message)
    _merge(stage.work)
    stage.found["failed"] += _failures(stage.work / "junit.xml")
    stage.figure(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


def _pytest(arguments: list[str], path: Path, *, seconds: float, device: str) -> int:
    num_workers = min(_MOST_WORKERS, num_processors()) if device == "cuda" else 1
    workers = ["-n", str(num_workers)]
    ends = [f"--session-timeout={max(5, seconds):.0f}"]
    command = [
        *(sys.executable, "-m", "pytest", *arguments, *workers, *ends),
        *("-q", "-W", "ignore", "--continue-on-collection-errors", "-p", "no:cacheprovider"),
        *("--tb=short", f"--junitxml={path}"),
    ]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def _outcome(path: Path) -> dict[str, int]:
    """Return how many tests passed, failed and so on; nothing if there is no report."""
    if not path.exists():
        return {}
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        counts[kinds[0] if kinds else "passed"] += 1
    return dict(counts)


def _merge(folder: Path) -> None:
    """Merge the reports of all runs into one."""
    whole = ElementTree.Element("testsuites")
    for path in sorted(folder.glob("junit-*.xml")):
        whole.extend(ElementTree.parse(path).getroot())
    ElementTree.ElementTree(whole).write(folder / "junit.xml")


def _failures(path: Path) -> list[str]:
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        for child in case:
            if child.tag in ("failure", "error"):
                reason = (child.get("message") or "").strip().splitlines()[:1]
                found.append(f"{case.get('name')}: {reason[0][:200] if reason else child.tag}")
    return found


if __name__ == "__main__":
    run_stage("kernel_tests", main)
