"""Runs vLLM on the rows of a setting with the same KV memory, in a separate process."""

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_loop import PeerConfig, Settings
from peer_process import PeerProcess
from suites import PEERS
from workloads_e2e import Workload, build, longest

# vLLM's CPU kernels are slow with other sizes
BLOCK_SIZE = 32


def settings_of(workload: Workload, kv_tokens: int) -> Settings:
    """Return the peer's options; the pool always has room for the longest row."""
    row_blocks = -(-longest(build(workload)) // BLOCK_SIZE)
    return Settings(
        kv_tokens=max(kv_tokens // BLOCK_SIZE, row_blocks + 1) * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=1024,
        max_model_len=row_blocks * BLOCK_SIZE,
    )


def measure(
    python: Path,
    folder: Path,
    workload: Workload,
    *,
    kv_tokens: int,
    repetitions: int,
    expected: Sequence[str],
) -> dict[str, Any]:
    """Return CPU seconds of the process tree, and how many rows have the same tokens as ours.

    Args:
        python: Python of an environment with vLLM.
        expected: digests of our rows, in order.
    """
    peer = PEERS["vllm-eager"]
    config = PeerConfig(
        model=str(folder), variant=peer.variant, settings=settings_of(workload, kv_tokens)
    )
    # one thread, like our engine
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "vllm.log"
        try:
            with PeerProcess(peer, python.absolute(), config, log) as process:
                loaded = process.answer()
                process.run(workload, [0], is_warm_up=True)
                runs = [process.run(workload, None) for _ in range(repetitions)]
        except RuntimeError as error:
            tail = log.read_text(encoding="utf-8")[-2000:] if log.exists() else ""
            raise SystemExit(f"{error}{os.linesep}{tail}") from error
    equal = [a == b for a, b in zip(runs[0]["row_digests"], expected, strict=True)]
    return {
        "versions": loaded["versions"],
        "cpu_s": [round(run["tree_cpu_s"], 3) for run in runs],
        "median_cpu_s": statistics.median(run["tree_cpu_s"] for run in runs),
        "foreign_cores": [round(run["foreign_cores"], 2) for run in runs],
        "counters": runs[0]["counters"],
        "num_rows": len(equal),
        "equal_rows": sum(equal),
    }
