"""Lists the stages with their deadlines, and runs each stage in a process."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# seconds between SIGINT and SIGKILL
_GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A stage: a module of this folder.

    Args:
        ends: deadline on a GPU, as a share of the whole time. Later stages get the time that is
            left.
        ends_on_cpu: deadline on a CPU.
        beside: runs in parallel with the next stages, up to the first that `waits`.
        waits: begins only after the stages in parallel have ended.
        interprets: runs in Triton's interpreter if there is no GPU.
    """

    name: str
    ends: float
    ends_on_cpu: float
    beside: bool = False
    waits: bool = True
    interprets: bool = True


PLAN = (
    Planned(name="forms", ends=0.16, ends_on_cpu=0.2, beside=True, interprets=False),
    Planned(name="env", ends=0.08, ends_on_cpu=0.26, waits=False),
    Planned(name="ceilings", ends=0.155, ends_on_cpu=0.32, waits=False),
    Planned(name="check", ends=0.24, ends_on_cpu=0.5),
    Planned(name="kernel_tests", ends=0.4, ends_on_cpu=0.62),
    Planned(name="engine", ends=0.56, ends_on_cpu=0.72),
    Planned(name="kernels", ends=0.74, ends_on_cpu=0.84),
    Planned(name="steps", ends=0.83, ends_on_cpu=0.94),
    Planned(name="bench", ends=0.985, ends_on_cpu=0.99),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a stage ended: "ok", "failed" or "timeout"."""

    name: str
    status: str
    seconds: float
    log: str = ""


# makes the command of a stage from its seconds
Command = Callable[[Planned, float], Sequence[str]]


def run_plan(
    plan: Sequence[Planned],
    *,
    seconds: float,
    device: str,
    logs: Path,
    command: Command | None = None,
    environment: Mapping[str, str] | None = None,
    ended: Callable[[Ended], None] = lambda _: None,
) -> list[Ended]:
    """Run every stage, even if others fail; call `ended` with the outcome of each.

    Args:
        logs: folder for the output of the processes.
        command: makes a stage's command; None runs its module.
    """
    begin = time.monotonic()
    done: dict[str, Ended] = {}
    beside: list[threading.Thread] = []
    command = command or _module_of(device, logs)

    def run(stage: Planned) -> None:
        share = stage.ends if device == "cuda" else stage.ends_on_cpu
        left_s = begin + share * seconds - time.monotonic()
        variables = dict(os.environ if environment is None else environment)
        if device == "cpu" and stage.interprets:
            variables["TRITON_INTERPRET"] = "1"
        done[stage.name] = _run(stage, command(stage, left_s), left_s, logs, variables)
        ended(done[stage.name])

    for stage in plan:
        # on a CPU, stages in parallel would take each other's processors
        if stage.beside and device == "cuda":
            beside.append(threading.Thread(target=run, args=(stage,)))
            beside[-1].start()
            continue
        if stage.waits:
            for thread in beside:
                thread.join()
        run(stage)
    for thread in beside:
        thread.join()
    return [done[stage.name] for stage in plan]


def _module_of(device: str, work: Path) -> Command:
    def command(stage: Planned, seconds: float) -> list[str]:
        options = ["--device", device, "--seconds", f"{seconds:.1f}", "--work", str(work)]
        return [sys.executable, "-m", f"gpu_call.{stage.name}", *options]

    return command


def _run(
    stage: Planned, command: Sequence[str], left_s: float, logs: Path, variables: dict[str, str]
) -> Ended:
    began = time.monotonic()
    path = logs / f"{stage.name}.log"
    status = "timeout"
    if left_s > 0:
        with path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, start_new_session=True
            )
            try:
                status = "failed" if process.wait(left_s) else "ok"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
            finally:
                # ends its child processes too; the stage has written its results so far
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = path.read_text(errors="replace") if path.exists() else "there was no time to begin"
    return Ended(name=stage.name, status=status, seconds=time.monotonic() - began, log=text)
