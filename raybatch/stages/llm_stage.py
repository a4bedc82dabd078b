"""`LLMStage`: a language model as a class that Ray Data maps over row batches.

What is here feeds the pool of engines and takes its answers; rendering, tokenizing and finishing
are plain functions in their own modules.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy

from raybatch.actors.pool import PoolHandle, PoolSpec
from raybatch.actors.wire import RESULT_SCHEMA
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    OnError,
    PoolConfig,
    SpecialTokens,
)
from raybatch.engine.tokenizer import Tokenizer
from raybatch.errors import RowError
from raybatch.stages.batches import to_table
from raybatch.stages.finish import Answers, finish_rows
from raybatch.stages.options import (
    Chat,
    MessagesOption,
    OnTooLong,
    StageConfig,
    build_stage_config,
)
from raybatch.stages.prepare import Prepared, find_model, max_model_len, prepare
from raybatch.stages.render import PromptReader, column_of, referenced_columns
from raybatch.stages.schema import ERROR_COLUMN
from raybatch.types import PoolStats, Sampling

logger = logging.getLogger(__name__)

# What feeds well: small row batches, many of them in flight. A feeder only renders, tokenizes and
# waits: it keeps up with some 800,000 prompt tokens per second, more than several engines take.
_CALLS_PER_FEEDER = 16
_REPLICAS_PER_FEEDER = 8
_ROWS_PER_CALL = 256
_CPUS_PER_FEEDER = 0.1

# A feeder that never held more rows than this after so many calls starves an engine.
_FEW_ROWS = 256
_CALLS_BEFORE_HINT = 4


class StageFeeder:
    """What `LLMStage(...)` returns a subclass of; Ray Data makes one object per feeder actor.

    A call takes a row batch of any format and returns an Arrow table: the columns that came in,
    and those of `raybatch.stages.schema`.
    """

    config: ClassVar[StageConfig]
    pool: ClassVar[PoolHandle]
    client: ClassVar[str]

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._hint = _FewRowsHint()
        self._checked_schema: pa.Schema | None = None
        try:
            model_dir = find_model(self.config)
            # engines load their weights while this feeder loads its tokenizer
            self.pool.start()
            self._tokenizer = Tokenizer.load(model_dir)
            self._reader = PromptReader(self.config, self._tokenizer)
            self._max_model_len = max_model_len(self.config, model_dir)
        except Exception as error:
            # Ray replaces an actor whose constructor raises, again and again, and keeps the cause
            # to itself; a call that raises ends the job at once and says why.
            self._failure = error

    async def __call__(self, batch: Any) -> pa.Table:  # noqa: ANN401 - whatever Ray Data has
        """Return the row batch with the answers; one row out per row in, in the same order.

        Raises:
            ConfigError: a column is missing, or collides with an output column.
            RowError: a row failed and the stage has on_error="raise".
        """
        if self._failure is not None:
            raise self._failure
        table = to_table(batch)
        input_errors = None
        if (column := self.config.input_error_column) is not None:
            input_errors = column_of(table, column).to_pylist()
            table = table.drop_columns([column])
        self._check_columns(table.schema)
        with self._hint.holding(table.num_rows):
            prepared = await asyncio.to_thread(self._prepare, table, input_errors)
            results = RESULT_SCHEMA.empty_table()
            if prepared.rows:
                results = await self.pool.generate(
                    prepared.requests, prepared.samplings, client=self.client
                )
            return await asyncio.to_thread(self._finish, table, prepared, results)

    @classmethod
    def map_options(cls) -> dict[str, Any]:
        """Return the keyword arguments of `map_batches` that keep the engines full.

        Example:
            >>> ds.map_batches(stage, **stage.map_options())  # doctest: +SKIP
        """
        return {
            "batch_format": "pyarrow",
            "batch_size": _ROWS_PER_CALL,
            "num_cpus": _CPUS_PER_FEEDER,
            "compute": ActorPoolStrategy(
                size=_num_feeders(cls.config), max_concurrent_calls_per_actor=_CALLS_PER_FEEDER
            ),
        }

    @classmethod
    def apply(cls, dataset: Any) -> Any:  # noqa: ANN401 - Ray has no types
        """Return the Ray dataset mapped by this stage with `map_options`."""
        return dataset.map_batches(cls, **cls.map_options())

    @classmethod
    def stats(cls) -> PoolStats:
        """Return the state of the pool and what it did for this stage."""
        return cls.pool.stats(cls.client)

    @classmethod
    def with_id_column(cls, id_column: str) -> "type[StageFeeder]":
        """Return the same stage, pool and counters with another id column."""
        config = replace(cls.config, id_column=id_column)
        return type(
            cls.__name__, (StageFeeder,), {"config": config, "pool": cls.pool, "client": cls.client}
        )

    def _check_columns(self, schema: pa.Schema) -> None:
        if self._checked_schema is None or not schema.equals(self._checked_schema):
            self.config.output.check_collisions(schema, id_column=self.config.id_column)
            self._checked_schema = schema

    def _prepare(self, table: pa.Table, input_errors: list[str] | None) -> Prepared:
        prepared = prepare(
            table,
            config=self.config,
            reader=self._reader,
            max_model_len=self._max_model_len,
            input_errors=input_errors,
        )
        if self.config.on_error == "raise":
            for row_id, prompt in zip(prepared.row_ids, prepared.prompts, strict=True):
                _raise_if(row_id, prompt.error)
        return prepared

    def _finish(self, table: pa.Table, prepared: Prepared, results: pa.Table) -> pa.Table:
        finished = finish_rows(
            table,
            row_ids=prepared.row_ids,
            prompts=prepared.prompts,
            answers=Answers(
                rows=prepared.rows, samplings=prepared.request_samplings, results=results
            ),
            tokenizer=self._tokenizer,
            output=self.config.output,
        )
        if self.config.on_error == "raise":
            errors = finished.column(self.config.output_prefix + ERROR_COLUMN).to_pylist()
            for row_id, error in zip(prepared.row_ids, errors, strict=True):
                _raise_if(row_id, error)
        return finished


def LLMStage(  # noqa: N802 - it returns a class
    model: str,
    *,
    prompt: str | None = None,
    messages: MessagesOption | None = None,
    tokenized_prompt: str | None = None,
    system: str | None = None,
    sampling: Sampling | Mapping[str, Any] | None = None,
    overrides: Mapping[str, str] | None = None,
    sampling_column: str | None = None,
    id_column: str | None = None,
    chat: Chat = "auto",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: SpecialTokens = "escape",
    on_error: OnError = "row",
    on_too_long: OnTooLong = "error",
    output_prefix: str = "",
    engine: EngineConfig | Mapping[str, Any] | None = None,
    pool: PoolConfig | Mapping[str, Any] | None = None,
    backend: BackendConfig | Mapping[str, Any] | str | None = None,
    seed: int | None = None,
    **unknown: object,
) -> type[StageFeeder]:
    r"""Return a class for `Dataset.map_batches` that answers every row with a language model.

    Engines start when the dataset runs, are shared by stages with the same model and engine
    options, and stay warm for the next execution. `stage.apply(ds)` feeds them better than
    `ds.map_batches(stage)` where Ray blocks are small, and keeps nulls and time zones that a numpy
    batch cannot hold.

    Args:
        model: checkpoint folder, hub id or URI; "demo" is the embedded model.
        prompt: template with columns in braces, such as "{document} Q: {question}".
        messages: a column of OpenAI messages, a function of the row (a dict) that returns them, or
            a list of messages whose contents are templates.
        tokenized_prompt: a column of token ids.
        system: system message put before the messages of each row that has none.
        sampling: options that decide the tokens.
        overrides: sampling option to the column that replaces it per row; null takes `sampling`.
        sampling_column: a column of JSON texts or structs with several options per row.
        id_column: identity of the rows; without it a hash of the prompt and a count.
        chat: whether `prompt` becomes a user message; "auto" asks whether the model has a chat
            template.
        chat_template: in place of the model's own.
        chat_template_kwargs: options of the chat template, such as enable_thinking.
        special_tokens: "escape" makes special tokens in the data plain text.
        on_error: "row" turns a failure into `__inference_error__`; "raise" ends the job.
        on_too_long: what to do with a prompt that leaves no room in the context: "error",
            "truncate_left", "truncate_right" or "drop" (an empty row with reason "filtered").
        output_prefix: put before every output column, for a second stage over the same rows.
        engine: options of the engines.
        pool: replicas and their resources.
        backend: what a replica runs.
        seed: of the sampling; the seed of a row follows from it and from the row's id.
        unknown: nothing; a name that is none of the above is refused.

    Raises:
        ConfigError: an unknown option (with a suggestion), a value out of range or a bad template.

    Example:
        >>> stage = LLMStage("demo", prompt="{document}\n\nQ: {question}\nA:")
        >>> ds.map_batches(stage).write_parquet("answers/")  # doctest: +SKIP
    """
    options = {
        "prompt": prompt,
        "messages": messages,
        "tokenized_prompt": tokenized_prompt,
        "system": system,
        "sampling": sampling,
        "overrides": overrides,
        "sampling_column": sampling_column,
        "id_column": id_column,
        "chat": chat,
        "chat_template": chat_template,
        "chat_template_kwargs": chat_template_kwargs,
        "special_tokens": special_tokens,
        "on_error": on_error,
        "on_too_long": on_too_long,
        "output_prefix": output_prefix,
        "engine": engine,
        "pool": pool,
        "backend": backend,
        "seed": seed,
        **unknown,
    }
    return build_stage(build_stage_config(model, options, where="LLMStage"))


def build_stage(config: StageConfig) -> type[StageFeeder]:
    """Return the class of a stage with these options."""
    referenced_columns(config)  # parses the templates: a bad one is an error here, not in a feeder
    spec = PoolSpec(
        model=config.model, backend=config.backend, engine=config.engine, pool=config.pool
    )
    client = f"stage-{uuid.uuid4().hex[:12]}"
    return type(
        "LLMStage", (StageFeeder,), {"config": config, "pool": PoolHandle(spec), "client": client}
    )


def _num_feeders(config: StageConfig) -> int:
    num_replicas = config.pool.replicas
    if num_replicas is None:
        num_replicas = int(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0
    return max(1, -(-num_replicas // _REPLICAS_PER_FEEDER))


def _raise_if(row_id: str, error: str) -> None:
    if error:
        raise RowError(f"row {row_id!r}: {error}")


class _FewRowsHint:
    """Logs one line where Ray hands a feeder so few rows at once that engines wait for more."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_rows = 0
        self._most_rows = 0

    @contextmanager
    def holding(self, num_rows: int) -> Iterator[None]:
        """Count the rows that a call holds until it ends."""
        self._num_rows += num_rows
        self._most_rows = max(self._most_rows, self._num_rows)
        try:
            yield
        finally:
            self._num_rows -= num_rows
            self._num_calls += 1
            if self._num_calls == _CALLS_BEFORE_HINT and self._most_rows < _FEW_ROWS:
                logger.warning(
                    "Ray hands over at most %d rows at once, too few to fill the engines; "
                    "stage.apply(ds) in place of ds.map_batches(stage) keeps %d row batches in "
                    "flight",
                    self._most_rows,
                    _CALLS_PER_FEEDER,
                )
