"""The rows of a Ray dataset in the order of a plan, as a Ray Data source.

Nothing runs before the dataset that reads it is executed; each execution plans again. The plan
index stays in the object store, which may spill it, until the execution ends.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import cloudpickle
from ray.data import DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raybatch.config import PlanConfig
from raybatch.planning import block_tasks
from raybatch.planning.dataset import num_blocks
from raybatch.planning.large import get_results, plan_pieces, rank_parts
from raybatch.planning.planned import LargePlan, PieceSummary
from raybatch.planning.run import fit_units_to
from raybatch.records.arrays import Ints
from raybatch.rows.options import StageConfig
from raybatch.rows.plan_columns import rank_of

logger = logging.getLogger(__name__)

# rows of a block that one task describes
_ROWS_PER_PIECE = 1 << 13
# size of a block in the order of the plan; every pair of piece and block is a Ray object
_ROWS_PER_BLOCK = 1 << 12

_Ref = Any  # Ray has no types
_Dataset = Any
_Stage = Any  # of a module above


class _Piece(NamedTuple):
    """Adjacent rows of one block, and the results of `block_tasks.describe_block` for them."""

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
        return [(partial(block_tasks.read_unordered, p.rows), p.num_rows) for p in pieces]
    shards, unit_rows = rank_parts(large, plan)
    starts, block_rows = _cut_blocks(unit_rows, num_bytes, len(pieces))
    place = ray.remote(num_returns=len(block_rows))(block_tasks.place)
    cuts, group = ray.put(starts), _first_group(large)
    placed = [
        place.remote(piece.rows, shard, int(first_row), group, cuts)
        for piece, (_, shard), first_row in zip(pieces, shards, large.piece_rows, strict=False)
    ]
    by_piece = [[one] if len(block_rows) == 1 else one for one in placed]
    # waiting read tasks would occupy workers
    ray.wait([one[0] for one in by_piece], num_returns=len(by_piece), fetch_local=False)
    return [
        (partial(block_tasks.read_placed, parts), block_rows[i])
        for i, parts in enumerate(zip(*by_piece, strict=True))
    ]


def _described(
    dataset: _Dataset, of_stage: tuple[bytes, str], remote_args: Mapping[str, Any]
) -> Iterator[_Piece]:
    """Run a dataset, and describe its blocks as they arrive."""
    describe = ray.remote(num_returns=3, **remote_args)(block_tasks.describe_block)
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
