"""The rows of a Ray dataset in the order of a plan, as a Ray Data source.

Nothing runs before the dataset that reads it is executed; each execution plans again. The plan
index stays in the object store, which may spill it, until the execution ends.

Ray tasks, plain functions:

describe_block   for rows of a block: prompts, and the summary of `tasks.describe`
sample_keys      for the first rows, to forecast the savings of a plan
place            for described rows: the place of each, split into the new blocks
read_placed      for a new block: its rows in the order of the plan
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray import cloudpickle
from ray.data import DataContext
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raybatch.config import PlanConfig
from raybatch.planning.dataset import num_blocks, with_plan, without_groups
from raybatch.planning.large import get_results, plan_pieces, rank_parts
from raybatch.planning.planned import LargePlan, PieceSummary, PlanIndex
from raybatch.planning.run import fit_units_to
from raybatch.planning.tasks import describer_of, summarize
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.arrays import Ints
from raybatch.rows.batches import as_movable, to_table
from raybatch.rows.options import StageConfig
from raybatch.rows.plan_columns import (
    RANK,
    STAGE,
    check_names,
    prompt_columns,
    rank_of,
    with_columns,
)

logger = logging.getLogger(__name__)

# rows of a block that one task describes
_ROWS_PER_PIECE = 1 << 13
# size of a block in the order of the plan; every pair of piece and block is a Ray object
_ROWS_PER_BLOCK = 1 << 12
# sampling interval of a large input
_SAMPLE_EVERY = 128
# a sample that takes longer is ended, after as many rows again at most
SAMPLE_S = 5.0
_SAMPLE_STEP = 64

_Block = Any  # Ray has no types
_Ref = Any
_Many = Any  # tables, or one table if there is only one
_Dataset = Any
_Stage = Any  # of a module above


class _Piece(NamedTuple):
    """Adjacent rows of one block, and the results of `describe_block` for them."""

    num_rows: int
    num_bytes: int
    summary: _Ref
    keys: _Ref
    rows: _Ref


def read_planned(
    dataset: _Dataset, stage: _Stage, plan: PlanConfig, remote_args: Mapping[str, Any]
) -> _Dataset:
    """Return a Ray dataset that reads `RaybatchPlan` with these arguments."""
    source = RaybatchPlan(dataset, stage, plan, remote_args)
    return ray.data.read_datasource(source, override_num_blocks=1)


class RaybatchPlan(Datasource):  # type: ignore[misc]  # Ray has no types
    """Read the rows of a dataset in the order of their plan, with the plan's columns.

    Args:
        dataset: rows to plan; it runs when this source is read.
        stage: a class with the options of the stage as `settled().config`.
        plan: how rows are grouped and ordered; lengths are not probed.
        remote_args: `ray.remote` options of the tasks that render and tokenize.
    """

    def __init__(
        self, dataset: _Dataset, stage: _Stage, plan: PlanConfig, remote_args: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._dataset, self._stage = dataset, stage
        self._plan, self._remote_args = plan, dict(remote_args)

    def estimate_inmemory_data_size(self) -> int | None:
        """Return None, as the size is unknown until the dataset has run."""
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Run and plan the dataset, and return a task for each block of rows.

        Ray Data passes a context only when it will run the tasks. It also calls this to count
        them, without a context: then the dataset does not run, and one empty task is returned.

        Raises:
            ConfigError: rows cannot be described with these options.
        """
        if data_context is None:
            return [ReadTask(list, _metadata(None))]
        return [
            ReadTask(read, _metadata(num_rows), per_task_row_limit=per_task_row_limit)
            for read, num_rows in _planned_blocks(
                self._dataset, self._stage.settled(), self._plan, self._remote_args
            )
        ]


def _metadata(num_rows: int | None) -> BlockMetadata:
    return BlockMetadata(num_rows=num_rows, size_bytes=None, input_files=None, exec_stats=None)


def _planned_blocks(
    dataset: _Dataset, stage: _Stage, plan: PlanConfig, remote_args: Mapping[str, Any]
) -> list[tuple[Any, int]]:
    """Run and plan a dataset; return a reader of each block of its rows, and the row count."""
    began = time.monotonic()
    config: StageConfig = stage.config
    of_stage = cloudpickle.dumps((config, plan)), stage.client
    pieces = list(_described(dataset, of_stage, remote_args))
    if not pieces:
        return [(list, 0)]
    summaries: list[PieceSummary] = get_results([piece.summary for piece in pieces])
    num_rows, num_bytes = (sum(getattr(p, n) for p in pieces) for n in ("num_rows", "num_bytes"))
    plan = fit_units_to(plan, num_rows, num_bytes)
    large = plan_pieces(summaries, [piece.keys for piece in pieces], config, plan)
    is_reordered = large.is_reordered(plan)
    logger.info(
        "planned %d rows of a dataset in %.1f s: %d prefix groups save %.1f %% of prompt tokens%s",
        num_rows,
        time.monotonic() - began,
        large.profile.num_groups,
        100 * large.saved_fraction,
        "" if is_reordered else "; rows keep their order",
    )
    if not is_reordered:
        return [(partial(read_unordered, p.rows), p.num_rows) for p in pieces]
    shards, unit_rows = rank_parts(large, plan)
    starts, block_rows = _cut_blocks(unit_rows, num_bytes, len(pieces))
    place_rows = ray.remote(num_returns=len(block_rows))(place)
    cuts, group = ray.put(starts), _first_group(large)
    placed = [
        place_rows.remote(piece.rows, shard, int(first_row), group, cuts)
        for piece, (_, shard), first_row in zip(pieces, shards, large.piece_rows, strict=False)
    ]
    by_piece = [[one] if len(block_rows) == 1 else one for one in placed]
    # waiting read tasks would occupy workers
    ray.wait([one[0] for one in by_piece], num_returns=len(by_piece), fetch_local=False)
    return [
        (partial(read_placed, parts), block_rows[i])
        for i, parts in enumerate(zip(*by_piece, strict=True))
    ]


def _described(
    dataset: _Dataset, of_stage: tuple[bytes, str], remote_args: Mapping[str, Any]
) -> Iterator[_Piece]:
    """Run a dataset, and describe its blocks as they arrive."""
    describe = ray.remote(num_returns=3, **remote_args)(describe_block)
    first_row = 0
    for ref, rows, num_bytes in blocks_of(dataset):
        for start in range(0, len(rows), _ROWS_PER_PIECE):
            some = rows[start : start + _ROWS_PER_PIECE]
            described = describe.remote(*of_stage, ref, some, first_row)
            yield _Piece(len(some), num_bytes * len(some) // len(rows), *described)
            first_row += len(some)


def blocks_of(dataset: _Dataset) -> Iterator[tuple[_Ref, range, int]]:
    """Run a dataset; yield (block reference, rows, bytes) for each block as it arrives.

    Only these rows of the block belong to the dataset; bytes are the approximate size of these.
    """
    for bundle in dataset.iter_internal_ref_bundles():
        for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
            of_block, size = entry.metadata.num_rows, entry.metadata.size_bytes or 0
            rows = range(of_block) if part is None else range(part.start_offset, part.end_offset)
            yield entry.ref, rows, size * len(rows) // max(1, of_block)


def _cut_blocks(unit_rows: Ints, num_bytes: int, num_pieces: int) -> tuple[Ints, Sequence[int]]:
    """Return the rank at which each block but the first begins, and the rows of each.

    A block has one or more whole units.
    """
    ends, num_rows = np.cumsum(unit_rows), int(unit_rows.sum())
    number = num_blocks(num_rows, num_bytes, num_pieces, _ROWS_PER_BLOCK)
    goals = np.arange(1, number) * num_rows // number
    first_units = np.unique(np.searchsorted(ends, goals, side="right"))
    first_units = first_units[first_units > 0]
    bounds = [0, *(ends[first_units - 1].tolist()), num_rows]
    return rank_of(first_units), np.diff(bounds).tolist()


def _first_group(large: LargePlan) -> int:
    """Return the number of a plan's first group, so that plans of one stage share no group id."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in large.pieces:
        digest.update(piece.contents.encode())
    return int.from_bytes(digest.digest(), "little") >> 33 << 32


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
    summary, keys = summarize(plan_index, describer, first_row, _SAMPLE_EVERY)
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
