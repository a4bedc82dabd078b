"""`LLMStage`: a language model as a class that Ray Data maps over row batches."""

import uuid
from typing import Any

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.registry import type_of
from raybatch.config.option import signature_of
from raybatch.records.types import Task
from raybatch.rows.options import StageConfig, build_stage_config
from raybatch.rows.prompt_inputs import referenced_columns
from raybatch.stages.feeder import StageFeeder


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
