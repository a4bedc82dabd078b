"""Drives the tasks that plan a large source, and hands out its rows in the order of the plan."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray import cloudpickle

from raybatch.config import PlanConfig
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.load import Ints
from raybatch.prefix.partition import choose_parts, cut_values
from raybatch.stages import plan_tasks
from raybatch.stages.options import StageConfig
from raybatch.stages.plan_columns import RANK, plan_columns
from raybatch.stages.plan_store import (
    StoredPlan,
    files_of,
    plan_hash,
    read_shards,
    write_plan,
    write_shard,
)
from raybatch.stages.plan_tasks import PartSummary, PieceSummary
from raybatch.stages.source import Source

__all__ = ["LargePlan", "plan_large", "planned_dataset_of", "store_large_plan"]

# a part of so many rows of 30 blocks takes about 2 GB while it is planned
ROWS_PER_PART = 1 << 21
# rows of one part that follow each other in the order of the whole
ROWS_PER_STRETCH = 1 << 16
_SAMPLE_ROWS = 1 << 16
# blocks of the shuffle: what is in one is written together, and every pair of blocks is an object
_ROWS_PER_BLOCK = 1 << 14
_MAX_BLOCK_PAIRS = 1 << 16
_UNIT_BITS = 32

_Ref = Any  # Ray has no types


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LargePlan:
    """A plan whose rows lie in the object store; what is here does not grow with their number.

    Args:
        pieces: of the source, in order.
        parts: that were planned apart.
        arranged: references to the parts in their own order.
    """

    pieces: Sequence[PieceSummary]
    parts: Sequence[PartSummary]
    arranged: Sequence[_Ref]

    @property
    def num_rows(self) -> int:
        """Rows of the source."""
        return sum(piece.num_rows for piece in self.pieces)

    @property
    def num_asked(self) -> int:
        """Rows that engines see."""
        return sum(part.num_rows for part in self.parts)

    @property
    def unasked(self) -> Counter[str]:
        """Rows that no engine sees, by class of error, or "filtered"."""
        return sum((piece.unasked for piece in self.pieces), Counter())

    @property
    def logical_tokens(self) -> int:
        """Prompt tokens of the rows that engines see."""
        return sum(part.stats.logical_tokens for part in self.parts)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that engines compute when every shared prefix runs once."""
        return sum(part.computed_tokens for part in self.parts)

    @property
    def saved_fraction(self) -> float:
        """Share of the prompt tokens that engines do not compute."""
        return max(0.0, 1 - self.computed_tokens / max(1, self.logical_tokens))

    @property
    def piece_rows(self) -> Ints:
        """Number of the first row of each piece, and of all rows: int64 [T + 1]."""
        return np.cumsum([0, *(piece.num_rows for piece in self.pieces)])


def plan_large(
    source: Source, config: StageConfig, plan: PlanConfig, *, row_id_column: str | None
) -> LargePlan:
    """Describe and arrange a source by Ray tasks.

    Args:
        source: with at least one row.
        config: of the stage, with the id column of the run.
        plan: options of the plan.
        row_id_column: column to make for ids; None where the user has one.
    """
    options, shared = cloudpickle.dumps((config, plan)), ray.put(source)
    every = -(-source.num_rows // _SAMPLE_ROWS)
    describe = ray.remote(num_returns=2)(plan_tasks.describe)
    first_row, described = 0, []
    for task in source.tasks():
        described.append(describe.remote(options, shared, task, first_row, every, row_id_column))
        first_row += sum(part.num_rows for part in source.slices[task.start : task.stop])
    pieces: list[PieceSummary] = ray.get([summary for summary, _ in described])
    tables = [table for _, table in described]
    num_parts = -(-source.num_rows // ROWS_PER_PART)
    by_part: list[Sequence[_Ref]] = [tables]
    if num_parts > 1:
        sample = BlockKeys.concat([piece.sample for piece in pieces])
        rule = ray.put(choose_parts(sample, num_parts))
        split = ray.remote(num_returns=num_parts)(plan_tasks.split)
        by_part = list(zip(*(split.remote(table, rule) for table in tables), strict=True))
    arrange = ray.remote(num_returns=2)(plan_tasks.arrange)
    arranged = [arrange.remote(plan, config.dedup, *part) for part in by_part]
    return LargePlan(
        pieces=pieces,
        parts=ray.get([summary for summary, _ in arranged]),
        arranged=[part for _, part in arranged],
    )


def store_large_plan(sink: str, source: Source, large: LargePlan, plan: PlanConfig) -> StoredPlan:
    """Rank the parts, write the shards below the sink, and return what `plan.json` says.

    Raises:
        ConfigError: another plan lies there, or the folder cannot be written.
    """
    is_reordered = large.saved_fraction >= plan.min_saved_fraction
    if is_reordered:
        shards, unit_rows = _ranked(large, plan)
    else:
        shards, unit_rows = _in_input_order(large, plan)
    files = files_of(source)
    digests = ray.get([digest for digest, _ in shards])
    name = plan_hash(digests, plan, files)
    firsts = large.piece_rows[:-1].tolist()
    write = ray.remote(write_shard)
    tables = [table for _, table in shards]
    written = ray.get([write.remote(sink, name, *at) for at in zip(firsts, tables, strict=True)])
    stored = StoredPlan(
        hash=name,
        num_rows=large.num_rows,
        num_units=len(unit_rows),
        num_groups=sum(part.num_groups for part in large.parts) if is_reordered else 0,
        is_reordered=is_reordered,
        logical_tokens=large.logical_tokens,
        computed_tokens=large.computed_tokens,
        block_size=large.pieces[0].sample.block_size,
        options=dataclasses.asdict(plan),
        files=files,
        shards=tuple(zip(written, firsts, strict=True)),
    )
    write_plan(sink, stored, unit_rows)
    return stored


def _ranked(large: LargePlan, plan: PlanConfig) -> tuple[list[tuple[_Ref, _Ref]], Ints]:
    """Return digest and shard of each piece, and the rows of each unit."""
    values = np.concatenate([part.values for part in large.parts])
    weights = np.concatenate([part.weights for part in large.parts])
    num_stretches = large.num_asked // (len(large.parts) * ROWS_PER_STRETCH)
    cuts = cut_values(values, weights, max(1, min(num_stretches, 64)))
    unit_sizes = ray.remote(plan_tasks.unit_sizes)
    sizes = ray.get([unit_sizes.remote(part, cuts, plan) for part in large.arranged])
    # stretch by stretch, and in each of them part by part
    counts = np.array([[len(stretch) for stretch in part] for part in sizes])
    by_stretch = counts.T.reshape(-1)
    first_units = (np.cumsum(by_stretch) - by_stretch).reshape(counts.T.shape).T
    unit_rows = np.concatenate(
        [part[stretch] for stretch in range(counts.shape[1]) for part in sizes]
    )
    first_groups = np.cumsum([0, *(part.num_groups for part in large.parts)])
    piece_rows = ray.put(large.piece_rows)
    rank = ray.remote(num_returns=len(large.pieces))(plan_tasks.rank)
    ranked = [
        rank.remote(part, cuts, plan, first_units[i].tolist(), int(first_groups[i]), piece_rows)
        for i, part in enumerate(large.arranged)
    ]
    by_part = [[part] if len(large.pieces) == 1 else part for part in ranked]
    shard = ray.remote(num_returns=2)(plan_tasks.shard)
    before, shards = 0, []
    for i, piece in enumerate(large.pieces):
        shards.append(
            shard.remote(
                int(large.piece_rows[i]),
                piece.num_rows,
                before,
                len(unit_rows),
                plan.unit_rows,
                *(part[i] for part in by_part),
            )
        )
        before += piece.unasked.total()
    return shards, np.concatenate([unit_rows, _even_units(before, plan)])


def _in_input_order(large: LargePlan, plan: PlanConfig) -> tuple[list[tuple[_Ref, _Ref]], Ints]:
    shard = ray.remote(num_returns=2)(plan_tasks.input_shard)
    shards = [
        shard.remote(first, piece.num_rows, plan.unit_rows)
        for first, piece in zip(large.piece_rows.tolist(), large.pieces, strict=False)
    ]
    return shards, _even_units(large.num_rows, plan)


def _even_units(num_rows: int, plan: PlanConfig) -> Ints:
    full, rest = divmod(num_rows, plan.unit_rows)
    return np.array([plan.unit_rows] * full + [rest] * (rest > 0), np.int64)


def planned_dataset_of(
    source: Source, sink: str, stored: StoredPlan, plan: PlanConfig, *, row_id_column: str | None
) -> Any:  # noqa: ANN401
    """Return a Ray dataset of the rows in the order of a plan that lies below the sink.

    Args:
        source: the plan is of it.
        sink: of the job.
        stored: what `plan.json` says.
        plan: options of the plan.
        row_id_column: column to make for ids; None where the user has one.
    """

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        for task in batch.to_pylist():
            position = task["first_row"]
            stop = position + task["num_rows"]
            shard = read_shards(sink, stored, position, stop)
            slices = range(task["start"], task["stop"])
            for table in source.read(slices, row_id_column=row_id_column):
                here = shard.slice(position - task["first_row"], table.num_rows)
                position += table.num_rows
                yield _with_plan(table, here, plan)

    tasks, first_row = [], 0
    for task in source.tasks():
        num_rows = sum(part.num_rows for part in source.slices[task.start : task.stop])
        tasks.append(
            {"start": task.start, "stop": task.stop, "first_row": first_row, "num_rows": num_rows}
        )
        first_row += num_rows
    items = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    rows = items.map_batches(read, batch_size=1, batch_format="pyarrow")
    if not stored.is_reordered:
        return rows
    num_blocks = min(-(-stored.num_rows // _ROWS_PER_BLOCK), _MAX_BLOCK_PAIRS // len(tasks))
    starts = np.linspace(0, stored.num_units, max(1, num_blocks) + 1).astype(np.int64)[1:-1]
    return rows.sort(RANK, boundaries=(np.unique(starts) << _UNIT_BITS).tolist())


def _with_plan(table: pa.Table, shard: pa.Table, plan: PlanConfig) -> pa.Table:
    rank = shard.column("unit").to_numpy().astype(np.int64) << _UNIT_BITS
    expected = np.full(table.num_rows, np.nan)
    if plan.expected_tokens_column is not None:
        expected = pc.cast(table.column(plan.expected_tokens_column), pa.float64()).to_numpy()
    columns = {
        RANK: pa.array(rank + shard.column("pos").to_numpy()),
        **plan_columns(
            shard.column("group_id").fill_null(-1).to_numpy(),
            shard.column("prefix_len").to_numpy(),
            expected,
        ),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table
