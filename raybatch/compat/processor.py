"""`build_processor`: the API of ray.data.llm over a raybatch stage.

The functions of a row that a user passes run over row batches; a failing row becomes an error
value. `preprocess` is merged into the row, `postprocess` replaces it, as in ray.data.llm.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raybatch.backends.endpoint import PromptTokenizer
from raybatch.backends.registry import type_of
from raybatch.compat.options import ProcessorConfig, stage_config
from raybatch.compat.row_columns import (
    ADAPTER_COLUMN,
    INPUT_ERROR_COLUMN,
    MEDIA_COLUMN,
    POOLING_COLUMN,
    PROMPT_IDS_COLUMN,
    SAMPLING_COLUMN,
    Convert,
    Row,
    copied,
    drop_leftovers,
    is_same,
    mark_messages,
    merge,
    plain_value,
    replace,
    replace_failed,
    requested_value,
    rows_of,
)
from raybatch.errors import ConfigError, RowError, did_you_mean, error_text
from raybatch.records.types import UNBOUNDED_TOKENS, Task
from raybatch.rows.batches import python_values
from raybatch.rows.options import PROMPT_COLUMNS
from raybatch.rows.prepare import Prepared
from raybatch.rows.schema import ERROR_COLUMN, describe_error
from raybatch.stages.feeder import StageFeeder, build_stage
from raybatch.text.tokenizer import Prompt

logger = logging.getLogger(__name__)

_INPUT_COLUMNS = {
    "messages": "messages of OpenAI's chat API",
    "tokenized_prompt": "token ids",
    "prompt": "a complete prompt text, without a chat template",
}
_OPTIONAL_COLUMNS = {
    SAMPLING_COLUMN: "sampling options of the row, a dict or a JSON text",
    POOLING_COLUMN: "pooling options of the row, a dict or a JSON text",
    ADAPTER_COLUMN: "adapter of the row",
}
# columns with a meaning in ray.data.llm, and how to get it here
_ASKING_COLUMNS: Mapping[str, str] = {
    ADAPTER_COLUMN: "names adapters: set enable_lora in engine_kwargs, with backend='vllm'",
    MEDIA_COLUMN: (
        "has images: set backend='vllm' and task_type='generate', or use image_url parts of "
        "messages with an endpoint"
    ),
    "mm_processor_kwargs": (
        "has options of images: set mm_processor_kwargs in engine_kwargs, for all rows alike"
    ),
    "multimodal_uuids": "names images, which are identified by their bytes here",
    POOLING_COLUMN: "has options of pooling: set task_type to 'embed', 'classify' or 'score'",
    "tokenization_kwargs": (
        "has options of a tokenizer: cut texts in preprocess, or return tokenized_prompt from it"
    ),
}

# minimum columns of a good row, for a batch in which every row has failed
_EXAMPLES: Mapping[Task, Mapping[str, Any]] = {
    "generate": {"generated_text": "", "generated_tokens": []},
    "embed": {"embeddings": [1.0]},
    "classify": {"embeddings": [1.0]},
    "score": {"score": 1.0},
}
_EXAMPLE_ENDS = {"num_input_tokens": 1, "finish_reason": "stop", ERROR_COLUMN: ""}
# mutable types that a function can change in place
_NESTED = (list, Mapping)
_SHOWN_COLUMNS = 10
# types that Arrow or at least pickle can store
_STORED = (
    bool,
    int,
    float,
    bytes,
    date,
    time,
    timedelta,
    Decimal,
    np.ndarray,
    np.generic,
    type(None),
)
_GONE: Mapping[str, str] = {
    "batch_uuid": "rows do not run in batches; row_id names a row",
    "generated_text": "the task makes numbers, in embeddings or score",
    "embeddings": "only the tasks embed and classify make vectors; a score is in score",
    "metrics": "times of single requests are not recorded; engine metrics are in Ray's metrics",
    "params": "the row's own options are in sampling_params",
    "prompt_logprobs": "log probabilities of prompts are not computed",
    "request_id": "row_id names a row, the same in every run",
    "time_taken_llm": "times of single requests are not recorded",
}

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any]]

logger = logging.getLogger(__name__)


class Preprocess:
    """Map `function` over a batch and merge its results into the rows.

    Columns that it neither returns nor sets in its row are unchanged. A row with an error of an
    earlier processor keeps it and is not passed to the function. The result always has a column of
    the function's errors, and sampling options as JSON texts (Arrow structs would turn ints into
    floats and absent into null).

    After an earlier processor, recognized by `__inference_error__`, its outputs, and inputs that
    the function does not return, are dropped. The function gets them all, and can return their
    values, under any name.

    Args:
        model: model of the stage, which the column `model` may name.
        prompt_columns: prompt columns of the stage; the first existing one is used.
    """

    def __init__(
        self,
        function: RowFunction | None,
        *,
        model: str = "",
        prompt_columns: Sequence[str] = PROMPT_COLUMNS,
        task: Task = "generate",
        has_adapters: bool = False,
        has_images: bool = False,
    ) -> None:
        self._function = function
        self._model = model
        self._prompt_columns = prompt_columns
        options = SAMPLING_COLUMN if task == "generate" else POOLING_COLUMN
        self._columns = [options, *([ADAPTER_COLUMN] if has_adapters else [])]
        self._supported = {*self._columns, *([MEDIA_COLUMN] if has_images else [])}

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the table with the merged columns; ConfigError: a column is not supported."""
        is_chained = ERROR_COLUMN in table.column_names
        errors = [""] * table.num_rows
        if is_chained:
            errors = [error or "" for error in table.column(ERROR_COLUMN).to_pylist()]
            table = table.drop_columns([ERROR_COLUMN])
        before = table
        returned: list[Row] = [None if error else {} for error in errors]
        if self._function is not None:
            returned, errors = _map_good(table, errors, self._merged, "PreprocessError")
            table = merge(table, returned)
        if is_chained:
            columns = self._prompt_columns
            table = drop_leftovers(table, before, returned, prompt_columns=columns)
        self._check_supported(table)
        for name in self._columns:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(table.num_rows, pa.string()))
        return table.append_column(INPUT_ERROR_COLUMN, pa.array(errors, pa.string()))

    def _merged(self, row: dict[str, Any]) -> Mapping[str, Any]:
        """Return the function's result, with its in-place changes of the row at any depth."""
        assert self._function is not None, "without a function nothing is merged"
        before = dict(row)
        nested = {name: copied(value) for name, value in row.items() if isinstance(value, _NESTED)}
        returned: Any = self._function(row)
        if isinstance(returned, Mapping):
            is_set = {
                name: value
                for name, value in row.items()
                if name not in before
                or value is not before[name]
                or (name in nested and not is_same(value, nested[name]))
            }
            returned = _unbounded({**is_set, **returned}, nested.get(SAMPLING_COLUMN))
        return _checked(returned, requested_value)

    def _check_supported(self, table: pa.Table) -> None:
        for name, way_out in _ASKING_COLUMNS.items():
            if name not in table.column_names or name in self._supported:
                continue
            column = table.column(name).drop_null()
            if name == "model" and set(map(str, python_values(column))) <= {self._model}:
                continue
            if len(column):
                raise ConfigError(
                    f"the rows have a column {name!r}, which {way_out}. Otherwise drop it, or "
                    "rename it if it is your data"
                )


class Postprocess:
    """Map `function` over a batch and replace the rows by its results.

    An error row is not passed to the function: it keeps the values of columns that the function's
    rows have too, and gets null in the others. If neither a row of the batch nor an example row
    shows these columns, all columns are kept. `__inference_error__` always exists: the row's error,
    or the function's value. A column that the function passes through is unchanged.

    Args:
        ends_job: fail the job if the function fails for a row; otherwise it becomes an error row.
    """

    def __init__(
        self, function: RowFunction, *, task: Task = "generate", ends_job: bool = False
    ) -> None:
        self._function = function
        self._task = task
        self._ends_job = ends_job

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the table of the function's results; RowError: it failed, with `ends_job`."""
        errors = table.column(ERROR_COLUMN).to_pylist()
        returned, errors = _map_good(table, errors, self._show, "PostprocessError")
        if self._ends_job and any(errors):
            place = next(place for place, error in enumerate(errors) if error)
            ids = table.column("row_id").to_pylist() if "row_id" in table.column_names else ()
            raise RowError(
                f"row {ids[place] if ids else place!r}: {errors[place]}; should_continue_on_error="
                "True makes it an error row"
            )
        errors = [
            error or str((row or {}).get(ERROR_COLUMN) or "")
            for row, error in zip(returned, errors, strict=True)
        ]
        is_failed = all(row is None for row in returned)
        columns = self._of_failed(table) if is_failed else replace(table, returned)
        columns.pop(ERROR_COLUMN, None)
        out = pa.table({**columns, ERROR_COLUMN: pa.array(errors, pa.string())})
        return mark_messages(out, table)

    def _show(self, row: dict[str, Any]) -> Mapping[str, Any]:
        return _checked(self._function(AnsweredRow(row)), plain_value)

    def _of_failed(self, table: pa.Table) -> dict[str, Any]:
        """Return the columns for failed rows only: those of good rows, or all existing ones."""
        every = dict(zip(table.column_names, table.columns, strict=True))
        rows = rows_of(table.slice(0, 1))
        if not rows or isinstance(rows[0], Exception):
            return every
        example = {**_EXAMPLES[self._task], **_EXAMPLE_ENDS}
        imagined = {**rows[0], **{n: _shaped(value, table, n) for n, value in example.items()}}
        returned, _ = _map_row(imagined, self._show, "PostprocessError")
        return every if returned is None else replace_failed(table, imagined, returned)


def _shaped(value: Any, table: pa.Table, name: str) -> Any:  # noqa: ANN401 - of an example
    """Return an example value for a column: in a list if rows have several samples."""
    if name not in table.column_names:
        return value
    kind, depth = table.schema.field(name).type, 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return [value] if depth > isinstance(value, list) else value


def _unbounded(row: Mapping[str, Any], held: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Replace max_tokens None ("no limit") by a number, since None later means "not set".

    Arrow structs have all keys in all rows, so None in options read from one may mean "not set".
    """
    options = row.get(SAMPLING_COLUMN)
    if not isinstance(options, Mapping) or options.get("max_tokens", 0) is not None:
        return row
    has_none = isinstance(held, Mapping) and held.get("max_tokens", 0) is None
    if has_none and set(held) <= set(options):
        return row
    return {**row, SAMPLING_COLUMN: {**options, "max_tokens": UNBOUNDED_TOKENS}}


def _map_good(
    table: pa.Table, errors: Sequence[str], function: RowFunction, kind: str
) -> tuple[list[Row], list[str]]:
    """Map the rows without an error; return None for the others, and the errors of all."""
    pairs = [
        (None, error) if error else _map_row(row, function, kind)
        for row, error in zip(rows_of(table), errors, strict=True)
    ]
    return [row for row, _ in pairs], [error for _, error in pairs]


def _map_row(row: dict[str, Any] | Exception, function: RowFunction, kind: str) -> tuple[Row, str]:
    try:
        if isinstance(row, Exception):
            raise row
        return function(dict(row)), ""
    except Exception as error:  # raised by the user's function or its values
        message = error_text(error)
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
        if isinstance(key, str) and not isinstance(row, Exception) and key not in row:
            message += f"; the row has {', '.join(list(row)[:_SHOWN_COLUMNS])}"
        return None, describe_error(kind, message)


def _checked(returned: object, convert: Convert) -> dict[str, Any]:
    """Return a function's result as a row with column values."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"the function must return a dict, got {type(returned).__name__}")
    values = {}
    for name, value in returned.items():
        try:
            values[name] = convert(name, value)
            _check_storable(values[name])
        except UnicodeEncodeError:  # its message has the text
            raise
        except Exception as error:  # also errors of PIL for corrupt images
            raise ValueError(f"column {name!r}: {error}") from error
    return values


def _check_storable(value: object) -> None:
    """Raise for a text with lone surrogates, or an object that cannot be pickled."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif isinstance(value, Mapping):
        _check_storable(list(value.values()))
    elif isinstance(value, list | tuple):
        if value and not isinstance(value[0], int | float):
            for item in value:
                _check_storable(item)
    elif not isinstance(value, _STORED):
        from ray import cloudpickle  # slow to load, and few values are objects

        cloudpickle.dumps(value)


class AnsweredRow(dict[str, Any]):
    """A row as a dict; a KeyError for a column of ray.data.llm says what to use instead."""

    def __missing__(self, name: str) -> Any:  # noqa: ANN401
        reason = _GONE.get(name)
        raise KeyError(name if reason is None else f"no column {name!r}: {reason}")


class ProcessorFeeder(StageFeeder):
    """A stage feeder that adds the prompts of the rows to the answers."""

    def _check_columns(self, schema: pa.Schema) -> None:
        if PROMPT_IDS_COLUMN in schema.names:
            raise ConfigError(
                f"the input already has a column {PROMPT_IDS_COLUMN!r}, which the processor "
                "writes; rename it"
            )
        super()._check_columns(schema)

    def _finish(self, prepared: Prepared, results: pa.Table) -> pa.Table:
        prompts = prepared.prompts
        if type_of(self.config.backend).is_endpoint:  # renders and tokenizes itself
            prompts = [p if p.payload is None else Prompt(None) for p in prompts]
        return add_prompts(super()._finish(prepared, results), prompts, self._tokenizer)


def add_prompts(table: pa.Table, prompts: Sequence[Prompt], tokenizer: PromptTokenizer) -> pa.Table:
    """Return the table with columns `prompt_token_ids` and `prompt`; an existing `prompt` stays.

    Images appear as the placeholders of the chat template.
    """
    ids = [p.token_ids if p.engine_ids is None else p.engine_ids for p in prompts]
    table = table.append_column(PROMPT_IDS_COLUMN, pa.array(ids, pa.list_(pa.int32())))
    if "prompt" in table.column_names:
        return table
    try:
        known = [one for one in ids if one is not None]
        decoded = iter(tokenizer.decode_batch(known, False, after=[()] * len(known)))
        texts = [None if one is None else next(decoded) for one in ids]
    except Exception:  # a tokenizer may raise any error; the ids alone are the prompt
        texts = [None] * len(ids)
    return table.append_column("prompt", pa.array(texts, pa.string()))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Processor:
    """Maps a Ray dataset: preprocess, generate, postprocess; build it with `build_processor`."""

    config: ProcessorConfig
    stage: type[StageFeeder]
    preprocess: Preprocess
    postprocess: Postprocess | None
    preprocess_map_kwargs: Mapping[str, Any]
    postprocess_map_kwargs: Mapping[str, Any]
    plan: bool | Literal["auto"] = "auto"

    def __call__(self, dataset: Any) -> Any:  # noqa: ANN401 - Ray has no types
        """Return the lazily mapped dataset; at most a sample of it runs here."""
        if not hasattr(dataset, "map_batches"):
            raise ConfigError(
                f"a processor maps a Ray dataset, got {type(dataset).__name__}; make one from rows "
                "with ray.data.from_items(rows)"
            )
        runtime_env = self.config.runtime_env
        placed = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}

        from raybatch.stages.planned import planned_dataset  # Ray is slow to load

        dataset = planned_dataset(
            dataset,
            self.stage,
            self.plan,
            before=self.preprocess.__call__,
            before_args=self.preprocess_map_kwargs,
            remote_args=placed,
        )
        dataset = dataset.map_batches(self.stage, **self.stage.map_options(), **placed)
        if self.postprocess is None:
            return dataset
        return dataset.map_batches(
            self.postprocess.__call__, batch_format="pyarrow", **self.postprocess_map_kwargs
        )

    def list_stage_names(self) -> list[str]:
        """Return the names of the stages between preprocess and postprocess."""
        return ["LLMStage"]

    def get_stage_by_name(self, name: str) -> type[StageFeeder]:
        """Return a stage by name; ConfigError: it does not exist."""
        if name != "LLMStage":
            raise ConfigError(
                f"the processor has no stage {name!r}{did_you_mean(name, self.list_stage_names())}"
            )
        return self.stage

    def log_input_column_names(self) -> None:
        """Log the columns that rows need after preprocess."""
        config = self.stage.config
        needed = "query and document: two texts"
        if config.query is None:
            named = config.conventional_columns
            needed = "; or ".join(f"{name}: {_INPUT_COLUMNS[name]}" for name in named)
        read = (config.sampling_column, config.pooling_column, config.lora_column)
        optional = "; ".join(f"{name}: {_OPTIONAL_COLUMNS[name]}" for name in read if name)
        logger.info("each row needs the input columns %s. Optional columns: %s", needed, optional)


def build_processor(
    config: ProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    builder_kwargs: Mapping[str, Any] | None = None,
    plan: bool | Literal["auto"] = "auto",
) -> Processor:
    """Return a processor, as `ray.data.llm.build_processor` does.

    Rows need `messages`, `prompt` (a complete prompt: without chat template, and special tokens in
    it are control tokens) or `tokenized_prompt`, and may have `sampling_params`. Besides the
    columns of a stage the result has `prompt_token_ids`, `logprobs` (for generation) and, unless
    the rows have it, `prompt`.

    Args:
        config: model and engines; `vLLMEngineProcessorConfig` runs vLLM.
        preprocess: function of the row (a dict) whose result is merged into the row.
        postprocess: function of the answered row whose result replaces it; not called for error
            rows, which keep their columns and `__inference_error__`.
        builder_kwargs: only `chat_template_kwargs`.
        plan: as in `stage.apply`.

    Raises:
        ConfigError: an unknown or unsupported option.

    Example:
        >>> config = ProcessorConfig(model_source="demo")
        >>> processor = build_processor(config, lambda row: {"prompt": row["text"]})
        >>> processor(ds).write_parquet("answers/")  # doctest: +SKIP
    """
    given: object = config
    if not isinstance(given, ProcessorConfig):
        raise ConfigError(
            "config must be a ProcessorConfig or vLLMEngineProcessorConfig of raybatch.llm, got "
            f"{type(given).__module__}.{type(given).__name__}"
        )
    for name in builder_kwargs or {}:
        if name != "chat_template_kwargs":
            hint = did_you_mean(name, ["chat_template_kwargs"])
            raise ConfigError(f"builder_kwargs: unknown option {name!r}{hint}")
    for name, function in (("preprocess", preprocess), ("postprocess", postprocess)):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} must be a function of the row, got {function!r:.200}")
    names = ("preprocess_map_kwargs", "postprocess_map_kwargs")
    map_kwargs = dict(zip(names, (preprocess_map_kwargs, postprocess_map_kwargs), strict=True))
    for name, options in map_kwargs.items():
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"{name} must be a mapping, got {options!r:.200}")
    of_template = (builder_kwargs or {}).get("chat_template_kwargs")
    stage = build_stage(stage_config(config, of_template), feeder=ProcessorFeeder)
    task = stage.config.task
    return Processor(
        config=config,
        stage=stage,
        preprocess=Preprocess(
            preprocess,
            model=config.model_source,
            prompt_columns=() if task == "score" else stage.config.conventional_columns,
            task=task,
            has_adapters=stage.config.lora_column is not None,
            has_images=stage.config.conventional_images is not None,
        ),
        postprocess=None
        if postprocess is None
        else Postprocess(postprocess, task=task, ends_job=stage.config.on_error == "raise"),
        plan=plan,
        **{name: options or {} for name, options in map_kwargs.items()},
    )
