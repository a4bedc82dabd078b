"""Row batches that the pool was asked for, and what of them is finished before all is."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.errors import ReplicaError
from raybatch.rows.finish import Answers
from raybatch.rows.prepare import Prepared
from raybatch.rows.prompt import Prompt
from raybatch.stages.unit_watch import PlacedWatch

# for the journals of units that fail together
_KEEP_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Rows whose results are here.

    Args:
        table: the rows, with the user's columns alone.
        row_ids: of each row.
        prompts: of each row.
        group_ids: prefix group of each row; None where nothing is planned.
        answers: to these rows.
    """

    table: pa.Table
    row_ids: Sequence[str]
    prompts: Sequence[Prompt]
    group_ids: Sequence[int | None] | None
    answers: Answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A row batch that the pool was asked for.

    Args:
        table: the rows, with the user's columns alone.
        prepared: of the same rows.
        group_ids: prefix group of each row; None where nothing is planned.
    """

    table: pa.Table
    prepared: Prepared
    group_ids: Sequence[int | None] | None

    def answered(self, results: pa.Table) -> Answered:
        """Return all rows with the results of all requests."""
        prepared = self.prepared
        return Answered(
            table=self.table,
            row_ids=prepared.row_ids,
            prompts=prepared.prompts,
            group_ids=self.group_ids,
            answers=Answers(
                rows=prepared.rows,
                copies=prepared.copies,
                samplings=prepared.request_samplings,
                results=results,
            ),
        )

    def answered_so_far(self, results: pa.Table) -> tuple[list[int], Answered]:
        """Return the rows that some results are of, their copies among them, as a smaller batch.

        Args:
            results: of some of the requests, each with all its samples.

        Returns:
            Positions of the rows in this row batch, ascending; and the rows.
        """
        prepared, column = self.prepared, results.schema.get_field_index("row")
        requests, renumbered = np.unique(results.column(column).to_numpy(), return_inverse=True)
        originals = [prepared.rows[request] for request in requests]
        copies = {c: row for c, row in prepared.copies.items() if row in set(originals)}
        rows = sorted([*originals, *copies])
        place = {row: i for i, row in enumerate(rows)}
        field, numbers = results.schema.field(column), pa.array(renumbered.astype(np.int32))
        return rows, Answered(
            table=self.table.take(pa.array(rows, pa.int64())),
            row_ids=[prepared.row_ids[row] for row in rows],
            prompts=[prepared.prompts[row] for row in rows],
            group_ids=None if self.group_ids is None else [self.group_ids[row] for row in rows],
            answers=Answers(
                rows=[place[row] for row in originals],
                copies={place[copy]: place[row] for copy, row in copies.items()},
                samplings=[prepared.request_samplings[request] for request in requests],
                results=results.set_column(column, field, numbers),
            ),
        )


@dataclass(kw_only=True, slots=True)
class OpenCall:
    """A call of the pool, as others see it while it waits.

    Args:
        name: of its rows in the pool, see `PoolHandle.generate`.
        watch: of the rows, and once they are asked of the requests; None where they are of no unit.
        asked: the rows; None while they are being prepared, or where none needs an engine.
        num_seen: results that have been looked at.
        special: how many special tokens the texts of each row held; known once it is asked.
    """

    name: str
    watch: PlacedWatch | None = None
    asked: Asked | None = None
    num_seen: int = 0
    special: Sequence[int] = ()


async def end_calls(calls: Collection[asyncio.Future[Any]], error: BaseException) -> None:
    """Cancel calls, and wait until they have ended.

    Where no engine is left all of them fail, and have time to keep what is finished.

    Args:
        calls: that may still run.
        error: of another one.
    """
    if calls and isinstance(error, ReplicaError):
        await asyncio.wait(calls, timeout=_KEEP_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
