"""Feeders as actors of Ray Data."""

from collections.abc import Generator, Sequence
from typing import Any

import pyarrow as pa
import ray

from raybatch.actors.ray_errors import errors_told_once, own_cause
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.ray_context import settle_context


def ray_results(rows: Any, feeder: type[StageFeeder]) -> Generator[pa.Table, None, None]:  # noqa: ANN401
    """Yield what feeders give back for blocks of rows, as it comes.

    Args:
        rows: a dataset of Ray, or tables.
        feeder: class of the feeders.
    """
    dataset = ray.data.from_arrow(list(rows)) if isinstance(rows, Sequence) else rows
    settle_context(dataset)
    dataset.context.enable_progress_bars = False
    # Ray's detectors take feeders that wait for engines for hanging or greedy tasks.
    dataset.context.issue_detectors_config.detectors = []
    try:
        with errors_told_once():
            answered = feeder.apply(dataset, batch_size=None)
            yield from answered.iter_batches(batch_size=None, batch_format="pyarrow")
    except Exception as error:
        raise own_cause(error) or error from None
