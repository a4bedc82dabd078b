"""Jobs as most tests want them: without Ray, in this process, in a fraction of a second."""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raybatch.durable.sink import prepare_sink
from raybatch.job.executor import Executor
from raybatch.job.job import Job
from raybatch.job.run import JobExecution
from raybatch.job.watching import RunClock
from raybatch.planning.run import store_input_order
from raybatch.stages.feeder import StageFeeder

__all__ = ["LARGE", "Hold", "executor_for", "local_job", "press_ctrl_c", "store_plan"]

# what makes a plan one of Ray's tasks; a test with it is marked so
LARGE = {"max_driver_bytes": 1}


def local_job(
    source: str | Path,
    sink: str | Path,
    stage: type[StageFeeder],
    *,
    plan: Mapping[str, Any] | str | None = None,
    **options: Any,
) -> Job:
    """Return a job that runs without Ray, unless its plan is `LARGE`."""
    options.setdefault("executor", executor_for(plan))
    return Job(source, sink, stage, plan=plan, **options)


def press_ctrl_c() -> None:
    """Interrupt the main thread, from any thread, as Ctrl-C does: what it waits for is woken."""
    ident = threading.main_thread().ident
    assert ident is not None, "it runs"
    signal.pthread_kill(ident, signal.SIGINT)


class Hold:
    """Holds fake engines after some rows, so that a run is always interrupted before its end.

    Args:
        folder: of the test.
        num_rows: that an engine finishes before it is held. Rows of all units may run at once: for
            whole units take all rows but as many as run at once.
    """

    def __init__(self, folder: Path, num_rows: int) -> None:
        self._file = folder / "hold"
        self._file.touch()
        self.options = {"hold_file": str(self._file), "hold_after": num_rows}

    def release(self) -> None:
        """Let engines continue, those of later runs too."""
        self._file.unlink()


def executor_for(plan: Mapping[str, Any] | str | None) -> str:
    """Return where a job with this plan can run."""
    is_large = isinstance(plan, Mapping) and plan.get("max_driver_bytes") == 1
    return "ray" if is_large else "local"


def store_plan(job: Job) -> None:
    """Leave the plan of a job in its sink, as a driver does that ends before any row is at work."""
    prepare_sink(job.config.sink, is_overwrite=False)
    run = JobExecution(
        config=job.config,
        stage=job._stage,
        source=job._scan(),
        clock=RunClock(),
        executor=Executor(is_local=True, reason="of the test"),
    )
    store_input_order(run.described())
