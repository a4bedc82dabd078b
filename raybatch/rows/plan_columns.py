"""Columns that carry the plan with its rows to the feeders; never written to the output."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.text.tokenizer import Prompt

_MARK = "__rb_plan_"
# commit unit and position in it as one number, and the number of the row in the source
RANK = f"{_MARK}rank"
ROW = f"{_MARK}row"
_POSITION_BITS = 32
_GROUP, _PREFIX_LEN, _EXPECTED = (f"{_MARK}{name}" for name in ("group", "prefix_len", "expected"))
_PROMPT = f"{_MARK}prompt"
# stage for which the plan of a Ray dataset was made
STAGE = f"{_MARK}stage"
# fields of a prompt other than its tokens: field, column and type
_PROMPT_FIELDS = (
    ("error", f"{_MARK}error", pa.large_string()),
    ("is_filtered", f"{_MARK}filtered", pa.bool_()),
    ("num_special", f"{_MARK}special", pa.int64()),
    ("payload", f"{_MARK}payload", pa.large_string()),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanColumns:
    """The plan of the rows of one batch.

    Args:
        group_ids: prefix group of each row, None for a row in no group.
        prefix_lens: int32 [rows], tokens that the row's group shares.
        expected_lens: expected output tokens of each row, None if unknown.
        prompts: prompt of each row if the plan stores them; None renders them again.
        stages: stages for which the plan was made; empty in a job, which has one.
    """

    group_ids: Sequence[int | None]
    prefix_lens: npt.NDArray[np.int32]
    expected_lens: Sequence[int | None]
    prompts: Sequence[Prompt] | None = None
    stages: frozenset[str] = frozenset()


def check_names(schema: pa.Schema) -> None:
    """Raise ConfigError if a column of the user has a reserved name."""
    taken = [name for name in schema.names if name.startswith(_MARK)]
    if taken:
        raise ConfigError(
            f"the source has columns whose names begin with {_MARK!r}, which is reserved: "
            f"{', '.join(taken)}; rename them"
        )


def plan_columns(
    group_ids: pa.ChunkedArray | pa.Array,
    prefix_lens: pa.ChunkedArray | pa.Array,
    expected_lens: pa.ChunkedArray | pa.Array,
) -> dict[str, pa.ChunkedArray | pa.Array]:
    """Return plan columns by name.

    Groups are int64, null for a row in no group; prefix lengths are int32; expected lengths are
    int32, null if unknown.
    """
    return {_GROUP: group_ids, _PREFIX_LEN: prefix_lens, _EXPECTED: expected_lens}


def place_columns(
    units: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]
) -> dict[str, pa.Array]:
    """Return columns, by name, of the rows' ranks in the output and numbers in the source."""
    return {RANK: pa.array(rank_of(units) + positions), ROW: pa.array(rows)}


def rank_of(units: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the rank of the first row of each unit; ranks order rows by unit and position."""
    return units.astype(np.int64) << _POSITION_BITS


def places(table: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (unit, position in the unit) of all rows, int64 [rows] each."""
    rank = table.column(RANK).to_numpy()
    return rank >> _POSITION_BITS, rank & ((1 << _POSITION_BITS) - 1)


def take_groups(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the prefix group of each row, -1 for a row in no group."""
    return table.column(_GROUP).fill_null(-1).to_numpy()  # type: ignore[no-any-return]


def with_groups_of(table: pa.Table, plan: str) -> pa.Table:
    """Return rows whose prefix groups have ids that are unique among plans, by a plan's hash."""
    groups = take_groups(table)
    salt = int.from_bytes(hashlib.blake2b(plan.encode(), digest_size=7).digest(), "little")
    salted = pa.array(groups ^ salt, mask=groups < 0)
    return table.set_column(table.column_names.index(_GROUP), _GROUP, salted)


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, pa.Array]:
    """Return rendered prompts as plan columns, by name."""
    token_ids = [prompt.token_ids for prompt in prompts]
    lengths = [0 if ids is None else len(ids) for ids in token_ids]
    known = [ids for ids in token_ids if ids is not None]
    lists = pa.LargeListArray.from_arrays(
        pa.array(np.cumsum([0, *lengths], dtype=np.int64)),
        pa.array(np.concatenate([np.zeros(0, np.int32), *known])),
        mask=pa.array([ids is None for ids in token_ids], pa.bool_()),
    )
    return {_PROMPT: lists} | {
        column: pa.array([getattr(prompt, name) for prompt in prompts], kind)
        for name, column, kind in _PROMPT_FIELDS
    }


def with_columns(table: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Return the table with columns appended."""
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def take_off(table: pa.Table) -> tuple[pa.Table, PlanColumns | None]:
    """Return the table without plan columns, and the plan in these; None if it has none."""
    names = [name for name in table.column_names if name.startswith(_MARK)]
    if not names:
        return table, None
    return table.drop_columns(names), PlanColumns(
        group_ids=table.column(_GROUP).to_pylist(),
        prefix_lens=table.column(_PREFIX_LEN).to_numpy(),
        expected_lens=table.column(_EXPECTED).to_pylist(),
        prompts=_prompts(table) if _PROMPT in names else None,
        stages=frozenset(table.column(STAGE).unique().to_pylist() if STAGE in names else ()),
    )


def _prompts(table: pa.Table) -> list[Prompt]:
    lists = table.column(_PROMPT)
    lists = lists.chunk(0) if lists.num_chunks == 1 else lists.combine_chunks()
    tokens, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    is_null = lists.is_null().to_numpy(zero_copy_only=False)
    others = [table.column(column).to_pylist() for _, column, _ in _PROMPT_FIELDS]
    return [
        Prompt(None if is_null[row] else tokens[offsets[row] : offsets[row + 1]], *values)
        for row, values in enumerate(zip(*others, strict=True))
    ]
