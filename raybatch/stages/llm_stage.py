"""`LLMStage`: a language model as a class that Ray Data maps over row batches."""

import uuid
from collections.abc import Mapping
from typing import Any

from raybatch.actors.pool import PoolHandle, PoolSpec
from raybatch.config import BackendConfig, EngineConfig, OnError, PoolConfig, SpecialTokens
from raybatch.stages.endpoint import check_endpoint
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.inputs import referenced_columns
from raybatch.stages.options import (
    Chat,
    MessagesOption,
    OnTooLong,
    StageConfig,
    build_stage_config,
)
from raybatch.types import Sampling


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
    chat_template_kwargs_column: str | None = None,
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

    Args:
        model: checkpoint folder, hub id or URI; "demo" is the embedded model.
        prompt: template with columns in braces, such as "{document} Q: {question}".
        messages: a column of OpenAI messages, a function of the row, or messages with templates.
        tokenized_prompt: a column of token ids.
        system: system message put before the messages of each row that has none.
        sampling: options that decide the tokens.
        overrides: sampling option to the column that replaces it per row; null takes `sampling`.
        sampling_column: a column of JSON texts or structs with several options per row.
        id_column: identity of the rows; without it a hash of the prompt and a count.
        chat: make `prompt` a user message; "auto" does where the model has a chat template.
        chat_template: in place of the model's own.
        chat_template_kwargs: options of the chat template, such as enable_thinking.
        chat_template_kwargs_column: such options per row, as JSON; read beside `messages`.
        special_tokens: "escape" makes special tokens in the data plain text.
        on_error: "row" turns a failure into `__inference_error__`; "raise" ends the job.
        on_too_long: "error", "truncate_left", "truncate_right" or "drop", for too long prompts.
        output_prefix: put before every output column, for a second stage over the same rows.
        dedup: generate identical greedy prompts of a row batch once, and give the result to all.
        max_row_bytes: a row whose columns take more becomes an error row.
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
    options = dict(locals())
    options |= options.pop("unknown")
    return build_stage(build_stage_config(options.pop("model"), options, where="LLMStage"))


def build_stage(config: StageConfig) -> type[StageFeeder]:
    """Return the class of a stage with these options."""
    check_endpoint(config)
    referenced_columns(config)  # parses the templates: a bad one is an error here, not in a feeder
    spec = PoolSpec(
        model=config.model, backend=config.backend, engine=config.engine, pool=config.pool
    )
    client = f"stage-{uuid.uuid4().hex[:12]}"
    return type(
        "LLMStage", (StageFeeder,), {"config": config, "pool": PoolHandle(spec), "client": client}
    )
