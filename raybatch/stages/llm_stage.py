"""`LLMStage`: a language model as a class that Ray Data maps over row batches."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, OnError, PoolConfig, SpecialTokens
from raybatch.records.pooling import Pooling
from raybatch.records.types import Sampling, Task
from raybatch.rows.endpoint import check_endpoint
from raybatch.rows.options import (
    Chat,
    MessagesOption,
    OnTooLong,
    StageConfig,
    build_stage_config,
)
from raybatch.rows.prompt_inputs import referenced_columns
from raybatch.stages.feeder import StageFeeder


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
    task: Task = "generate",
    query: str | None = None,
    document: str | None = None,
    pooling: Pooling | Mapping[str, Any] | None = None,
    pooling_column: str | None = None,
    lora_column: str | None = None,
    lora_path: str | None = None,
    id_column: str | None = None,
    chat: Chat = "auto",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template_kwargs_column: str | None = None,
    tools: str | Sequence[Mapping[str, Any]] | None = None,
    images: str | None = None,
    special_tokens: SpecialTokens = "escape",
    on_error: OnError = "row",
    on_too_long: OnTooLong = "error",
    output_prefix: str = "",
    dedup: bool = True,
    max_row_bytes: int = 8 << 20,
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

    `StageConfig` and docs/options.md say what each option means. Beside them `task` is what is made
    of each prompt: "generate" makes text, "embed", "classify" and "score" make numbers; and `seed`
    is that of the sampling, from which with the row's id the seed of a row follows.

    Raises:
        ConfigError: an unknown option (with a suggestion), a value out of range or a bad template.

    Example:
        >>> stage = LLMStage("demo", prompt="{document}\n\nQ: {question}\nA:")
        >>> ds.map_batches(stage).write_parquet("answers/")  # doctest: +SKIP
    """
    options = dict(locals())
    options |= options.pop("unknown")
    return build_stage(build_stage_config(options.pop("model"), options, where="LLMStage"))


def build_stage(
    config: StageConfig, *, feeder: type[StageFeeder] = StageFeeder
) -> type[StageFeeder]:
    """Return the class of a stage with these options.

    Args:
        config: of the stage.
        feeder: what it is a kind of.
    """
    check_endpoint(config)
    referenced_columns(config)  # parses the templates: a bad one is an error here, not in a feeder
    spec = PoolSpec(
        model=config.model, backend=config.backend, engine=config.engine, pool=config.pool
    )
    client = f"stage-{uuid.uuid4().hex[:12]}"
    return type(
        "LLMStage", (feeder,), {"config": config, "pool": PoolHandle(spec), "client": client}
    )
