"""Input and output of each stage: a device, a deadline, and a JSON file that grows as it runs."""

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kernels.triton.numpy_scalars import settle_interpreter

# seconds before its deadline at which a stage stops by itself, to write its results
_MARGIN_S = 2.0


@dataclass(kw_only=True)
class Stage:
    """Runs the steps of one stage of the call and writes their results.

    Args:
        device: "cuda" or "cpu"; on a CPU shapes are small and Triton interprets.
        end: deadline in seconds of `time.monotonic`.
        work: folder that all stages share.
    """

    name: str
    device: str
    end: float
    work: Path
    found: dict[str, Any] = field(
        default_factory=lambda: {"figures": [], "wrong": [], "failed": [], "skipped": []}
    )

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def left_s(self) -> float:
        return self.end - _MARGIN_S - time.monotonic()

    def put(self, **fields: Any) -> None:
        """Add results, and write the file."""
        self.found |= fields
        path = self.work / f"{self.name}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1, default=str))
        os.replace(part, path)

    def figure(self, text: str) -> None:
        """Add a line for the table, which shows the first lines of each stage."""
        self.found["figures"].append(text)
        self.put()

    def wrong(self, text: str) -> None:
        """Note a wrong result."""
        self.found["wrong"].append(text)
        self.put()

    def attempt(self, what: str, run: Callable[[], Any], *, needs_s: float = 0.0) -> Any:
        """Return the result of `run`; note why and return None if it fails or has no time."""
        if self.left_s() < needs_s:
            self.found["skipped"].append(what)
            self.put()
            return None
        try:
            return run()
        # kernels, compilers and drivers raise any exception, and the rest can continue
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            self.found["failed"].append(f"{what}: {type(error).__name__}: {text[:400]}")
            self.put()
            traceback.print_exc()
            return None

    def of(self, name: str) -> dict[str, Any]:
        """Return the results of another stage so far; nothing if it has not run."""
        path = self.work / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def num_processors() -> int:
    """Return how many processors this process may use, by its affinity and its container."""
    number = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        number = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(number, round(int(quota) / int(period))))
    # no such file on this system, or the quota is "max"
    except (OSError, ValueError):
        return number


def run_stage(name: str, main: Callable[[Stage], None]) -> None:
    """Run a stage with the command-line arguments of its process."""
    parser = argparse.ArgumentParser(description=f"the stage {name} of scripts/gpu_call.sh")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    stage = Stage(name=name, device=args.device, end=end, work=args.work)
    stage.put()
    if os.environ.get("TRITON_INTERPRET") == "1":
        settle_interpreter()
    main(stage)
    stage.put()
