"""The columns that a stage adds: one fixed Arrow schema, even if all rows failed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal

import pyarrow as pa

from raybatch.actors.wire.columns import LOGPROBS_TYPE
from raybatch.errors import ConfigError, encodable
from raybatch.records.parsed_text import PARSE_ERROR, REASONING, TOOL_CALLS
from raybatch.records.types import Task
from raybatch.text.typed_answers import AnswerType, answer_type

ERROR_COLUMN = "__inference_error__"
ROW_ID = "row_id"
# the answer by its JSON schema, and why it has no value
PARSED, PARSED_ERROR = "parsed", "parsed_error"

_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_TOOL_CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])
# parts of a sample other than its text, added if a parser is set
PARSED_COLUMNS: Mapping[str, pa.DataType] = {
    REASONING: pa.string(),
    TOOL_CALLS: pa.list_(_TOOL_CALL),
    PARSE_ERROR: pa.string(),
}

Status = Literal["ok", "truncated", "filtered", "too_long", "invalid", "error", "crashed"]

# column of numbers and its type, for the tasks without generation
NUMBERS: Mapping[str, tuple[str, pa.DataType]] = {
    "embed": ("embeddings", pa.list_(pa.float32())),
    "classify": ("embeddings", pa.list_(pa.float32())),
    "score": ("score", pa.float32()),
}

GOOD_STATUSES: tuple[Status, ...] = ("ok", "truncated", "filtered")

_INVALID = (
    "InvalidPrompt InvalidSampling InvalidPooling UnknownAdapter InvalidRowId RowTooLarge "
    "RenderError TokenizeError"
)
_STATUS_OF_ERROR: Mapping[str, Status] = {
    **dict.fromkeys(_INVALID.split(), "invalid"),
    "PromptTooLong": "too_long",
    "CapacityError": "too_long",
    "ReplicaCrash": "crashed",
}
_STATUS_OF_REASON: Mapping[str | None, Status] = {
    "length": "truncated",
    "capacity": "too_long",
    "filtered": "filtered",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSchema:
    """Names and types of the columns that one stage adds; texts or numbers by its task.

    Args:
        num_samples: samples per row; above 1 the columns of a sample become lists.
        prefix: prefix of every name, for a second stage over the same rows.
        parsed: which of `PARSED_COLUMNS` to add.
        answers: constraint (JSON text) whose schema is the type of a column `parsed`; None: none.
    """

    num_samples: int = 1
    has_logprobs: bool = False
    prefix: str = ""
    task: Task = "generate"
    parsed: tuple[str, ...] = ()
    answers: str | None = None

    @property
    def answer_type(self) -> AnswerType | None:
        return None if self.answers is None else answer_type(self.answers)

    def arrow(self) -> pa.Schema:
        """Return names and types of the added columns, in order."""

        def per_sample(kind: pa.DataType) -> pa.DataType:
            return kind if self.num_samples == 1 else pa.list_(kind)

        if self.task == "generate":
            answer = {
                "generated_text": per_sample(pa.string()),
                "generated_tokens": per_sample(pa.list_(pa.int32())),
            }
            counted = {"num_generated_tokens": per_sample(pa.int32())}
        else:
            name, kind = NUMBERS[self.task]
            answer, counted = {name: kind}, {}
        columns = {
            ROW_ID: pa.string(),
            **answer,
            "num_input_tokens": pa.int32(),
            **counted,
            "num_cached_tokens": pa.int32(),
            "finish_reason": per_sample(pa.string()),
            "group_id": pa.int64(),
            "attempts": pa.int32(),
            **({"logprobs": per_sample(LOGPROBS_TYPE)} if self.has_logprobs else {}),
            **{name: per_sample(PARSED_COLUMNS[name]) for name in self.parsed},
            **self._typed(per_sample),
            ERROR_COLUMN: pa.string(),
        }
        return pa.schema([(self.prefix + name, kind) for name, kind in columns.items()])

    def _typed(self, per_sample: Callable[[pa.DataType], pa.DataType]) -> dict[str, pa.DataType]:
        if (kind := self.answer_type) is None:
            return {}
        return {PARSED: per_sample(kind.arrow), PARSED_ERROR: per_sample(pa.string())}

    def attach(self, user: pa.Table, columns: Mapping[str, Iterable[object]]) -> pa.Table:
        """Return the user's columns, untouched, followed by the added ones.

        A user column named like the row id is replaced; `check_collisions` allows it only for the
        id column. `columns` has every name of `arrow()` without the prefix.
        """
        row_id = self.prefix + ROW_ID
        table = user.drop_columns([row_id]) if row_id in user.column_names else user
        for field in self.arrow():
            values = columns[field.name.removeprefix(self.prefix)]
            array = values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
            table = table.append_column(field, array)
        return table

    def prefix_beside(self, user: pa.Schema) -> str:
        """Return the prefix; a new one if an earlier stage has written all these columns.

        Example:
            >>> OutputSchema().prefix_beside(OutputSchema().arrow())
            'stage2_'
        """
        if self.prefix or not set(self.arrow().names).issubset(user.names):
            return self.prefix
        prefixes = (f"stage{number}_" for number in count(2))
        return next(p for p in prefixes if not any(n.startswith(p) for n in user.names))

    def check_collisions(self, user: pa.Schema, *, id_column: str | None) -> None:
        """Raise ConfigError if a user column has the name of an output column."""
        for name in self.arrow().names:
            if name not in user.names:
                continue
            if name != id_column or name != self.prefix + ROW_ID:
                raise ConfigError(
                    f"the input already has a column {name!r} (in its files or folders), which the "
                    "stage writes; rename it, leave it out (columns), or set output_prefix "
                    "(--set output_prefix=answer_ in a shell)"
                )
            if (kind := user.field(name).type) != pa.string():
                raise ConfigError(
                    f"the id column {name!r} is {kind}, but the output column of that name is a "
                    "string; rename it, or set output_prefix"
                )


def row_status(finish_reason: str | None, error: str) -> Status:
    """Return the status of a row (or of one of its samples) from its two columns."""
    if error:
        return _STATUS_OF_ERROR.get(error_class(error), "error")
    return _STATUS_OF_REASON.get(finish_reason, "ok")


def error_class(error: str) -> str:
    """Return the class of an error, the first part of "Type: message"."""
    return error.partition(":")[0]


def describe_error(kind: str, cause: BaseException | str) -> str:
    """Return the text of an error column, "Type: message" on one line."""
    message = str(cause) or type(cause).__name__
    return encodable(f"{kind}: {' '.join(message.split())[:2000]}")
