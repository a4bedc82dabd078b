"""The options of ray.data.llm's processors, and the stage that they stand for."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from raybatch.config import BackendConfig, EngineConfig, PoolConfig, from_mapping
from raybatch.errors import ConfigError, did_you_mean
from raybatch.stages.chaining import PROMPT_COLUMNS, SAMPLING_COLUMN
from raybatch.stages.options import StageConfig, build_stage_config
from raybatch.stages.row_functions import INPUT_ERROR_COLUMN
from raybatch.stages.vllm_options import engine_config, vllm_config
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
        engine_kwargs: options of vLLM's engine; those with an equivalent are taken over, and with
            `backend="vllm"` all of them are.
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
        backend: what a replica runs: "native" unless it is said to be "vllm".

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
        _engines(self)


class vLLMEngineProcessorConfig(ProcessorConfig):  # noqa: N801 - the name of ray.data.llm
    """`ProcessorConfig` under the name that ray.data.llm uses."""


def stage_config(
    config: ProcessorConfig, chat_template_kwargs: Mapping[str, Any] | None
) -> StageConfig:
    """Return the options of the stage that a processor with these options runs.

    Args:
        config: of the processor.
        chat_template_kwargs: put over those of its chat template stage.

    Raises:
        ConfigError: an option of the stage is out of range.
    """
    engine, backend, ignored = _engines(config)
    _log_ignored(config, ignored)
    chat_template, kwargs = _chat_options(config.chat_template_stage)
    is_chat = _is_chat(config.chat_template_stage)
    names = [name for name in PROMPT_COLUMNS if is_chat or name != "messages"]
    pool = config.pool or PoolConfig()
    if config.concurrency is not None:
        pool = replace(pool, replicas=_replicas(config.concurrency))
    options = {
        "engine": engine,
        "pool": pool,
        "backend": backend,
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


def _engines(config: ProcessorConfig) -> tuple[EngineConfig, BackendConfig, list[str]]:
    """Return the options of engine and backend, and the names of those without effect."""
    backend = config.backend or BackendConfig()
    if isinstance(backend, str):
        backend = from_mapping(BackendConfig, {"kind": backend}, where="backend")
    if backend.kind == "vllm":
        return *vllm_config(config.engine_kwargs, backend), []
    engine, ignored = engine_config(config.engine_kwargs)
    return engine, backend, ignored


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
