"""What whoever asks a pool for rows may say of earlier runs of them, and hear of this one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.records import Answer, RowCrashes, Submission


class RowWatch(Protocol):
    """Follows the rows of one request table."""

    @property
    def crashes(self) -> npt.NDArray[np.int16]:
        """Return the engines that died with each row in earlier runs, int16 [rows]."""

    @property
    def begun(self) -> pa.RecordBatch | None:
        """Return the tokens that earlier runs have of the rows; None where they have none."""

    async def note_crashes(self, crashes: Sequence[RowCrashes]) -> None:
        """Hear of engines that died with rows, each with all deaths so far."""

    def note_begun(self, begun: pa.RecordBatch) -> None:
        """Hear of tokens that unfinished rows have gained."""


def with_news(submission: Submission, watch: RowWatch | None) -> Submission:
    """Return the submission with all that is known of its rows."""
    if watch is None:
        return submission
    return replace(submission, crashes=watch.crashes, begun=watch.begun)


async def tell(watch: RowWatch | None, answer: Answer) -> None:
    """Pass on what an answer says of rows that are not finished."""
    if watch is None:
        return
    if answer.begun is not None:
        watch.note_begun(answer.begun)
    if answer.crashes:
        await watch.note_crashes(answer.crashes)
