"""`build_processor`: the shape and the names of ray.data.llm over a stage of this library."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from raybatch.config import BackendConfig, PoolConfig
from raybatch.errors import ConfigError, did_you_mean
from raybatch.stages.llm_stage import StageFeeder, build_stage
from raybatch.stages.options import StageConfig, build_stage_config
from raybatch.stages.row_functions import (
    INPUT_ERROR_COLUMN,
    SAMPLING_COLUMN,
    Postprocess,
    Preprocess,
    RowFunction,
)
from raybatch.stages.vllm_options import engine_config
from raybatch.types import Sampling

logger = logging.getLogger(__name__)

Concurrency = int | tuple[int, int]
StageToggle = bool | Mapping[str, Any]

_CHAT_KEYS = (
    "enabled",
    "batch_size",
    "concurrency",
    "runtime_env",
    "num_cpus",
    "memory",
    "model_source",
    "chat_template",
    "chat_template_kwargs",
)
# vLLM's defaults, which scripts that move over count on.
_SAMPLING = Sampling(temperature=1.0, max_tokens=16)

# In the order in which they are looked for.
_INPUT_COLUMNS = {
    "messages": "messages of OpenAI's chat API (or prompt, or tokenized_prompt)",
    "tokenized_prompt": "token ids",
    "prompt": "a complete prompt text, without a chat template",
}
_COMPLETE_PROMPTS = ("tokenized_prompt", "prompt")
_OPTIONAL_COLUMNS = {SAMPLING_COLUMN: "sampling options of the row, a dict or a JSON text"}


class _Checked(type):
    """Refuses unknown options with a suggestion, before Python says it in its own words."""

    def __call__(cls, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__}: unknown option {name!r}{did_you_mean(name, known)}"
                )
        return super().__call__(*args, **options)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig(metaclass=_Checked):
    """Options of a processor, with the names of ray.data.llm's `vLLMEngineProcessorConfig`.

    Args:
        model_source: checkpoint folder, hub id or URI; "demo" is the embedded model.
        engine_kwargs: options of vLLM's engine; those with an equivalent are taken over.
        concurrency: replicas; of a pair the larger.
        should_continue_on_error: False ends the job at the first row that fails; left out, and
            with True, errors are values of `__inference_error__`.
        chat_template_stage: a mapping may hold `chat_template` and `chat_template_kwargs`; False,
            or "enabled": False, leaves a column `messages` unread.
        batch_size: no effect; rows do not wait for a batch. So have `max_concurrent_batches`,
            `max_tasks_in_flight_per_actor`, `max_pending_requests`, `tokenize_stage`,
            `detokenize_stage`, `log_engine_metrics`, `accelerator_type`, `runtime_env` and
            `placement_group_config`.
        task_type: only "generate".
        prepare_multimodal_stage: only False.
        dynamic_lora_loading_path: only None.
        sampling: of rows without `sampling_params`; vLLM's defaults.
        pool: replicas and their resources, where `concurrency` is not enough.
        backend: what a replica runs.

    Raises:
        ConfigError: an unknown option (with a suggestion), or one that asks for more than there is.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: Concurrency | None = None
    should_continue_on_error: bool | None = None
    chat_template_stage: StageToggle = True
    batch_size: int | None = None
    max_concurrent_batches: int | None = None
    max_tasks_in_flight_per_actor: int | None = None
    max_pending_requests: int | None = None
    tokenize_stage: StageToggle | None = None
    detokenize_stage: StageToggle | None = None
    log_engine_metrics: bool | None = None
    accelerator_type: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    placement_group_config: Mapping[str, Any] | None = None
    task_type: str = "generate"
    prepare_multimodal_stage: StageToggle = False
    dynamic_lora_loading_path: str | None = None
    sampling: Sampling | Mapping[str, Any] | None = None
    pool: PoolConfig | None = None
    backend: BackendConfig | str | None = None

    def __post_init__(self) -> None:
        if self.task_type != "generate":
            raise ConfigError(f"task_type must be 'generate', got {self.task_type!r}")
        if self.prepare_multimodal_stage not in (False, None):
            raise ConfigError("prepare_multimodal_stage is not supported; leave it out")
        if self.dynamic_lora_loading_path is not None:
            raise ConfigError("dynamic_lora_loading_path is not supported; leave it out")
        if self.concurrency is not None:
            _replicas(self.concurrency)
        _chat_options(self.chat_template_stage)
        engine_config(self.engine_kwargs)


class vLLMEngineProcessorConfig(ProcessorConfig):  # noqa: N801 - the name of ray.data.llm
    """`ProcessorConfig` under the name that ray.data.llm uses."""


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
    stage_config = _stage_config(config, (builder_kwargs or {}).get("chat_template_kwargs"))
    return Processor(
        config,
        build_stage(stage_config),
        preprocess=preprocess,
        postprocess=postprocess,
        preprocess_map_kwargs=preprocess_map_kwargs or {},
        postprocess_map_kwargs=postprocess_map_kwargs or {},
    )


def _stage_config(
    config: ProcessorConfig, chat_template_kwargs: Mapping[str, Any] | None
) -> StageConfig:
    engine, ignored = engine_config(config.engine_kwargs)
    _log_ignored(config, ignored)
    chat_template, kwargs = _chat_options(config.chat_template_stage)
    names = _INPUT_COLUMNS if _is_chat(config.chat_template_stage) else _COMPLETE_PROMPTS
    pool = config.pool or PoolConfig()
    if config.concurrency is not None:
        pool = replace(pool, replicas=_replicas(config.concurrency))
    options = {
        "engine": engine,
        "pool": pool,
        "backend": config.backend,
        "sampling": config.sampling or _SAMPLING,
        "sampling_column": SAMPLING_COLUMN,
        "input_error_column": INPUT_ERROR_COLUMN,
        "chat": False,
        "chat_template": chat_template,
        "chat_template_kwargs": {**kwargs, **(chat_template_kwargs or {})},
        "prompt_column_special_tokens": "allow",
        "conventional_columns": tuple(names),
        "on_error": "raise" if config.should_continue_on_error is False else "row",
    }
    return build_stage_config(config.model_source, options, where="build_processor")


def _log_ignored(config: ProcessorConfig, ignored: list[str]) -> None:
    without_effect = (
        "batch_size",
        "max_concurrent_batches",
        "max_tasks_in_flight_per_actor",
        "max_pending_requests",
        "tokenize_stage",
        "detokenize_stage",
        "log_engine_metrics",
        "accelerator_type",
        "runtime_env",
        "placement_group_config",
    )
    given = [name for name in without_effect if getattr(config, name) is not None]
    if given or ignored:
        logger.info(
            "options without effect, because rows do not wait for batches and the engine decides "
            "by memory: %s",
            ", ".join([*given, *ignored]),
        )


def _replicas(concurrency: object) -> int:
    sizes = concurrency if isinstance(concurrency, tuple | list) else (concurrency, concurrency)
    is_valid = len(sizes) == 2 and all(type(n) is int and n >= 1 for n in sizes)
    if not is_valid or sizes[0] > sizes[1]:
        raise ConfigError(
            f"concurrency must be a number of at least 1 or a pair (min, max), got {concurrency!r}"
        )
    return int(sizes[1])


def _chat_options(toggle: object) -> tuple[str | None, dict[str, Any]]:
    if toggle is None or isinstance(toggle, bool):
        return None, {}
    if not isinstance(toggle, Mapping):
        raise ConfigError(f"chat_template_stage must be a bool or a mapping, got {toggle!r}")
    for name in toggle:
        if name not in _CHAT_KEYS:
            raise ConfigError(
                f"chat_template_stage: unknown option {name!r}{did_you_mean(name, _CHAT_KEYS)}"
            )
    return toggle.get("chat_template"), dict(toggle.get("chat_template_kwargs") or {})


def _is_chat(toggle: StageToggle) -> bool:
    return bool(toggle.get("enabled", True)) if isinstance(toggle, Mapping) else toggle is not False
