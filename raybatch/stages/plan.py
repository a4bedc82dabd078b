"""The plan of a source that fits the driver's memory: rows in their order, ready to be run.

Prompts are rendered and tokenized once, here, and travel with their rows to the feeders. What is
larger is planned by `raybatch.stages.plan_tasks`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.engine.tokenizer import Tokenizer
from raybatch.prefix.plan import PlanRows, RowPlan, plan_rows, with_unasked
from raybatch.stages.options import StageConfig
from raybatch.stages.plan_columns import plan_columns, prompt_columns
from raybatch.stages.planned import PlannedInput
from raybatch.stages.prepare import Prepared, find_model, max_model_len, prepare
from raybatch.stages.render import Prompt, PromptReader
from raybatch.stages.sidecar import Sidecar, describe_rows
from raybatch.stages.source import Source

__all__ = [
    "GatheredRows",
    "RowDescriber",
    "fit_units",
    "gather",
    "is_small",
    "plan_gathered",
    "units",
]

# what a unit may hold in memory, prompts included
_MAX_UNIT_BYTES = 64 << 20


class RowDescriber:
    """Renders, tokenizes and describes tables of a source; loads the tokenizer once.

    Args:
        config: of the stage, with the id column of the run.
        plan: options of the plan.
    """

    def __init__(self, config: StageConfig, plan: PlanConfig) -> None:
        model_dir = find_model(config)
        # copies are found by the plan, and are rows like others to it
        self._config = replace(config, dedup=False)
        self._plan = plan
        self._reader = PromptReader(config, Tokenizer.load(model_dir))
        self._max_model_len = max_model_len(config, model_dir)

    def __call__(self, table: pa.Table) -> tuple[Prepared, Sidecar]:
        """Return the prompts of a table and what planning needs of them."""
        prepared = prepare(
            table,
            config=self._config,
            reader=self._reader,
            max_model_len=self._max_model_len,
        )
        return prepared, describe_rows(
            table,
            prepared,
            block_size=self._config.engine.block_size_tokens,
            expected_column=self._plan.expected_tokens_column,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatheredRows:
    """All rows of a source in memory, in input order.

    Args:
        table: the user's columns, and the ids where the job makes them.
        prompts: of every row, errors included.
        sidecar: what planning knows of them.
    """

    table: pa.Table
    prompts: Sequence[Prompt]
    sidecar: Sidecar


def gather(source: Source, describer: RowDescriber, *, row_id_column: str | None) -> GatheredRows:
    """Read, render and tokenize a whole source in this process."""
    tables = [
        table for task in source.tasks() for table in source.read(task, row_id_column=row_id_column)
    ]
    described = [describer(table) for table in tables]
    return GatheredRows(
        table=pa.concat_tables(tables).combine_chunks(),
        prompts=[prompt for prepared, _ in described for prompt in prepared.prompts],
        sidecar=Sidecar.concat([sidecar for _, sidecar in described]),
    )


def plan_gathered(rows: GatheredRows, config: StageConfig, plan: PlanConfig) -> PlannedInput:
    """Plan rows that are in memory."""
    sidecar = rows.sidecar
    plan_of_asked, found = plan_rows(
        PlanRows(keys=sidecar.keys, expected_tokens=sidecar.expected_tokens),
        plan,
        dedup=config.dedup,
    )
    token_ids = [p.token_ids for p in rows.prompts if p.is_asked and p.token_ids is not None]
    return PlannedInput(
        keys=sidecar.keys,
        asked=sidecar.asked,
        num_rows=sidecar.num_rows,
        max_tokens=sidecar.max_tokens,
        expected_tokens=sidecar.expected_tokens,
        unasked=sidecar.unasked,
        plan=plan_of_asked,
        whole=with_unasked(plan_of_asked, sidecar.is_asked, plan),
        found=found,
        prompts=token_ids,
    )


def units(rows: GatheredRows, whole: RowPlan, *, is_length_known: bool) -> Iterator[pa.Table]:
    """Yield the units of a plan in order, each with its prompts and the columns of the plan.

    Args:
        rows: in memory.
        whole: plan of all of them.
        is_length_known: expected lengths say more than the longest that is allowed.
    """
    sidecar = rows.sidecar
    expected = np.full(sidecar.num_rows, np.nan)
    if is_length_known:
        expected[sidecar.asked] = sidecar.expected_tokens
    for start, stop in pairwise(whole.unit_starts.tolist()):
        ranked = whole.order[start:stop]
        unit = rows.table.slice(start, stop - start)
        if whole.is_reordered:
            unit = rows.table.take(ranked)
        columns = {
            **plan_columns(whole.group_id[ranked], whole.prefix_len[ranked], expected[ranked]),
            **prompt_columns([rows.prompts[row] for row in ranked.tolist()]),
        }
        for name, column in columns.items():
            unit = unit.append_column(name, column)
        yield unit


def fit_units(plan: PlanConfig, source: Source) -> PlanConfig:
    """Return options whose units stay small in memory, whatever the size of a row."""
    num_bytes = sum(part.num_bytes for part in source.slices)
    most = max(1, _MAX_UNIT_BYTES * source.num_rows // max(1, num_bytes))
    return replace(
        plan,
        unit_rows=min(plan.unit_rows, most),
        max_unit_rows=min(plan.max_unit_rows, most),
    )


def is_small(source: Source, plan: PlanConfig) -> bool:
    """Return whether the driver gathers and plans the source by itself."""
    return sum(part.num_bytes for part in source.slices) <= plan.max_driver_bytes
