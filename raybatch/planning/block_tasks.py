"""Ray tasks that plan the rows of a Ray dataset, run by `ray_source`; plain functions.

describe_block   for rows of a block: prompts, and the summary of `tasks.describe`
sample_keys      for the first rows, to forecast the savings of a plan
place            for described rows: the place of each, split into the new blocks
read_placed      for a new block: its rows in the order of the plan
"""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray import cloudpickle
from ray.data.block import BlockAccessor

from raybatch.planning.dataset import with_plan, without_groups
from raybatch.planning.plan_index import PlanIndex
from raybatch.planning.planned import PieceSummary
from raybatch.planning.tasks import describer_of, summarize
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.arrays import Ints
from raybatch.rows.batches import as_movable, to_table
from raybatch.rows.plan_columns import RANK, STAGE, check_names, prompt_columns, with_columns

_Block = Any  # Ray has no types
_Ref = Any
_Many = Any  # tables, or one table if there is only one

# maximum rows of a piece, and the sampling interval of a large input
SAMPLE_EVERY = 128
# a sample that takes longer is ended, after as many rows again at most
SAMPLE_S = 5.0
_SAMPLE_STEP = 64


def describe_block(
    options: bytes, stage: str, block: _Block, rows: range, first_row: int
) -> tuple[PieceSummary, pa.Table, pa.Table]:
    """Render and describe `rows` of a Ray block, for a plan.

    Returns their summary, their block keys as a table, and the rows with their prompts. `options`
    are pickled options of the stage and the plan, `stage` is the name of the stage, and `first_row`
    the number of the first row in the dataset.

    Raises:
        ConfigError: a column has a name reserved for plans.
    """
    table = as_movable(to_table(block).slice(rows.start, len(rows)))
    check_names(table.schema)
    describer = describer_of(options)
    prepared, plan_index = describer(table)
    summary, keys = summarize(plan_index, describer, first_row, SAMPLE_EVERY)
    columns = {STAGE: pa.array([stage]).take(np.zeros(len(rows), np.int64))}
    return summary, keys, with_columns(table, columns | prompt_columns(prepared.prompts))


def sample_keys(options: bytes, before: bytes, *blocks: _Block) -> tuple[BlockKeys, float]:
    """Return (block keys of a sample of rows, seconds per row) of some Ray blocks.

    Args:
        options: pickled options of the stage and the plan.
        before: a pickled function that changes a table before prompts are rendered. The sample
            ends after `SAMPLE_S` seconds.
    """
    describer, change = describer_of(options), cloudpickle.loads(before)
    described, began = list[PlanIndex](), time.monotonic()
    for rows in _pieces(blocks):
        described.append(describer(as_movable(to_table(change(rows))))[1])
        if (seconds := time.monotonic() - began) > SAMPLE_S:
            break
    sample = PlanIndex.concat(described)
    return sample.keys, seconds / max(1, sample.num_rows)


def _pieces(blocks: Sequence[_Block]) -> Iterator[pa.Table]:
    for table in map(to_table, blocks):
        for start in range(0, max(1, table.num_rows), _SAMPLE_STEP):
            yield table.slice(start, _SAMPLE_STEP)


def place(rows: pa.Table, shard: pa.Table, first_row: int, first_group: int, starts: Ints) -> _Many:
    """Return the rows of a piece with their plan columns: one table for each new block.

    `shard` has the plan of the piece, `first_row` is the number of its first row, and `first_group`
    is added to its group ids. `starts` are the ranks at which the new blocks begin, without that of
    the first block.
    """
    column = shard.column_names.index("group_id")
    groups = pc.add(shard.column("group_id"), first_group)
    shard = shard.set_column(column, "group_id", groups)
    planned = with_plan(rows, shard, np.arange(first_row, first_row + rows.num_rows))
    rank = planned.column(RANK).to_numpy()
    order = np.argsort(rank)
    bounds = [0, *np.searchsorted(rank[order], starts).tolist(), len(order)]
    tables = [_take(planned, order[start:stop]) for start, stop in pairwise(bounds)]
    return tables[0] if len(tables) == 1 else tables


def read_placed(pieces: Sequence[_Ref]) -> Iterator[pa.Table]:
    """Yield the rows of one new block, sorted by rank.

    `pieces` are references to the tables that `place` returned for this block.
    """
    tables = [table for table in ray.get(list(pieces)) if table.num_rows]
    # Ray Data joins blocks like this
    whole = pa.concat_tables(tables, promote_options="permissive")
    yield _take(whole, np.argsort(whole.column(RANK).to_numpy()))


def read_unordered(rows: _Ref) -> Iterator[pa.Table]:
    """Yield the rows of a piece in input order, with their prompts and without prefix groups."""
    yield without_groups(ray.get(rows))


def _take(table: pa.Table, rows: Ints) -> pa.Table:
    """Return some rows; Arrow has no take kernel for Ray's column types."""
    return BlockAccessor.for_block(table).take(pa.array(rows))
