"""Starts peers, sends them commands over pipes, and measures them from outside."""

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from memory import EngineMemory, engines_of
from meters import TreeMeter
from peer_loop import PeerConfig
from suites import Peer
from venvs import ROOT, WORK
from workloads_e2e import Workload

HERE = Path(__file__).resolve().parent
# a peer may compile while it loads; a run of the largest workload on a slow peer takes minutes
ANSWER_TIMEOUT_S = 3600.0
# a job that lacks resources waits forever
JOB_TIMEOUT_S = 900.0
# added for each row of a job
ROW_TIMEOUT_S = 0.1
# scripts that import raybatch
OURS = ("peer_raybatch.py", "peer_raybatch_vllm.py", "peer_pool.py")


class PeerError(RuntimeError):
    """A peer died, hung or gave no answer."""


class PeerProcess:
    """Runs and measures one peer; a context manager that ends its process."""

    def __init__(self, peer: Peer, python: Path, config: PeerConfig, log: Path) -> None:
        self._name = peer.name
        self._log = log
        with log.open("a", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(HERE / peer.script), json.dumps(dataclasses.asdict(config))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_environment(peer, config),
                cwd=log.parent,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Wait for the next line.

        Raises:
            PeerError: the process ended, or gave no answer in time.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"{self._name}: no answer within {timeout_s:.0f} s") from None
        if not line:
            self._lines.put("")  # later calls also see that the peer has ended
            code = self._process.wait()
            raise PeerError(f"{self._name} exited with code {code}; see {self._log.name}")
        return dict(json.loads(line))

    def run(
        self, workload: Workload, rows: Sequence[int] | None, *, is_warm_up: bool = False
    ) -> dict[str, Any]:
        """Run requests on the peer; return its answer with measurements from outside."""
        command = {
            "workload": dataclasses.asdict(workload),
            "rows": list(rows) if rows is not None else None,
            "is_warm_up": is_warm_up,
        }
        stdin = self._process.stdin
        if stdin is None:
            raise PeerError(f"{self._name} takes no commands")
        # the processes outlive the run, so only the first and the last sample matter
        with TreeMeter(self._process.pid, interval_s=5.0) as meter:
            with contextlib.suppress(BrokenPipeError):  # if the peer is dead, `answer` raises
                stdin.write(json.dumps(command) + "\n")
                stdin.flush()
            answer = self.answer()
        return answer | {"tree_cpu_s": meter.cpu_s, "foreign_cores": meter.foreign_cores}

    def engine_memories(self) -> list[EngineMemory]:
        """Return the memory of each engine of raybatch below this peer."""
        return engines_of(self._process.pid)

    def finish(self, num_rows: int) -> tuple[dict[str, Any], TreeMeter]:
        """Wait for the answer and the exit of a job, and measure it from now on."""
        with TreeMeter(self._process.pid) as meter:
            answer = self.answer(JOB_TIMEOUT_S + ROW_TIMEOUT_S * num_rows)
            self._process.wait()
        return answer, meter

    def close(self) -> None:
        """Close stdin, which ends the peer; kill the peer if it does not end."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # a grandchild that outlives the peer may hold the pipe open
        self._reader.join(timeout=5)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")


def _environment(peer: Peer, config: PeerConfig) -> dict[str, str]:
    threads = str(config.settings.num_threads)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Ray's default niceness of 15 would make the peers incomparable
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # the default of 32 processes slows a small machine down
        "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1",
        "VLLM_CACHE_ROOT": str(WORK / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(WORK / "cache" / "inductor"),
    }
    if peer.script in OURS:
        # import this tree, even if the venv has another raybatch
        environment["PYTHONPATH"] = str(ROOT)
    return environment
