"""Drivers of jobs as separate processes, and everything below them.

Only processes below a driver that was started here are killed, by process id, never by name.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from raybatch.durable.fault_points import REACHED

_POLL_S = 0.05


@dataclass(kw_only=True)
class Driver:
    """A driver that was started here, and every process below it that was seen.

    Args:
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
        module: str = "faultlab.driver",
    ) -> "Driver":
        """Start one in its own session."""
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
        # processes that started while the others were ended
        kill_family(self.family())

    def has_reached(self) -> bool:
        """Return whether a process died at the point that was armed."""
        logs = self.folder.glob("session_*/logs/worker-*.err")
        return any(REACHED.encode() in _content(log) for log in [*logs, self.folder / "driver.log"])

    def last_words(self) -> str:
        """Return the end of the log."""
        return (self.folder / "driver.log").read_text(errors="replace")[-2000:]


def wait_until(
    is_so: Callable[[], bool], driver: Driver, *, timeout_s: float = 400.0, poll_s: float = _POLL_S
) -> bool:
    """Wait for a condition while a driver runs; return whether it holds.

    Args:
        is_so: the condition.
        driver: that runs.
        timeout_s: after which the driver counts as hanging.
        poll_s: between two checks, each of which goes through the processes of the host.

    Raises:
        TimeoutError: the condition does not hold and the driver does not end.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if not driver.is_running:
            return is_so()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a driver hangs: {driver.last_words()}")
        driver.family()
        time.sleep(poll_s)
    return True


def kill_family(family: list[psutil.Process]) -> None:
    """End processes of ours; a process id that another process has by now is left alone."""
    for process in family:
        # psutil compares the time of the start before it sends a signal
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)


def _content(log: Path) -> bytes:
    # Ray gives the log of a worker another name once the worker has a job: the next look finds it
    try:
        return log.read_bytes()
    except FileNotFoundError:
        return b""


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
