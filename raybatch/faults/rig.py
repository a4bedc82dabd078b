"""A small job on the fake backend, drivers that run it, and what its output should hold.

What is killed is found by its process id below a driver that was started here, never by name.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.audit import audit
from raybatch.durable.fault_points import REACHED
from raybatch.durable.layout import DATA, SUCCESS
from raybatch.durable.protocols import Store
from raybatch.durable.store import open_store
from raybatch.errors import RaybatchError
from raybatch.stages.plan.store import read_plan, read_units

__all__ = ["NUM_ROWS", "NUM_UNITS", "Checked", "Driver", "Rig", "kill_family", "wait_until"]

NUM_ROWS = 720
NUM_UNITS = 40
_ROWS_PER_FILE = 240
_POLL_S = 0.05

Answers = Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What an output holds, by its audit and by its rows.

    Args:
        expected: rows of the source.
        written: rows of the output.
        lost: rows that are not there.
        duplicated: rows that are there again.
        wrong: rows whose text is not that of a run without faults.
        is_clean: the audit found nothing, and `_SUCCESS` is there.
    """

    expected: int
    written: int
    lost: int
    duplicated: int
    wrong: int
    is_clean: bool

    @property
    def is_right(self) -> bool:
        """Return whether every row is there once, with its text."""
        return self.is_clean and not (self.lost or self.duplicated or self.wrong)


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A folder with a job in it.

    Args:
        folder: short, because Ray keeps sockets below it.
        sink: of the job; None is a folder below.
        source: of the job; None is a folder below.
        variables: environment of the drivers.
        step_s: of the engines.
        unit_rows: rows of a unit.
        partition_by: columns that lay out the output.
    """

    folder: Path
    sink: str | None = None
    source: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    step_s: float = 0.01
    unit_rows: int = NUM_ROWS // NUM_UNITS
    partition_by: tuple[str, ...] = ()

    @property
    def sink_uri(self) -> str:
        """Return where the output goes."""
        return self.sink or str(self.folder / "out")

    @property
    def source_uri(self) -> str:
        """Return where the input lies."""
        return self.source or str(self.folder / "in")

    def prepare(self) -> None:
        """Write source and job file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = pa.table(
            {
                # neighbours share a beginning, so that there is something to plan
                "prompt": [f"chapter {i // 24}: question {i} of many" for i in range(NUM_ROWS)],
                "number": pa.array(range(NUM_ROWS)),
                "third": [i % 3 for i in range(NUM_ROWS)],
            }
        )
        fs, root = fsspec.core.url_to_fs(self.source_uri)
        fs.makedirs(root, exist_ok=True)
        for first in range(0, NUM_ROWS, _ROWS_PER_FILE):
            with fs.open(f"{root}/{first:04d}.parquet", "wb") as file:
                pq.write_table(rows.slice(first, _ROWS_PER_FILE), file)
        self.job_file.write_text(json.dumps(self._job()))

    @property
    def job_file(self) -> Path:
        """Return the path of the job file; JSON is YAML."""
        return self.folder / "job.yaml"

    def start(self, *, name: str = "a", fault: str | None = None) -> "Driver":
        """Start a driver with a Ray cluster of its own, or in the one that the variables name.

        Args:
            name: of its folder; two drivers at once need two.
            fault: point where its processes die.
        """
        variables = {**os.environ, **self.variables}
        variables.pop("RAYBATCH_FAULT", None)
        if "RAY_ADDRESS" not in self.variables:
            variables.pop("RAY_ADDRESS", None)
        if fault is not None:
            variables["RAYBATCH_FAULT"] = fault
        return Driver.start(self.job_file, self.folder / name, variables)

    def store(self) -> Store:
        """Return the store of the sink."""
        return open_store(self.sink_uri)

    def num_parts(self) -> int:
        """Return how many units are in the output."""
        fs, root = fsspec.core.url_to_fs(self.sink_uri)
        fs.invalidate_cache()
        try:
            return len(fs.ls(f"{root}/{DATA}", detail=False))
        except OSError:
            return 0

    def num_generated(self) -> int:
        """Return how many rows engines have finished, those of every run."""
        path = self.folder / "finished"
        return path.stat().st_size if path.exists() else 0

    def answers(self) -> Answers:
        """Return the text of every row of the output."""
        table = self._rows()
        return dict(
            zip(table["number"].to_pylist(), table["generated_text"].to_pylist(), strict=True)
        )

    def check(self, expected: Answers) -> Checked:
        """Compare the output with its plan and with that of a run without faults."""
        store = self.store()
        try:
            stored = read_plan(self.sink_uri)
            is_clean = audit(store, read_units(self.sink_uri, stored)).is_clean
            rows = self._rows()
        except (RaybatchError, pa.ArrowInvalid):
            return Checked(expected=NUM_ROWS, written=0, lost=NUM_ROWS, duplicated=0, wrong=0,
                           is_clean=False)  # fmt: skip
        numbers, texts = rows["number"].to_pylist(), rows["generated_text"].to_pylist()
        ids = rows["row_id"].to_pylist()
        pairs = zip(numbers, texts, strict=True)
        return Checked(
            expected=NUM_ROWS,
            written=len(numbers),
            lost=len(set(expected) - set(numbers)),
            duplicated=len(numbers) - min(len(set(numbers)), len(set(ids))),
            wrong=sum(expected.get(number) != text for number, text in pairs),
            is_clean=is_clean and store.size(SUCCESS) is not None,
        )

    def _rows(self) -> pa.Table:
        store = self.store()
        parts = [pq.read_table(pa.BufferReader(store.read(name))) for name in store.names(DATA)]
        return pa.concat_tables(
            part.select(["number", "row_id", "generated_text"]) for part in parts
        )

    def _job(self) -> dict[str, Any]:
        options = {
            "step_s": self.step_s,
            "max_num_seqs": 16,
            "lengths": "hash",
            "finished_log": str(self.folder / "finished"),
        }
        return {
            "source": self.source_uri,
            "sink": self.sink_uri,
            "flush_every_s": 0.3,
            "partition_by": list(self.partition_by),
            "plan": {"unit_rows": self.unit_rows, "max_unit_rows": self.unit_rows},
            "stage": {
                "model": "demo",
                "prompt": "{prompt}",
                "sampling": {"max_tokens": 32},
                "pool": {"replicas": 2},
                "backend": {"kind": "fake", "options": options},
            },
        }


@dataclass(kw_only=True)
class Driver:
    """A driver that was started here, and every process below it that was seen.

    Args:
        process: the driver alone.
        folder: of its log and of Ray's files.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        job_file: Path | str,
        folder: Path,
        variables: Mapping[str, str],
        *,
        module: str = "raybatch.faults.driver",
    ) -> "Driver":
        """Start one in a session of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "driver.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(job_file), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(variables),
                start_new_session=True,
            )
        return cls(process=process, folder=folder)

    @property
    def is_running(self) -> bool:
        """Return whether the driver itself lives."""
        return self.process.poll() is None

    def family(self) -> list[psutil.Process]:
        """Return the processes below the driver, and remember them."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)
        return [process for process in self.seen.values() if process.is_running()]

    def workers(self, title: str) -> list[psutil.Process]:
        """Return the processes of actors whose title begins so."""
        return [process for process in self.family() if _title(process).startswith(f"ray::{title}")]

    def kill(self) -> None:
        """End the driver alone, as SIGKILL does."""
        self.family()
        self.process.kill()
        self.process.wait()

    def kill_tree(self) -> None:
        """End the driver and everything below it."""
        family = self.family()
        with suppress(ProcessLookupError):
            self.process.kill()
        kill_family(family)
        self.process.wait()
        # what was started while the others were ended
        kill_family(self.family())

    def has_reached(self) -> bool:
        """Return whether a process died at the point that was armed."""
        logs = self.folder.glob("session_*/logs/worker-*.err")
        marks = (path.read_bytes() for path in [*logs, self.folder / "driver.log"])
        return any(REACHED.encode() in mark for mark in marks)

    def last_words(self) -> str:
        """Return the end of the log."""
        return (self.folder / "driver.log").read_text(errors="replace")[-2000:]


def wait_until(is_so: Callable[[], bool], driver: Driver, *, timeout_s: float = 120.0) -> bool:
    """Wait for something while a driver runs; return whether it came to be.

    Raises:
        TimeoutError: neither that nor the end of the driver came.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if not driver.is_running:
            return is_so()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a driver hangs: {driver.last_words()}")
        driver.family()
        time.sleep(_POLL_S)
    return True


def kill_family(family: list[psutil.Process]) -> None:
    """End processes of ours; a process id that is somebody else's by now is left alone."""
    for process in family:
        # psutil compares the time of the start before it sends a signal
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
