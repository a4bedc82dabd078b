"""A user's functions of a row, mapped over row batches so that a failing row is an error value.

`preprocess` is merged into the row, `postprocess` replaces it, as in ray.data.llm.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raybatch.errors import ConfigError, error_text
from raybatch.stages.batches import python_rows, python_values
from raybatch.stages.chaining import SAMPLING_COLUMN, drop_leftovers
from raybatch.stages.schema import ERROR_COLUMN, describe_error

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any]]

INPUT_ERROR_COLUMN = "__rb_input_error__"

# Columns that ray.data.llm acts on and that nothing here reads.
_UNSUPPORTED_COLUMNS: Mapping[str, str] = {
    "model": "adapters",
    "multimodal_data": "multimodal input",
    "mm_processor_kwargs": "multimodal input",
    "multimodal_uuids": "multimodal input",
    "pooling_params": "pooling tasks",
}

# What a good row holds at least, for a batch in which every row has failed.
_EXAMPLE_ANSWER: Mapping[str, Any] = {
    "generated_text": "",
    "generated_tokens": [],
    "num_input_tokens": 1,
    "finish_reason": "stop",
    ERROR_COLUMN: "",
}


class Preprocess:
    """Maps `function` over a batch: what it returns is merged into the row.

    Columns that it does not return stay as they are. A row that carries an error of an earlier
    processor keeps it and is not shown to the function. Two columns are always there afterwards:
    the errors of the function, and the sampling options as JSON texts (as Arrow structs they
    would turn ints into floats and absent into null).

    After an earlier processor, which `__inference_error__` shows, its columns make room for those
    of this one: its outputs, and the inputs that the function does not return. The function sees
    them all, and can return their values, under other names or under the same.

    Args:
        function: of the user; None merges nothing.
        model: of the stage, which the column `model` may name.
    """

    def __init__(self, function: RowFunction | None, *, model: str = "") -> None:
        self._function = function
        self._model = model

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the table with the merged columns.

        Raises:
            ConfigError: a row asks for something that there is not, or the rows of an earlier
                processor come with its prompts and no new ones.
        """
        is_chained = ERROR_COLUMN in table.column_names
        errors = [""] * table.num_rows
        if is_chained:
            errors = [error or "" for error in table.column(ERROR_COLUMN).to_pylist()]
            table = table.drop_columns([ERROR_COLUMN])
        before = table
        returned: list[Mapping[str, Any] | None] = [None if error else {} for error in errors]
        if self._function is not None:
            returned, errors = _map_good(table, errors, self._function, "PreprocessError")
            table = _merge(table, returned)
        if is_chained:
            table = drop_leftovers(table, before, returned)
        self._check_supported(table)
        if SAMPLING_COLUMN not in table.column_names:
            table = table.append_column(SAMPLING_COLUMN, pa.nulls(table.num_rows, pa.string()))
        return table.append_column(INPUT_ERROR_COLUMN, pa.array(errors, pa.string()))

    def _check_supported(self, table: pa.Table) -> None:
        for name, feature in _UNSUPPORTED_COLUMNS.items():
            if name not in table.column_names:
                continue
            column = table.column(name).drop_null()
            if name == "model" and set(map(str, python_values(column))) <= {self._model}:
                continue
            if len(column):
                raise ConfigError(
                    f"the rows have a column {name!r}, which asks for {feature}; that is not "
                    "supported: drop the column, or rename it if it is data of yours"
                )


class Postprocess:
    """Maps `function` over a batch: what it returns replaces the row.

    A row with an error is not shown to the function: it keeps the values of the columns that the
    function's rows have under the same name, and null in the others. `__inference_error__` is
    always there. A column that the function hands through stays as it is.
    """

    def __init__(self, function: RowFunction) -> None:
        self._function = function

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the table of what the function returned."""
        errors = table.column(ERROR_COLUMN).to_pylist()
        returned, errors = _map_good(table, errors, self._function, "PostprocessError")
        example = self._example(table) if all(row is None for row in returned) else None
        names = _names([*returned, example])
        columns = {
            name: _replaced_column(name, table, returned, example)
            for name in names
            if name != ERROR_COLUMN
        }
        return pa.table({**columns, ERROR_COLUMN: pa.array(errors, pa.string())})

    def _example(self, table: pa.Table) -> Mapping[str, Any] | None:
        """Return what the function makes of an imagined good row, to know its columns."""
        rows = python_rows(table.slice(0, 1))
        if not rows or isinstance(rows[0], Exception):
            return None
        found, _ = _map_rows([{**rows[0], **_EXAMPLE_ANSWER}], self._function, "PostprocessError")
        return found[0]


def _map_good(
    table: pa.Table, errors: Sequence[str], function: RowFunction, kind: str
) -> tuple[list[Mapping[str, Any] | None], list[str]]:
    """Map the rows without an error; return None for the others, and the errors of all."""
    rows = python_rows(table)
    good = [i for i, error in enumerate(errors) if not error]
    found, failures = _map_rows([rows[i] for i in good], function, kind)
    returned: list[Mapping[str, Any] | None] = [None] * len(rows)
    all_errors = list(errors)
    for i, row, failure in zip(good, found, failures, strict=True):
        returned[i], all_errors[i] = row, failure
    return returned, all_errors


def _map_rows(
    rows: Sequence[dict[str, Any] | Exception], function: RowFunction, kind: str
) -> tuple[list[Mapping[str, Any] | None], list[str]]:
    returned: list[Mapping[str, Any] | None] = []
    errors: list[str] = []
    for row in rows:
        try:
            if isinstance(row, Exception):
                raise row
            result = function(dict(row))
            if not isinstance(result, Mapping):
                raise TypeError(f"the function must return a dict, got {type(result).__name__}")
            _check_encodable(result)
        except Exception as error:  # the function is the user's
            returned.append(None)
            errors.append(describe_error(kind, error_text(error)))
        else:
            returned.append(result)
            errors.append("")
    return returned, errors


def _check_encodable(value: object) -> None:
    """Raise UnicodeEncodeError for a text with lone surrogates, which Arrow cannot hold."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_encodable(item)
    elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        for item in value:
            _check_encodable(item)


def _merge(table: pa.Table, returned: Sequence[Mapping[str, Any] | None]) -> pa.Table:
    for name in _names(returned):
        values = [None if row is None else row.get(name) for row in returned]
        if name in table.column_names:
            column = _overwritten(table.column(name), values, returned, name)
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, _array(name, values))
    return table


def _overwritten(
    column: pa.ChunkedArray,
    values: list[Any],
    returned: Sequence[Mapping[str, Any] | None],
    name: str,
) -> pa.Array | pa.ChunkedArray:
    """Keep the value of a row whose function failed or left the column out."""
    old = python_values(column)
    kept = [
        before if row is None or name not in row else value
        for before, value, row in zip(old, values, returned, strict=True)
    ]
    return column if _is_equal(kept, old) else _array(name, kept, like=column.type)


def _replaced_column(
    name: str,
    table: pa.Table,
    returned: Sequence[Mapping[str, Any] | None],
    example: Mapping[str, Any] | None,
) -> pa.Array | pa.ChunkedArray:
    column = table.column(name) if name in table.column_names else None
    old = [None] * table.num_rows if column is None else python_values(column)
    values = [
        before if row is None else row.get(name) for before, row in zip(old, returned, strict=True)
    ]
    if column is not None:
        return column if _is_equal(values, old) else _array(name, values, like=column.type)
    if example is not None:
        return pa.nulls(len(values), _array(name, [example.get(name)]).type)
    return _array(name, values)


def _is_equal(values: list[Any], old: list[Any]) -> bool:
    """Compare with freshly read values: a function may have changed a list in place."""
    try:
        return all(a is b or a == b for a, b in zip(values, old, strict=True))
    except ValueError:  # arrays, whose comparison is no truth value
        return False


def _names(rows: Sequence[Mapping[str, Any] | None]) -> list[str]:
    return list(dict.fromkeys(name for row in rows if row is not None for name in row))


def _array(name: str, values: list[Any], *, like: pa.DataType | None = None) -> pa.Array:
    """Return values as an array, of the type that the column had where they fit it."""
    if like is not None and name != SAMPLING_COLUMN:
        try:
            return pa.array(values, like)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            like = None
    if name == SAMPLING_COLUMN:
        values = [v if v is None or isinstance(v, str) else _json(v) for v in values]
        return pa.array(values, pa.string())
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        if name == "messages":  # contents of several kinds have no common Arrow type
            return pa.array([None if v is None else _json(v) for v in values], pa.string())
        raise ConfigError(
            f"the rows of one batch hold values of different types in {name!r}: {error}"
        ) from error


def _json(value: object) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:  # noqa: ANN401 - numpy values of a row
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
