"""A row batch that is ready for the pool; with all of its results, or some, it can be finished."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raybatch.rows.finish import AnsweredRows
from raybatch.rows.prepare import Prepared
from raybatch.stages.unit_watch import PlacedWatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """A row batch that is ready for the pool.

    Args:
        group_ids: prefix group of each row; None where nothing is planned.
        watch: of the requests; None where the rows are of no unit.
    """

    table: pa.Table
    prepared: Prepared
    group_ids: Sequence[int | None] | None
    client: str
    watch: PlacedWatch | None

    @property
    def prompt_errors(self) -> list[str]:
        """Why each row is no request, "" for no error."""
        return [prompt.error for prompt in self.prepared.prompts]

    @property
    def num_special(self) -> list[int]:
        """How many special tokens the texts of each row held."""
        return [prompt.num_special for prompt in self.prepared.prompts]

    def with_all(self, results: pa.Table) -> AnsweredRows:
        """Return all rows with the results of all requests."""
        prepared = self.prepared
        return AnsweredRows(
            table=self.table,
            row_ids=prepared.row_ids,
            prompts=prepared.prompts,
            group_ids=self.group_ids,
            rows=prepared.rows,
            copies=prepared.copies,
            samplings=prepared.request_samplings,
            results=results,
        )

    def with_some(self, results: pa.Table) -> tuple[list[int], AnsweredRows]:
        """Return the rows that some results are of, and their copies, as a smaller batch.

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
        return rows, AnsweredRows(
            table=self.table.take(pa.array(rows, pa.int64())),
            row_ids=[prepared.row_ids[row] for row in rows],
            prompts=[prepared.prompts[row] for row in rows],
            group_ids=None if self.group_ids is None else [self.group_ids[row] for row in rows],
            rows=[place[row] for row in originals],
            copies={place[copy]: place[row] for copy, row in copies.items()},
            samplings=[prepared.request_samplings[request] for request in requests],
            results=results.set_column(column, field, numbers),
        )
