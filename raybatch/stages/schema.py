"""The columns that a stage adds: one fixed Arrow schema, also where all rows failed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from raybatch.actors.wire import LOGPROBS_TYPE
from raybatch.errors import ConfigError, encodable

ERROR_COLUMN = "__inference_error__"
ROW_ID = "row_id"

Status = Literal["ok", "truncated", "filtered", "too_long", "invalid", "error", "crashed"]

GOOD_STATUSES: tuple[Status, ...] = ("ok", "truncated", "filtered")

_STATUS_OF_ERROR: Mapping[str, Status] = {
    "PromptTooLong": "too_long",
    "CapacityError": "too_long",
    "InvalidPrompt": "invalid",
    "InvalidSampling": "invalid",
    "InvalidRowId": "invalid",
    "RowTooLarge": "invalid",
    "RenderError": "invalid",
    "TokenizeError": "invalid",
    "ReplicaCrash": "crashed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSchema:
    """Names and types of the columns that one stage adds.

    Args:
        num_samples: samples per row; above 1 the columns of a sample become lists.
        has_logprobs: add the column `logprobs`.
        prefix: put before every name, for a second stage over the same rows.
    """

    num_samples: int = 1
    has_logprobs: bool = False
    prefix: str = ""

    def arrow(self) -> pa.Schema:
        """Return the added columns in their order."""

        def per_sample(kind: pa.DataType) -> pa.DataType:
            return kind if self.num_samples == 1 else pa.list_(kind)

        columns = {
            ROW_ID: pa.string(),
            "generated_text": per_sample(pa.string()),
            "generated_tokens": per_sample(pa.list_(pa.int32())),
            "num_input_tokens": pa.int32(),
            "num_generated_tokens": per_sample(pa.int32()),
            "num_cached_tokens": pa.int32(),
            "finish_reason": per_sample(pa.string()),
            "group_id": pa.int64(),
            "attempts": pa.int32(),
        }
        if self.has_logprobs:
            columns["logprobs"] = per_sample(LOGPROBS_TYPE)
        columns[ERROR_COLUMN] = pa.string()
        return pa.schema([(self.prefix + name, kind) for name, kind in columns.items()])

    def attach(self, user: pa.Table, columns: Mapping[str, Iterable[object]]) -> pa.Table:
        """Return the user's columns, untouched, followed by the added ones.

        A user column named as the row id is replaced by it: only the column that the stage reads
        the ids from can have that name (see `check_collisions`).

        Args:
            user: read only.
            columns: every name of `arrow()` without the prefix, to one value per row.
        """
        row_id = self.prefix + ROW_ID
        table = user.drop_columns([row_id]) if row_id in user.column_names else user
        for field in self.arrow():
            values = columns[field.name.removeprefix(self.prefix)]
            array = values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
            table = table.append_column(field, array)
        return table

    def check_collisions(self, user: pa.Schema, *, id_column: str | None) -> None:
        """Raise ConfigError where the user's columns have a name that the stage writes."""
        for name in self.arrow().names:
            if name not in user.names:
                continue
            if name == id_column and name == self.prefix + ROW_ID:
                if user.field(name).type == pa.string():
                    continue
                raise ConfigError(
                    f"the id column {name!r} is {user.field(name).type} and the output column of "
                    "that name is a string; rename it, or set output_prefix"
                )
            raise ConfigError(
                f"the input already has a column {name!r}, which the stage writes; rename it, "
                f"or set output_prefix (for example LLMStage(..., output_prefix='answer_'))"
            )


def row_status(finish_reason: str | None, error: str) -> Status:
    """Return the status of a row (or of one of its samples) from its two columns.

    Example:
        >>> row_status("length", "")
        'truncated'
    """
    if error:
        return _STATUS_OF_ERROR.get(error_class(error), "error")
    if finish_reason == "length":
        return "truncated"
    if finish_reason == "capacity":
        return "too_long"
    return "filtered" if finish_reason == "filtered" else "ok"


def error_class(error: str) -> str:
    """Return the part of "Type: message" that names the class of the error."""
    return error.partition(":")[0]


def describe_error(kind: str, cause: BaseException | str) -> str:
    """Return the text of an error column, "Type: message" on one line."""
    message = str(cause) or type(cause).__name__
    return encodable(f"{kind}: {' '.join(message.split())[:2000]}")
