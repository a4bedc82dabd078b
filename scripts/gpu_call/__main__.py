"""Runs all stages and puts their results into a few files: `python -m gpu_call SECONDS`."""

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_call.cache import pack
from gpu_call.needs import lacking
from gpu_call.plan import PLAN, Ended, run_plan
from gpu_call.table import OWN, status, table

# stages whose results are all in facts.json
_FACTS = ("env", "ceilings", "forms", "check", "kernel_tests")
_FILES = (
    "facts.json",
    *(f"{name}.json" for name in OWN),
    "junit.xml",
    "trace.json.gz",
    "tc.tar.gz",
)
_MAX_BYTES = 15 << 20
_LOG_LINES = 60


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_call.sh", description="Run the native engine's checks on one GPU."
    )
    parser.add_argument("seconds", type=float, help="limit of all stages; 510 fit into ten minutes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    # set by the script
    parser.add_argument("--out", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if problem := lacking(args.seconds, args.device):
        parser.exit(2, f"scripts/gpu_call.sh: {problem}\n")
    # SIGTERM ends the running stage too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (args.out / name).unlink(missing_ok=True)
    began = time.monotonic()
    finished: list[Ended] = []
    # stages may end in parallel
    writing = threading.Lock()

    def tell(stage: Ended) -> None:
        with writing:
            finished.append(stage)
            found = _found(args.work)
            _collect(finished, found, args.work, args.out)
        text = status(stage, found.get(stage.name, {}))
        seconds = time.monotonic() - began
        print(f"{seconds:5.0f} s: {stage.name} {text}", file=sys.stderr, flush=True)

    ended = run_plan(PLAN, seconds=args.seconds, device=args.device, logs=args.work, ended=tell)
    found = _found(args.work)
    _collect(ended, found, args.work, args.out)
    cache, archive = Path(os.environ["TRITON_CACHE_DIR"]), args.out / "tc.tar.gz"
    if not pack(cache, archive, max_bytes=_MAX_BYTES):
        print(f"left out {archive.name}: larger than {_MAX_BYTES} bytes", file=sys.stderr)
    print("\n".join(table(ended, found)))
    sys.exit(any(status(stage, found.get(stage.name, {})) != "ok" for stage in ended))


def _found(work: Path) -> dict[str, dict[str, Any]]:
    paths = ((stage.name, work / f"{stage.name}.json") for stage in PLAN)
    return {name: json.loads(path.read_text()) for name, path in paths if path.exists()}


def _collect(
    ended: Sequence[Ended], found: Mapping[str, Mapping[str, Any]], work: Path, out: Path
) -> None:
    """Write the results so far, so that an interrupted call leaves them."""
    card = found.get("env", {}).get("name", "unknown")
    stages = {
        each.name: {
            "status": status(each, found.get(each.name, {})),
            "seconds": round(each.seconds, 1),
            "log": each.log.splitlines()[-_LOG_LINES:],
        }
        for each in ended
    }
    facts = {name: found[name] for name in _FACTS if name in found}
    _write(out / "facts.json", {"card": card, "stages": stages, **facts})
    for name in OWN:
        if name in found:
            _write(out / f"{name}.json", {"card": card, **found[name]})
    for name in ("junit.xml", "trace.json.gz"):
        if (work / name).exists() and (work / name).stat().st_size <= _MAX_BYTES:
            shutil.copyfile(work / name, out / name)


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=1))


if __name__ == "__main__":
    main()
