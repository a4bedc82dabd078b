"""Starts Ray for a command, configures Ray Data for commit units, and runs feeder actors."""

import logging
from collections.abc import Generator, Sequence
from typing import Any

import pyarrow as pa
import ray

# the import sets the handlers of its loggers
import ray.data

from raybatch.actors.ray_errors import errors_logged_once, own_cause
from raybatch.stages.feeder import StageFeeder


def settle_context(dataset: Any) -> None:  # noqa: ANN401 - Ray has no types
    """Disable Ray Data's no-progress timeout, and its checkpoints, as commit units record rows."""
    context = dataset.context
    # A run of long outputs may finish no block for half an hour, and progress is shown elsewhere.
    context.execution_no_progress_timeout_s = -1
    # Ray's wrapper of an exception loses the cause on its way to the driver.
    context.raise_original_map_exception = True
    # Ray's own checkpoint would leave out rows that wait in the journal for the rest of their unit.
    context.checkpoint_config = None


def start_ray() -> None:
    """Start or join Ray, with its messages in its log files only.

    Messages of Ray and Ray Data about each execution would hide the progress of the job; the caller
    reports an error that ends the job.
    """
    if not ray.is_initialized():
        ray.init(logging_level=logging.ERROR)
    others = logging.getLogger().handlers
    for handler in logging.getLogger("ray.data").handlers:
        is_console = isinstance(handler, logging.StreamHandler) and not isinstance(
            handler, logging.FileHandler
        )
        if is_console and handler not in others:
            handler.setLevel(logging.CRITICAL)


def ray_results(rows: Any, feeder: type[StageFeeder]) -> Generator[pa.Table, None, None]:  # noqa: ANN401
    """Yield what feeder actors return for a Ray dataset, or for tables, as calls complete."""
    dataset = ray.data.from_arrow(list(rows)) if isinstance(rows, Sequence) else rows
    settle_context(dataset)
    dataset.context.enable_progress_bars = False
    # Ray's detectors mistake feeders that wait for engines for hanging or greedy tasks
    dataset.context.issue_detectors_config.detectors = []
    try:
        with errors_logged_once():
            answered = feeder.apply(dataset, plan=False, batch_size=None)
            yield from answered.iter_batches(batch_size=None, batch_format="pyarrow")
    except Exception as error:
        raise own_cause(error) or error from None
