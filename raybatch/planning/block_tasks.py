"""Tasks that plan the rows of a Ray dataset, run by `ray_source`; plain functions.

describe_block   over rows of a block: prompts, and what `tasks.describe` tells of them
sample_keys      over the first rows, to forecast what a plan saves
place            over rows that are described: where each runs, cut into the blocks to come
read_placed      the rows of one block in the order of the plan
"""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data.block import BlockAccessor

from raybatch.planning.dataset import with_plan, without_groups
from raybatch.planning.planned import PieceSummary
from raybatch.planning.sidecar import Sidecar
from raybatch.planning.tasks import describer_of, summarize
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.arrays import Ints
from raybatch.rows.batches import as_movable, to_table
from raybatch.rows.plan_columns import RANK, STAGE, check_names, prompt_columns, with_columns

_Block = Any  # Ray has no types
_Ref = Any
_Many = Any  # tables; Ray takes one object where there is one

# rows of a piece are so many at most, of which every so many is in the sample of a large input
SAMPLE_EVERY = 128


def describe_block(
    options: bytes, stage: str, block: _Block, rows: range, first_row: int
) -> tuple[PieceSummary, pa.Table, pa.Table]:
    """Describe some rows of a block of Ray Data; return them behind it, with their prompts.

    `stage` is the name of the stage that answers them.

    Raises:
        ConfigError: a column has a name that is kept for plans.
    """
    table = as_movable(to_table(block).slice(rows.start, len(rows)))
    check_names(table.schema)
    describer = describer_of(options)
    prepared, sidecar = describer(table)
    summary, keys = summarize(sidecar, describer, first_row, SAMPLE_EVERY)
    columns = {STAGE: pa.array([stage]).take(np.zeros(len(rows), np.int64))}
    return summary, keys, with_columns(table, columns | prompt_columns(prepared.prompts))


def sample_keys(options: bytes, *blocks: _Block) -> tuple[BlockKeys, float]:
    """Return the block keys of a sample of rows, and seconds of a CPU for each row."""
    describer, began = describer_of(options), time.process_time()
    rows = Sidecar.concat([describer(as_movable(to_table(block)))[1] for block in blocks])
    return rows.keys, (time.process_time() - began) / max(1, rows.num_rows)


def place(rows: pa.Table, shard: pa.Table, first_row: int, first_group: int, starts: Ints) -> _Many:
    """Return the rows of a piece with the columns of their plan, a table for each block to come.

    `starts` are ranks: that of the first row of each block but the first.
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
    """Yield the rows of one block by rank; `pieces` refer to what `place` has made of it."""
    tables = [table for table in ray.get(list(pieces)) if table.num_rows]
    # as Ray Data joins blocks
    whole = pa.concat_tables(tables, promote_options="permissive")
    yield _take(whole, np.argsort(whole.column(RANK).to_numpy()))


def read_unordered(rows: _Ref) -> Iterator[pa.Table]:
    """Yield the rows of a piece as they are, in no group, with their prompts."""
    yield without_groups(ray.get(rows))


def _take(table: pa.Table, rows: Ints) -> pa.Table:
    """Return some rows; Ray's own types of columns have no kernel of Arrow."""
    return BlockAccessor.for_block(table).take(pa.array(rows))
