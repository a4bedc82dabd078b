"""Arrow columns from the results of a user's row functions.

A column that a function passes through is unchanged, so values are compared as Arrow values: 1,
1.0 and True differ.
"""

import json
import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.rows.batches import is_any_type, is_objects, python_rows, python_values
from raybatch.rows.image_files import MEDIA_TYPE, data_url, media, plain
from raybatch.rows.options import PROMPT_COLUMNS
from raybatch.rows.schema import OutputSchema

logger = logging.getLogger(__name__)

SAMPLING_COLUMN = "sampling_params"
POOLING_COLUMN = "pooling_params"
# column of the adapter
ADAPTER_COLUMN = "model"
# column of images in ray.data.llm
MEDIA_COLUMN = "multimodal_data"
# output column of prompt tokens
PROMPT_IDS_COLUMN = "prompt_token_ids"
# column of the errors of preprocess
INPUT_ERROR_COLUMN = "__rb_input_error__"

# the result of a function for a row; None if it failed
Row = Mapping[str, Any] | None
Column: TypeAlias = pa.Array | pa.ChunkedArray
# converts a function's value for a column to the value in the column
Convert = Callable[[str, Any], Any]

_OPTIONS = {SAMPLING_COLUMN, POOLING_COLUMN}
_MESSAGES = "messages"
# marks a column of messages as JSON of a function's result
_MADE = {b"raybatch": b"messages"}
# fixed types of options and media, the same for all row batches
_TYPES: Mapping[str, pa.DataType] = {
    SAMPLING_COLUMN: pa.string(),
    POOLING_COLUMN: pa.string(),
    MEDIA_COLUMN: MEDIA_TYPE,
}
# raised by Arrow for values of another type
_NO_FORM = (pa.ArrowException, OverflowError, TypeError, ValueError)
# in Python bool is an int and datetime is a date: subclasses come first
_KINDS = (bool, int, float, str, bytes, datetime, date)
# types whose values can be compared by ==
_PLAIN = frozenset({*_KINDS, type(None)})


def requested_value(name: str, value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Convert a value that `preprocess` returns for a column to the form that the stage reads."""
    return media(value) if name == MEDIA_COLUMN else plain_value(name, value)


def plain_value(name: str, value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Convert a value that a function returns for a column to one that Arrow can store.

    Options become JSON texts, and PIL images in messages become image files.
    """
    if name in _OPTIONS:
        return json_text(plain(value))
    if name in (_MESSAGES, MEDIA_COLUMN):
        # endpoints accept URLs
        return plain(value, has_urls=name == _MESSAGES)
    return value


def rows_of(table: pa.Table) -> list[dict[str, Any] | Exception]:
    """Return each row as a dict for functions, or the error of reading one of its values."""
    rows = python_rows(table)
    if _has_made_messages(table):
        for row in rows:
            if isinstance(row, dict):
                row[_MESSAGES] = _read(row[_MESSAGES])
    return rows


def mark_messages(table: pa.Table, before: pa.Table) -> pa.Table:
    """Return the table, with `messages` marked if they are marked in `before` and unchanged.

    The mark says that the column has messages of a function as JSON texts.
    """
    if _MESSAGES not in table.column_names or not _has_made_messages(before):
        return table
    column = table.column(_MESSAGES)
    return _marked(table) if column.equals(before.column(_MESSAGES)) else table


def _marked(table: pa.Table) -> pa.Table:
    place = table.column_names.index(_MESSAGES)
    field = table.schema.field(place).with_metadata(_MADE)
    return table.set_column(place, field, table.column(place))


def _has_made_messages(table: pa.Table) -> bool:
    if _MESSAGES not in table.column_names:
        return False
    marks = table.schema.field(_MESSAGES).metadata or {}
    return _MADE.items() <= marks.items()


def _read(text: str | None) -> Any:  # noqa: ANN401 - data of a row
    """Return a function's value from its JSON; a text of the function itself is no JSON."""
    with suppress(ValueError):
        return None if text is None else json.loads(text)
    return text


def _values(name: str, table: pa.Table) -> list[Any]:
    """Return the values of a column for functions, nulls if it is missing."""
    values = python_values(_column(name, table))
    is_made = name == _MESSAGES and _has_made_messages(table)
    return [_read(value) for value in values] if is_made else values


def merge(table: pa.Table, returned: Sequence[Row]) -> pa.Table:
    """Return the table, updated by the rows that a function returned; None is a failed row.

    A failed row keeps its values.
    """
    for name, column in replace(table, returned, requested_value, is_merge=True).items():
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, column)
    made = (row.get(_MESSAGES) for row in returned if row is not None)
    is_made = any(isinstance(messages, list | tuple) for messages in made)
    return _marked(table) if is_made and _is_text(table.schema.field(_MESSAGES).type) else table


def replace(
    table: pa.Table, returned: Sequence[Row], convert: Convert = plain_value, is_merge: bool = False
) -> dict[str, Column]:
    """Return the columns, by name, of the rows that a function returned; None is a failed row.

    A failed row keeps its old values if they fit the type of the column, else it gets nulls.
    `convert` is applied to values. A row that lacks a column gets its old value with `is_merge`,
    else null.
    """
    columns: dict[str, Column] = {}
    good = [i for i, row in enumerate(returned) if row is not None]
    for name in _names(returned):
        column = _column(name, table)
        # read again: a function may have changed a list in place
        old = [_value_or_error(name, value, convert) for value in _values(name, table)]
        missing = old if is_merge else [None] * len(old)
        values = [row.get(name, missing[i]) for i, row in enumerate(returned) if row is not None]
        if is_same(values, [old[i] for i in good]):
            columns[name] = column
            continue
        if is_merge and name == _MESSAGES and _is_text(column.type):
            # one type in all batches, for any mix of contents and images
            array = pa.array([json_text(value) for value in values], pa.string())
        else:
            array = _array(name, values, like=_TYPES.get(name, column.type))
        columns[name] = array
        if len(good) < len(old):
            columns[name] = _with_failed(name, array, column, old, good=good)
    return columns


def replace_failed(
    table: pa.Table, imagined: Mapping[str, Any], example: Mapping[str, Any]
) -> dict[str, Column]:
    """Return the columns, by name, of a table of failed rows only, with the types of good rows.

    `example` is what the function returns for `imagined`, an example of a good row.
    """
    columns = {}
    for name, value in example.items():
        columns[name] = column = _column(name, table)
        handed = _value_or_error(name, imagined.get(name), plain_value)
        if name not in imagined or not is_same(value, handed):
            array = _array(name, [value], like=_TYPES.get(name, column.type))
            old = [_value_or_error(name, v, plain_value) for v in _values(name, table)]
            columns[name] = _with_failed(name, array.slice(0, 0), column, old, good=[])
    return columns


def json_text(value: Any) -> str | None:  # noqa: ANN401 - data of a row
    """Return a plain value as JSON, with image files as data: URLs; text and None are unchanged."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, default=lambda v: data_url(v) if isinstance(v, bytes) else str(v))


def _names(rows: Sequence[Row]) -> dict[str, None]:
    """Return the names of all columns, in order of first appearance."""
    return dict.fromkeys(name for row in rows if row is not None for name in row)


def _column(name: str, table: pa.Table) -> pa.ChunkedArray:
    """Return a column by name, nulls if it is missing."""
    if name in table.column_names:
        return table.column(name)
    return pa.chunked_array([pa.nulls(table.num_rows, _TYPES.get(name, pa.null()))])


def _value_or_error(name: str, value: Any, convert: Convert) -> Any:  # noqa: ANN401
    """Return the converted value, or the error of converting it."""
    try:
        return convert(name, value)
    except Exception as error:  # the row has failed, or the function does not return the column
        return error


def _with_failed(
    name: str, array: Column, column: pa.ChunkedArray, old: Sequence[Any], *, good: Sequence[int]
) -> pa.ChunkedArray:
    """Return the values of good rows, interleaved with those of failed rows."""
    failed = sorted(set(range(len(old))).difference(good))
    kept = [_in_type(name, column.slice(i, 1).combine_chunks(), old[i], array.type) for i in failed]
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    order = np.argsort([*good, *failed])
    return pa.chunked_array([*chunks, *kept], array.type).take(pa.array(order))


def _in_type(name: str, held: pa.Array, value: Any, kind: pa.DataType) -> pa.Array:  # noqa: ANN401
    """Return a value of a failed row in another type, null where it has no form in that."""
    if held.type == kind:
        return held
    # Arrow would reinterpret the bytes of pickled objects
    if not is_objects(held.type) and not is_objects(kind):
        with suppress(*_NO_FORM):
            cast = held.cast(kind)
            # Arrow would cast 5 to True, and a time to a date
            if not is_any_type(kind, "boolean date time") or is_same(
                python_values(cast.cast(held.type)), python_values(held)
            ):
                return cast
    if isinstance(value, Exception):
        return pa.nulls(1, kind)
    if name == _MESSAGES and pa.types.is_string(kind):
        value = json_text(value)
    array = _of_type(kind, [value])
    return pa.nulls(1, kind) if array is None else array


def _array(name: str, values: Sequence[Any], *, like: pa.DataType) -> Column:
    """Return values as an array, of type `like` if it represents them exactly."""
    if (kept := _of_type(like, values)) is not None:
        return kept
    try:
        inferred = pa.array(values)
        # the other way round, Arrow says it itself
        if pa.types.is_date(inferred.type) and any(isinstance(v, datetime) for v in values):
            raise TypeError("a datetime after a date")
    except _NO_FORM as error:
        return _as_ray_has_them(name, values, error)
    # NumPy numbers, and mixed numbers, are the same in both
    kept = _of_type(like, python_values(inferred))
    return inferred if kept is None else kept


def _as_ray_has_them(name: str, values: Sequence[Any], cause: Exception) -> Column:
    """Return values without a common Arrow type as Ray Data does: tensors, else pickled objects."""
    from ray.data import DataContext  # slow to load, and most values have a type
    from ray.data.block import BlockAccessor

    if DataContext.get_current().enable_fallback_to_arrow_object_ext_type is False:
        raise ConfigError(
            f"the rows of one batch have values of different types in {name!r}: {cause!s:.500}; "
            "return json.dumps of them, or leave enable_fallback_to_arrow_object_ext_type of Ray's "
            "DataContext unset to pickle them"
        ) from cause
    if any(isinstance(value, np.ndarray) for value in values):
        return BlockAccessor.batch_to_arrow_block({name: list(values)}).column(0)
    _warn_of_objects(name)
    return _objects(values)


@cache
def _warn_of_objects(name: str) -> None:
    """Log a warning once per process and column."""
    logger.warning(
        "values of column %r have no common Arrow type and are pickled, as in Ray Data; return "
        "json.dumps of them to write readable Parquet",
        name,
    )


def _objects(values: Sequence[Any]) -> pa.Array:
    from ray.data.extensions import ArrowPythonObjectArray  # as above

    return ArrowPythonObjectArray.from_objects(values)


def _is_text(kind: pa.DataType) -> bool:
    """Return whether a column can hold texts; a null column has none yet."""
    return is_any_type(kind, "null string large_string")


def _of_type(kind: pa.DataType, values: Sequence[Any]) -> Column | None:
    """Return values as an array of a type; None if that would change them."""
    if is_objects(kind):
        return _objects(values)
    with suppress(*_NO_FORM):
        array = pa.array(values, kind)
        # Arrow silently casts 1.5 to 1, and a datetime to a date
        if is_same(values, python_values(array)):
            return array
    return None


def copied(value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Return a copy of the lists and mappings in a value; everything else is shared."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        # token ids and texts are many, and need no look each
        is_flat = _PLAIN.issuperset(set(map(type, value)))
        return value.copy() if is_flat else [copied(item) for item in value]
    return value


def is_same(value: Any, held: Any) -> bool:  # noqa: ANN401 - data of a row
    """Return whether a value equals the value read from Arrow, with the same types at every depth.

    Tuples equal lists, NaN equals NaN, a subclass its base, and a mapping the pairs of an Arrow
    map; a missing key equals None.
    """
    if value is None or held is None or value is held:
        return value is held
    if isinstance(value, Mapping):
        if not isinstance(held, Mapping):
            return isinstance(held, list) and is_same(list(value.items()), held)
        if any(held[key] is not None for key in held.keys() - value.keys()):
            return False
        return all(key in held and is_same(item, held[key]) for key, item in value.items())
    if isinstance(value, list | tuple):
        return isinstance(held, list | tuple) and _are_same(value, held)
    if isinstance(value, np.ndarray) or isinstance(held, np.ndarray):
        return _is_same_array(value, held)
    if _kind(value) is not _kind(held):
        return False
    try:
        return bool(value == held) or bool(value != value and held != held)
    except (ValueError, RuntimeError):  # the comparison has no truth value
        return False


def _are_same(values: Sequence[Any], held: Sequence[Any]) -> bool:
    if len(values) != len(held):
        return False
    # compare long token lists without a loop
    if all(map(operator.is_, values, held)):
        return True
    types = set(map(type, values))
    is_plain = len(types) == 1 and _PLAIN.issuperset(types) and types == set(map(type, held))
    if is_plain and type(values) is type(held) and values == held:
        return True
    return all(map(is_same, values, held))


def _is_same_array(value: Any, held: Any) -> bool:  # noqa: ANN401 - data of a row
    are_arrays = isinstance(value, np.ndarray) and isinstance(held, np.ndarray)
    if not are_arrays or value.dtype != held.dtype or value.shape != held.shape:
        return False
    if value.dtype == object:
        return _are_same(value.tolist(), held.tolist())
    return bool(np.array_equal(value, held, equal_nan=value.dtype.kind in "fc"))


def _kind(value: object) -> type:
    return next((kind for kind in _KINDS if isinstance(value, kind)), type(value))


def drop_leftovers(
    table: pa.Table, before: pa.Table, returned: Sequence[Row], *, prompt_columns: Sequence[str]
) -> pa.Table:
    """Drop the columns of an earlier processor: its outputs, and inputs that are not used again.

    Outputs with general names (numbers, and results of parsers) are kept, and refused by a stage
    that would write them again. `returned` must have new prompts, in the same column for all rows;
    for a stage that scores pairs it need not.

    Args:
        table: rows after preprocess.
        before: rows before it.
        returned: what the function returned for each row; None for a failed one.
        prompt_columns: prompt columns of the stage, in order of preference.
    """
    names = _names(returned).keys()
    chosen = _chosen(before, returned, prompt_columns)
    for name in prompt_columns:
        is_other = name in names and name not in chosen
        if is_other and not table.column(name).equals(before.column(name)):
            raise ConfigError(
                f"preprocess returns {_listed(chosen)} and changes {name!r}, the prompt of an "
                "earlier processor, which is ambiguous; return only the prompt to use"
            )
    # for a stage of pairs, a prompt column is data
    handed = _TYPES.keys() if prompt_columns else {*PROMPT_COLUMNS, *_TYPES}
    inputs = {*(prompt_columns or PROMPT_COLUMNS), *_TYPES} - {*chosen} - (handed & names)
    leftovers = {*OutputSchema(has_logprobs=True).arrow().names, PROMPT_IDS_COLUMN, *inputs}
    return table.drop_columns([name for name in table.column_names if name in leftovers])


def _chosen(
    before: pa.Table, returned: Sequence[Row], prompt_columns: Sequence[str]
) -> tuple[str, ...]:
    """Return the prompt columns to use, by names alone, since values differ between batches.

    The prompt of an earlier processor is used again if it is the only one, or the first one for
    the stage. With a new prompt, as in {**row, "prompt": ...}, it is only passed through.
    """
    old = _prompts_in(before.column_names, prompt_columns)
    if not old:
        return _prompts_in(_names(returned), prompt_columns)
    rows = [_prompts_in(row, prompt_columns) for row in returned if row is not None]
    choices = {tuple(name for name in names if name not in old) or names for names in rows}
    if len(choices) > 1:
        several = " for some rows, and for others ".join(_listed(c) for c in sorted(choices))
        raise ConfigError(
            f"preprocess returns {several}; return the same prompt column for every row"
        )
    (chosen,) = choices or {()}
    if choices and not chosen:
        raise ConfigError(
            f"the column {old[0]!r} has the prompt of an earlier processor; to use it again, "
            f"return it from preprocess, as in lambda row: {{{old[0]!r}: row[{old[0]!r}]}}; else "
            "return new messages, prompt or tokenized_prompt"
        )
    return chosen[:1] if chosen and chosen[0] in old else chosen


def _prompts_in(names: Collection[str], prompt_columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in prompt_columns if name in names)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names)) or "no prompt"
