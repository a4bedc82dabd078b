"""`LLMStage`: a class that submits row batches to the pool of engines and returns its answers.

Rendering, tokenizing and finishing are plain functions in other modules.
"""

import asyncio
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from raybatch.actors.pool import PoolHandle
from raybatch.actors.ray_errors import message_kept
from raybatch.actors.replicas.placement import (
    FeederPlaces,
    cluster_now,
    connected_ray,
    place_feeders,
    plan_placement,
)
from raybatch.actors.wire.columns import RESULT_SCHEMA
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import BackendChoice
from raybatch.backends.registry import type_of
from raybatch.config.option import signature_of
from raybatch.durable.journal import ROW
from raybatch.errors import ConfigError, ReplicaError, RowError
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import Task
from raybatch.rows.batches import to_table
from raybatch.rows.finish import finish_rows
from raybatch.rows.options import StageConfig, build_stage_config
from raybatch.rows.plan_columns import take_off
from raybatch.rows.prepare import Prepared, dedup_keys, prepare, take_input_errors
from raybatch.rows.prompt_inputs import referenced_columns
from raybatch.rows.render import PromptReader
from raybatch.rows.schema import ERROR_COLUMN, ROW_ID, error_class
from raybatch.rows.stage_model import find_model, load_tokenizer, max_model_len
from raybatch.stages.unit_writer import PlacedWatch

# small row batches, with many in flight
CALLS_PER_FEEDER = 16
CALL_ROWS = 256
# time for failing commit units to write their journals
_KEEP_S = 10.0
# a feeder that never held more rows than this, over the first calls, starves an engine
_FEW_ROWS = 256
_CALLS_BEFORE_HINT = 4
# read tasks may hold the CPUs for a moment, so the first check comes after some seconds
_WAITS_FOR_ROWS_S = (5.0, 10.0, 20.0)
_ROWS_BEFORE_ALARM = 20
_MAX_ERROR_LENGTH = 300

logger = logging.getLogger(__name__)


class RequestBatch(NamedTuple):
    """A prepared row batch, and the client name that counts it."""

    prepared: Prepared
    client: str
    watch: PlacedWatch | None


class StageFeeder:
    """Base of the classes that `LLMStage(...)` returns; Ray Data creates one object per feeder.

    A call takes a row batch of any format and returns an Arrow table: the input columns, and those
    of `raybatch.rows.schema`.

    Attributes:
        choice: why this backend runs; None if the user named it, or it is not decided yet.
        weights_choice: whether replicas share weights, and why, if that was chosen.
    """

    # of the class; of an object if the pool decides the backend
    config: StageConfig
    pool: ClassVar[PoolHandle]
    client: ClassVar[str]
    choice: ClassVar[BackendChoice | None] = None
    weights_choice: ClassVar[str] = ""

    @classmethod
    def how_weights_are_held(cls) -> str:
        """Return how replicas hold weights, and why; "" if the stage sets "replicated"."""
        group = cls.config.pool.share_group
        return cls.weights_choice or ("" if group is None else f"shared by {group} replicas")

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._hint = FewRowsHint()
        self._all_failed_alarm = AllFailedAlarm()
        self._no_cpu_hint = NoCpuHint()
        self._no_cpu_hint.start()
        self._checked_schema: pa.Schema | None = None
        try:
            model_dir = find_model(self.config)
            # engines load their weights while this feeder loads its tokenizer
            self.pool.start()
            if not self.config.backend.is_decided:
                # decided by the pool
                self.config = replace(self.config, backend=self.pool.spec.backend)
            self._tokenizer = load_tokenizer(self.config, model_dir)
            self._max_model_len = length = max_model_len(self.config, model_dir)
            self._reader = PromptReader(self.config, self._tokenizer, max_model_len=length)
        except Exception as error:
            # Ray retries an actor whose constructor raises forever, without the cause; a call that
            # raises ends the job at once
            self._failure = error

    async def __call__(self, batch: Any) -> pa.Table:  # noqa: ANN401 - whatever Ray Data has
        """Return the row batch with answers; one output row per input row, in the same order."""
        self._no_cpu_hint.stop()
        with message_kept():
            return await self._map(to_table(batch))

    async def _map(self, table: pa.Table) -> pa.Table:
        with self._hint.holding(table.num_rows):
            return await self._answer(await self._prepare(table))

    async def _prepare(
        self,
        table: pa.Table,
        *,
        changes: Mapping[str, Any] | None = None,
        watch: PlacedWatch | None = None,
    ) -> RequestBatch:
        """Render, tokenize and check rows; `changes` are sampling options of a retry."""
        if self._failure is not None:
            raise self._failure
        table, planned = take_off(table)
        if planned is not None and planned.stages - {self.client}:
            raise ConfigError(
                "the rows have the plan and prompts of another stage; pass raybatch.plan the stage "
                "that answers them"
            )
        table, input_errors = take_input_errors(table, self.config.input_error_column)
        self._check_columns(table.schema)
        prepared = await asyncio.to_thread(
            prepare,
            table,
            config=self._config_for(table.schema),
            reader=self._reader,
            max_model_len=self._max_model_len,
            input_errors=input_errors,
            planned=planned,
            changes=changes,
            refused=None if watch is None else watch.given_up(),
        )
        errors = [prompt.error for prompt in prepared.prompts]
        # retried rows are not counted as new rows of the run
        client = self.client if changes is None else retry_client(self.client)
        self._raise_first(prepared.row_ids, errors)
        self._all_failed_alarm.see(errors)
        num_skipped = sum(not prompt.is_requested for prompt in prepared.prompts)
        await self.pool.note_outside(num_skipped, _error_classes(errors), client=client)
        of_requests = None if watch is None else watch.take(prepared.rows)
        return RequestBatch(prepared, client, of_requests)

    async def _answer(self, batch: RequestBatch, *, name: str = "") -> pa.Table:
        """Return prepared rows with their answers; `name` as in `PoolHandle.generate`."""
        prepared, results = batch.prepared, RESULT_SCHEMA.empty_table()
        copies = prepared.num_copies()
        # a retried row is no duplicate of an earlier one
        joins_dedup = self.config.dedup and batch.client == self.client
        if prepared.rows:
            results = await self.pool.generate(
                prepared.requests,
                prepared.samplings,
                client=batch.client,
                name=name,
                copies=copies,
                dedup_keys=dedup_keys(prepared) if joins_dedup else b"",
                watch=batch.watch,
            )
        finished = await asyncio.to_thread(self._finish, prepared, results)
        # others are counted by the pool, or were before
        num_rows = 1 + copies[results.column("row").to_numpy()]
        counted = [prompt.error for prompt in prepared.prompts]
        counted += np.repeat(results.column("error").to_numpy(), num_rows).tolist()
        errors = _error_classes(self._errors_of(finished)) - _error_classes(counted)
        await self.pool.note_outside(0, errors, client=batch.client)
        return finished

    @classmethod
    def map_options(cls, *, batch_size: int | None = CALL_ROWS) -> dict[str, Any]:
        """Return the keyword arguments of `map_batches` that keep the engines full.

        A call has `batch_size` rows; None takes Ray blocks as they are.

        Example:
            >>> ds.map_batches(stage, **stage.map_options())  # doctest: +SKIP
        """
        from ray.data import ActorPoolStrategy  # slow to load, and a local run does without

        places = cls._places()
        compute = ActorPoolStrategy(
            size=places.num_feeders, max_concurrent_calls_per_actor=CALLS_PER_FEEDER
        )
        return {
            "batch_format": "pyarrow",
            "batch_size": batch_size,
            "num_cpus": places.num_cpus,
            "compute": compute,
            **places.labels(),
        }

    @classmethod
    def _places(cls) -> FeederPlaces:
        cluster = cluster_now()
        plan = plan_placement(cls.pool.spec, cluster)
        return place_feeders(plan, cls.config.pool, cluster.hosts)

    @classmethod
    def waiting_rows(cls) -> int:
        """Return how many rows the pool holds at a time; without a plan only these are grouped."""
        return cls._places().num_feeders * CALLS_PER_FEEDER * CALL_ROWS

    @classmethod
    def apply(
        cls,
        dataset: Any,  # noqa: ANN401 - Ray has no types
        *,
        plan: bool | Literal["auto"] = "auto",
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return the Ray dataset mapped by this stage with `map_options(**options)`.

        If `plan` is True, rows run in the order of `raybatch.plan`. "auto" samples Parquet files or
        data in memory, and plans if that saves more time than it costs (one minute at most); the
        decision is logged. If False, rows run in input order.
        """
        from raybatch.stages.planned import planned_dataset  # Ray is slow to load

        return planned_dataset(dataset, cls, plan).map_batches(cls, **cls.map_options(**options))

    @classmethod
    def stats(cls, *, again: bool = False) -> PoolStats:
        """Return the pool counts of this stage, with `again` those of rows that waves retry."""
        return cls.pool.stats(retry_client(cls.client) if again else cls.client)

    @classmethod
    def settled(cls, *, began_with: str | None = None, connect: bool = True) -> "type[StageFeeder]":
        """Return the same stage with a decided backend, by the resources of its engines.

        `began_with` is the kind of backend of an existing output, which is kept. Without a
        connection to a cluster, and without `connect`, options alone decide. Raises ConfigError if
        none can be decided.
        """
        if cls.config.backend.is_decided:
            return cls
        pool, choice = cls.pool.settled(began_with=began_with, connect=connect)
        config = replace(cls.config, backend=pool.spec.backend)
        attributes = {"config": config, "pool": pool, "choice": choice}
        return type(cls.__name__, (cls,), attributes)

    @classmethod
    def of_model(cls, model: str) -> "type[StageFeeder]":
        """Return the same stage and pool with another model."""
        config = replace(cls.config, model=model)
        pool = PoolHandle(replace(cls.pool.spec, model=model), is_local=cls.pool.is_local)
        return type(cls.__name__, (cls,), {"config": config, "pool": pool})

    @classmethod
    def of_run(cls, *, id_column: str | None) -> "type[StageFeeder]":
        """Return the same stage with separate counts in the pool; `None` keeps its id column."""
        config = cls.config if id_column is None else replace(cls.config, id_column=id_column)
        client = f"run-{uuid.uuid4().hex[:12]}"
        return type(cls.__name__, (cls,), {"config": config, "client": client})

    def _check_columns(self, schema: pa.Schema) -> None:
        if self._checked_schema is None or not schema.equals(self._checked_schema):
            id_column = self._config_for(schema).id_column
            self.config.output.check_collisions(schema, id_column=id_column)
            self._checked_schema = schema

    def _config_for(self, schema: pa.Schema) -> StageConfig:
        """Return the options for rows with these columns; rows of `read_parquet` have ids."""
        has_ids = ROW in schema.names and ROW_ID in schema.names
        if not has_ids or self.config.id_column is not None:
            return self.config
        return replace(self.config, id_column=ROW_ID)

    def _finish(self, prepared: Prepared, results: pa.Table) -> pa.Table:
        output = self.config.output
        # the fake backend follows no constraint
        backend_type = type_of(self.config.backend)
        finished = finish_rows(
            prepared,
            results,
            tokenizer=self._tokenizer,
            output=output,
            checks_answers=backend_type.has_weights or backend_type.is_endpoint,
        )
        self._raise_first(prepared.row_ids, self._errors_of(finished))
        return finished

    def _raise_first(self, row_ids: Sequence[str], errors: Sequence[str]) -> None:
        """Raise RowError for the first row with an error, if `on_error` is "raise"."""
        if self.config.on_error == "raise":
            for row_id, error in zip(row_ids, errors, strict=True):
                if error:
                    raise RowError(f"row {row_id!r}: {error}")

    def _errors_of(self, finished: pa.Table) -> list[str]:
        return finished.column(self.config.output_prefix + ERROR_COLUMN).to_pylist()  # type: ignore[no-any-return]


def retry_client(client: str) -> str:
    """Return the client name that counts rows retried by waves."""
    return f"{client}-again"


def _error_classes(errors: Sequence[str]) -> Counter[str]:
    return Counter(error_class(error) for error in errors if error)


async def end_calls(calls: Collection[asyncio.Future[Any]], error: BaseException) -> None:
    """Cancel the calls that still run after another one failed, and wait for them.

    If no engine is left all calls fail, and get time to store finished rows.
    """
    if calls and isinstance(error, ReplicaError):
        await asyncio.wait(calls, timeout=_KEEP_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


class FewRowsHint:
    """Warns once if Ray passes a feeder too few rows at once to fill the engines."""

    def __init__(self) -> None:
        self._num_calls = self._num_rows = self._most_rows = 0

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
                    "Ray passes at most %d rows at once, too few to fill the engines; use "
                    "stage.apply(ds) instead of ds.map_batches(stage) to keep %d row batches in "
                    "flight",
                    self._most_rows,
                    CALLS_PER_FEEDER,
                )


def free_cpus() -> float:
    """Return the free CPUs of the cluster."""
    import ray  # slow to import, and only used in an actor

    return float(ray.available_resources().get("CPU", 0))


class NoCpuHint:
    """Warns once if no rows arrive and feeders may hold the CPUs of the read tasks.

    Ray Data gives every actor of a plain `map_batches` one CPU: with two CPUs, two such stages
    leave none for reading, and the job deadlocks. It checks after `waits_s` seconds without rows.
    """

    def __init__(
        self,
        free_cpus: Callable[[], float] = free_cpus,
        waits_s: Sequence[float] = _WAITS_FOR_ROWS_S,
    ) -> None:
        self._free_cpus = free_cpus
        self._waits_s = waits_s
        self._has_rows = threading.Event()

    def start(self) -> None:
        """Start a thread that checks, if this actor holds a CPU."""
        if own_cpus() >= 1:
            threading.Thread(target=self.poll, name="raybatch-no-cpu-hint", daemon=True).start()

    def stop(self) -> None:
        """Stop checking, since rows have arrived."""
        self._has_rows.set()

    def poll(self) -> None:
        """Wait for rows, and warn if none arrive and no CPU is free."""
        for wait_s in self._waits_s:
            if self._has_rows.wait(wait_s):
                return
            if self._free_cpus() < 1:
                logger.warning(
                    "no rows received yet, and less than one CPU of the cluster is free: every "
                    "plain ds.map_batches(LLMStage(...)) holds one CPU or more, which can starve "
                    "the read tasks and deadlock the job. If no rows follow, use "
                    "LLMStage(...).apply(ds), or ds.map_batches(LLMStage(...), num_cpus=0), for "
                    "every stage; one of two stages also needs output_prefix"
                )
                return


class AllFailedAlarm:
    """Warns once if every row so far has failed, as with a wrong template or function."""

    def __init__(self) -> None:
        self._is_settled, self._num_failed, self._first_error = False, 0, ""

    def see(self, errors: Sequence[str]) -> None:
        """Note the errors of the rows of one call, "" for a good row."""
        self._is_settled = self._is_settled or not all(errors)
        if self._is_settled or not errors:
            return
        self._first_error = self._first_error or errors[0]
        self._num_failed += len(errors)
        self._is_settled = self._num_failed >= _ROWS_BEFORE_ALARM
        if self._is_settled:
            # ASCII: data of the user may contain control codes of terminals
            logger.warning(
                "EVERY ONE of the first %d rows failed, and the job continues; the first error: "
                "%a. If the prompt's template, column or function is wrong, stop the job and fix "
                "it; on_error='raise' ends a job at its first error row",
                self._num_failed,
                self._first_error[:_MAX_ERROR_LENGTH],
            )


def own_cpus() -> float:
    """Return the CPUs that Ray holds for this actor; 0 outside an actor."""
    ray = connected_ray()
    if ray is None:
        return 0.0
    context = ray.get_runtime_context()
    held = {} if context.get_actor_id() is None else context.get_assigned_resources()
    return float(held.get("CPU", 0))


def LLMStage(  # noqa: N802 - it returns a class
    model: str,
    *,
    task: Task = "generate",
    seed: int | None = None,
    **options: Any,  # noqa: ANN401
) -> type[StageFeeder]:
    r"""Return a class for `Dataset.map_batches` that answers every row with a language model.

    Engines start when the dataset runs, are shared by stages with the same model and engine
    options, and stay warm for the next execution. With small Ray blocks, `stage.apply(ds)` feeds
    them better than `ds.map_batches(stage)`; it also keeps nulls and time zones, which numpy
    batches lose.

    Options are those of `StageConfig`, listed in docs/reference/options.md. In addition, `task` is
    "generate" for text, or "embed", "classify" or "score" for numbers; and `seed` is the sampling
    seed, which together with its id determines the seed of a row.

    Raises:
        ConfigError: an unknown option (with a suggestion), a value out of range or a bad template.

    Example:
        >>> stage = LLMStage("demo", prompt="{document}\n\nQ: {question}\nA:")
        >>> ds.map_batches(stage).write_parquet("answers/")  # doctest: +SKIP
    """
    given = {"task": task, "seed": seed, **options}
    return build_stage(build_stage_config(model, given, where="LLMStage"))


# for editors and `help`
LLMStage.__signature__ = signature_of(LLMStage, StageConfig)  # type: ignore[attr-defined]


def build_stage(config: StageConfig, feeder: type[StageFeeder] = StageFeeder) -> type[StageFeeder]:
    """Return the class of a stage with these options, a subclass of `feeder`."""
    if (endpoint := type_of(config.backend).endpoint) is not None:
        endpoint.check_stage(config)
    referenced_columns(config)  # parses the templates: a bad one is an error here, not in a feeder
    options = {name: getattr(config, name) for name in ("model", "backend", "engine", "pool")}
    pool, client = PoolHandle(PoolSpec(**options)), f"stage-{uuid.uuid4().hex[:12]}"
    return type("LLMStage", (feeder,), {"config": config, "pool": pool, "client": client})
