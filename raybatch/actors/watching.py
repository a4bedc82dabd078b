"""What whoever asks a pool for rows may say of earlier runs of them, and hear of this one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raybatch.actors.records import Answer, RowCrashes, Submission

__all__ = ["RowWatch", "tell", "with_news"]


class RowWatch(Protocol):
    """Follows the rows of one request table."""

    @property
    def crashes(self) -> npt.NDArray[np.int16]:
        """Return the engines that died with each row in earlier runs, int16 [rows]."""

    async def note_crashes(self, crashes: Sequence[RowCrashes]) -> None:
        """Hear of engines that died with rows, each with all deaths so far."""


def with_news(submission: Submission, watch: RowWatch | None) -> Submission:
    """Return the submission with all that is known of its rows."""
    return submission if watch is None else replace(submission, crashes=watch.crashes)


async def tell(watch: RowWatch | None, answer: Answer) -> None:
    """Pass on what an answer says of rows that are not finished."""
    if watch is not None and answer.crashes:
        await watch.note_crashes(answer.crashes)
