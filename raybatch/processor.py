"""`build_processor`: the shape and the names of ray.data.llm over a stage of this library."""

import logging
from collections.abc import Mapping
from typing import Any

from raybatch.errors import ConfigError, did_you_mean
from raybatch.stages.chaining import SAMPLING_COLUMN
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.llm_stage import build_stage
from raybatch.stages.processor_options import (
    ProcessorConfig,
    stage_config,
    vLLMEngineProcessorConfig,
)
from raybatch.stages.row_functions import Postprocess, Preprocess, RowFunction

__all__ = ["Processor", "ProcessorConfig", "build_processor", "vLLMEngineProcessorConfig"]

logger = logging.getLogger(__name__)

_INPUT_COLUMNS = {
    "messages": "messages of OpenAI's chat API (or prompt, or tokenized_prompt)",
    "tokenized_prompt": "token ids",
    "prompt": "a complete prompt text, without a chat template",
}
_OPTIONAL_COLUMNS = {SAMPLING_COLUMN: "sampling options of the row, a dict or a JSON text"}


class Processor:
    """Maps a Ray dataset: preprocess, answer, postprocess; build it with `build_processor`.

    Args:
        config: as the user gave it.
        stage: that answers the rows.
        preprocess: merged into each row.
        postprocess: replaces each row.
        preprocess_map_kwargs: of `map_batches` for preprocess.
        postprocess_map_kwargs: of `map_batches` for postprocess.
    """

    def __init__(
        self,
        config: ProcessorConfig,
        stage: type[StageFeeder],
        *,
        preprocess: RowFunction | None,
        postprocess: RowFunction | None,
        preprocess_map_kwargs: Mapping[str, Any],
        postprocess_map_kwargs: Mapping[str, Any],
    ) -> None:
        self.config = config
        self._stage = stage
        self._preprocess = preprocess
        self._postprocess = postprocess
        self._preprocess_map_kwargs = dict(preprocess_map_kwargs)
        self._postprocess_map_kwargs = dict(postprocess_map_kwargs)

    def __call__(self, dataset: Any) -> Any:  # noqa: ANN401 - Ray has no types
        """Return the dataset to come; nothing runs before it is consumed."""
        dataset = dataset.map_batches(
            Preprocess(self._preprocess, model=self.config.model_source).__call__,
            batch_format="pyarrow",
            **self._preprocess_map_kwargs,
        )
        dataset = self._stage.apply(dataset)
        if self._postprocess is None:
            return dataset
        return dataset.map_batches(
            Postprocess(self._postprocess).__call__,
            batch_format="pyarrow",
            **self._postprocess_map_kwargs,
        )

    def list_stage_names(self) -> list[str]:
        """Return the names of the stages between preprocess and postprocess."""
        return ["LLMStage"]

    def get_stage_by_name(self, name: str) -> type[StageFeeder]:
        """Return a stage.

        Raises:
            ConfigError: there is none of that name.
        """
        if name != "LLMStage":
            raise ConfigError(f"no stage {name!r}{did_you_mean(name, self.list_stage_names())}")
        return self._stage

    def log_input_column_names(self) -> None:
        """Log which columns the rows must have after preprocess."""
        names = self._stage.config.conventional_columns
        needed = "; ".join(f"{name}: {_INPUT_COLUMNS[name]}" for name in names)
        optional = "; ".join(f"{name}: {text}" for name, text in _OPTIONAL_COLUMNS.items())
        logger.info("one of the input columns %s. Optional input columns: %s", needed, optional)


def build_processor(
    config: ProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    *,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    builder_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Return a processor, as `ray.data.llm.build_processor` does.

    Rows come in with `messages`, `tokenized_prompt` or `prompt` (a complete prompt: no chat
    template, and special tokens in it are control tokens) and, if wanted, `sampling_params`.

    Args:
        config: of model and engines.
        preprocess: a function of the row (a dict) whose result is merged into the row.
        postprocess: a function of the answered row whose result replaces it; not called for rows
            with an error, which keep their columns and `__inference_error__`.
        preprocess_map_kwargs: such as num_cpus, memory and compute.
        postprocess_map_kwargs: the same for postprocess.
        builder_kwargs: only `chat_template_kwargs`.

    Raises:
        ConfigError: an unknown or unsupported option.

    Example:
        >>> config = vLLMEngineProcessorConfig(model_source="demo")
        >>> processor = build_processor(config, lambda row: {"prompt": row["text"]})
        >>> processor(ds).write_parquet("answers/")  # doctest: +SKIP
    """
    if not isinstance(config, ProcessorConfig):
        raise ConfigError(f"config must be a ProcessorConfig, got {type(config).__name__}")
    for name in builder_kwargs or {}:
        if name != "chat_template_kwargs":
            hint = did_you_mean(name, ["chat_template_kwargs"])
            raise ConfigError(f"builder_kwargs: unknown option {name!r}{hint}")
    chat_template_kwargs = (builder_kwargs or {}).get("chat_template_kwargs")
    return Processor(
        config,
        build_stage(stage_config(config, chat_template_kwargs)),
        preprocess=preprocess,
        postprocess=postprocess,
        preprocess_map_kwargs=preprocess_map_kwargs or {},
        postprocess_map_kwargs=postprocess_map_kwargs or {},
    )
