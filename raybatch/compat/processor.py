"""`build_processor`: the API of ray.data.llm over a raybatch stage."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from raybatch.backends.endpoint import PromptTokenizer
from raybatch.backends.registry import type_of
from raybatch.compat.options import ProcessorConfig, stage_config
from raybatch.compat.row_columns import (
    ADAPTER_COLUMN,
    POOLING_COLUMN,
    PROMPT_IDS_COLUMN,
    SAMPLING_COLUMN,
)
from raybatch.compat.row_functions import Postprocess, Preprocess, RowFunction
from raybatch.errors import ConfigError, did_you_mean
from raybatch.rows.prepare import Prepared
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.llm_stage import build_stage
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
