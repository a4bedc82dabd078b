"""The options of ray.data.llm's processors, and the stage that they stand for."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import check_options, type_of
from raybatch.compat.chaining import ADAPTER_COLUMN, MEDIA_COLUMN, POOLING_COLUMN, SAMPLING_COLUMN
from raybatch.compat.row_functions import INPUT_ERROR_COLUMN
from raybatch.compat.stage_options import (
    ChatTemplateStageConfig,
    Checked,
    Concurrency,
    DetokenizeStageConfig,
    PrepareMultimodalStageConfig,
    ProcessorStageConfig,
    TokenizerStageConfig,
    read_stage,
    replicas_of,
)
from raybatch.compat.vllm_options import engine_config, vllm_config
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    PoolConfig,
    Strategy,
    check_bundles,
    from_mapping,
)
from raybatch.errors import ConfigError, did_you_mean
from raybatch.records.types import UNBOUNDED_TOKENS, Sampling
from raybatch.rows.options import StageConfig
from raybatch.rows.stage_forms import build_stage_config

_NAMES = ("bundles", "bundle_per_worker", "strategy")


def reserved_by(
    group: Mapping[str, Any], *, num_ranks: int, are_actors: bool = False
) -> dict[str, Any]:
    """Return the options of `PoolConfig` that reserve what the bundles of a group say.

    Ranks that are actors of Ray run in these bundles, on whatever hosts. Otherwise all ranks of an
    engine run on one host, in one actor and the processes that end with it: the bundles are added
    up, there is no group, and nothing has to be released.

    Args:
        group: as ray.data.llm takes it.
        num_ranks: of one engine, for which `bundle_per_worker` is repeated.
        are_actors: the ranks are.

    Raises:
        ConfigError: an unknown name or value, or ranks that are to be spread over hosts and are
            processes of one.
    """
    where = "placement_group_config"
    if not isinstance(group, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {group!r}")
    for name in group:
        if name not in _NAMES:
            raise ConfigError(f"{where}: unknown option {name!r}{did_you_mean(str(name), _NAMES)}")
    bundles = _bundles(group, num_ranks)
    strategy = group.get("strategy", "PACK")
    if strategy not in get_args(Strategy):
        raise ConfigError(
            f"{where}.strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}"
        )
    if are_actors:
        # Ray refuses bundles of nothing
        kept = [{n: amount for n, amount in bundle.items() if amount} for bundle in bundles]
        return {"bundles": kept, "strategy": strategy}
    if strategy in ("SPREAD", "STRICT_SPREAD") and len(bundles) > 1:
        raise ConfigError(
            f"{where}.strategy {strategy!r} spreads the ranks of one engine over hosts, and these "
            "are processes of one host; set engine_kwargs.distributed_executor_backend='ray', or "
            "leave the strategy out"
        )
    return _added_up(bundles)


def _bundles(group: Mapping[str, Any], num_ranks: int) -> list[dict[str, float]]:
    given = [name for name in ("bundles", "bundle_per_worker") if group.get(name) is not None]
    if len(given) != 1:
        raise ConfigError("placement_group_config must have one of bundles and bundle_per_worker")
    (name,) = given
    bundles = group[name] if name == "bundles" else [group[name]] * num_ranks
    check_bundles(bundles, where=f"placement_group_config.{name}", is_zero_allowed=True)
    return [dict(bundle) for bundle in bundles]


def _added_up(bundles: list[dict[str, float]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    num_cpus, num_gpus = total.pop("CPU", 0), total.pop("GPU", 0)
    return {
        "num_cpus_per_replica": float(num_cpus),
        "num_gpus_per_replica": float(num_gpus),
        "resources": {name: amount for name, amount in total.items() if amount},
    }


logger = logging.getLogger(__name__)

StageOption = bool | Mapping[str, Any] | ProcessorStageConfig

# vLLM's defaults, which scripts that move over count on.
_SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "max_tokens": 16}
_STAGES: Mapping[str, type[ProcessorStageConfig]] = {
    "chat_template_stage": ChatTemplateStageConfig,
    "tokenize_stage": TokenizerStageConfig,
    "detokenize_stage": DetokenizeStageConfig,
    "prepare_multimodal_stage": PrepareMultimodalStageConfig,
}
_WITHOUT_EFFECT = (
    "batch_size",
    "max_concurrent_batches",
    "max_tasks_in_flight_per_actor",
    "max_pending_requests",
    "log_engine_metrics",
)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig(metaclass=Checked):
    """Options of a processor, with the names of ray.data.llm's `vLLMEngineProcessorConfig`.

    Args:
        model_source: checkpoint folder, hub id or URI; "demo" is the embedded model.
        engine_kwargs: options of vLLM's engine; those with an equivalent are taken over, and with
            `backend="vllm"` all of them are.
        concurrency: replicas; of a pair the larger. Left out, one for each GPU of the cluster.
        should_continue_on_error: False ends the job at the first row that fails; left out, and
            with True, errors are values of `__inference_error__`.
        chat_template_stage: a bool, a mapping or a `ChatTemplateStageConfig`; not enabled, a
            column `messages` is not read.
        tokenize_stage: the same of `TokenizerStageConfig`; not enabled, a column
            `tokenized_prompt` is asked before a column `prompt`.
        detokenize_stage: the same of `DetokenizeStageConfig`; no effect.
        prepare_multimodal_stage: the same of `PrepareMultimodalStageConfig`; no effect, and only
            with vLLM, which reads images in any case.
        accelerator_type: engines run on hosts with this accelerator alone.
        placement_group_config: what one replica reserves: its bundles, added up, or as they are
            where the ranks of an engine are actors of Ray.
        runtime_env: of Ray, for engines and for what feeds them.
        batch_size: no effect; rows do not wait for a batch. So have `max_concurrent_batches`,
            `max_tasks_in_flight_per_actor`, `max_pending_requests` and `log_engine_metrics`.
        task_type: "generate", or with vLLM also "embed", "classify" and "score".
        dynamic_lora_loading_path: folder or URI below which the adapters lie that the column
            `model` names; with vLLM and `enable_lora` in `engine_kwargs`.
        sampling: of rows without `sampling_params`; vLLM's defaults for what a mapping leaves out.
            A `Sampling` counts as it is.
        pool: replicas and their resources, where the options above are not enough; what both of
            them say must be the same.
        backend: what a replica runs: "native" unless it is said to be "vllm".

    Raises:
        ConfigError: an unknown option (with a suggestion), or one that asks for more than there is.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: Concurrency | None = None
    should_continue_on_error: bool | None = None
    chat_template_stage: StageOption = True
    tokenize_stage: StageOption = True
    detokenize_stage: StageOption = True
    prepare_multimodal_stage: StageOption = False
    accelerator_type: str | None = None
    placement_group_config: Mapping[str, Any] | None = None
    runtime_env: Mapping[str, Any] | None = None
    batch_size: int | None = None
    max_concurrent_batches: int | None = None
    max_tasks_in_flight_per_actor: int | None = None
    max_pending_requests: int | None = None
    log_engine_metrics: bool | None = None
    task_type: str = "generate"
    dynamic_lora_loading_path: str | None = None
    sampling: Sampling | Mapping[str, Any] | None = None
    pool: PoolConfig | Mapping[str, Any] | None = None
    backend: BackendConfig | Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if self.concurrency is not None:
            replicas_of(self.concurrency)
        if not isinstance(self.engine_kwargs, Mapping):
            raise ConfigError(f"engine_kwargs must be a mapping, got {self.engine_kwargs!r}")
        _of_adapters(self)
        engine, backend, _ = _engines(self)
        has_images = _stages(self)["prepare_multimodal_stage"].enabled
        if has_images and not type_of(backend).takes_vllm_options:
            raise ConfigError("prepare_multimodal_stage needs backend='vllm', which reads images")
        _pool(self, engine, backend)

    def default_backend(self) -> BackendConfig:
        """Return what a replica runs where `backend` is left out."""
        return BackendConfig(kind="native")


class vLLMEngineProcessorConfig(ProcessorConfig):  # noqa: N801 - the name of ray.data.llm
    """`ProcessorConfig` whose engines are vLLM's unless `backend` says another."""

    def default_backend(self) -> BackendConfig:
        """Return what a replica runs where `backend` is left out."""
        return BackendConfig(kind="vllm")


def stage_config(
    config: ProcessorConfig, chat_template_kwargs: Mapping[str, Any] | None
) -> StageConfig:
    """Return the options of the stage that a processor with these options runs.

    Args:
        config: of the processor.
        chat_template_kwargs: as `build_processor` got them.

    Raises:
        ConfigError: an option of the stage is out of range.
    """
    engine, backend, ignored = _engines(config)
    stages = _stages(config)
    _log_ignored(config, stages, ignored)
    chat = stages["chat_template_stage"]
    assert isinstance(chat, ChatTemplateStageConfig), "the table of stages says so"
    options = {
        "engine": engine,
        "pool": _pool(config, engine, backend),
        "backend": backend,
        **_of_task(config),
        **_of_adapters(config),
        "conventional_images": MEDIA_COLUMN if _reads_images(config, backend) else None,
        "input_error_column": INPUT_ERROR_COLUMN,
        "chat": False,
        "chat_template": chat.chat_template,
        "chat_template_kwargs": _template_kwargs(chat, chat_template_kwargs),
        "prompt_column_special_tokens": "allow",
        "conventional_columns": _prompt_columns(
            is_chat=chat.enabled, is_tokenized=stages["tokenize_stage"].enabled
        ),
        "on_error": "raise" if config.should_continue_on_error is False else "row",
    }
    return build_stage_config(config.model_source, options, where="build_processor")


def _check_types(config: ProcessorConfig) -> None:
    for name in ("should_continue_on_error", "log_engine_metrics"):
        value = getattr(config, name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
    for name in _WITHOUT_EFFECT:
        value = getattr(config, name)
        # a bool is an int, and which of them it must be was looked at
        if not isinstance(value, int | None):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")


def _reads_images(config: ProcessorConfig, backend: BackendConfig) -> bool:
    return type_of(backend).takes_vllm_options and config.task_type == "generate"


def _of_task(config: ProcessorConfig) -> dict[str, Any]:
    if config.task_type != "generate":
        if config.sampling is not None:
            raise ConfigError(f"sampling has no effect on task {config.task_type!r}; leave it out")
        return {"pooling_column": POOLING_COLUMN}
    sampling = config.sampling
    if sampling is None or isinstance(sampling, Mapping):
        sampling = {**_SAMPLING, **(sampling or {})}
        if sampling["max_tokens"] is None:
            sampling["max_tokens"] = UNBOUNDED_TOKENS
    return {"sampling": sampling, "sampling_column": SAMPLING_COLUMN, "row_logprobs": True}


def _of_adapters(config: ProcessorConfig) -> dict[str, Any]:
    if not config.engine_kwargs.get("enable_lora"):
        if config.dynamic_lora_loading_path is not None:
            raise ConfigError(
                "dynamic_lora_loading_path needs backend='vllm' and enable_lora in engine_kwargs"
            )
        return {}
    return {"lora_column": ADAPTER_COLUMN, "lora_path": config.dynamic_lora_loading_path}


def _stages(config: ProcessorConfig) -> dict[str, ProcessorStageConfig]:
    return {
        name: read_stage(
            getattr(config, name),
            kind,
            name=name,
            model_source=config.model_source,
            is_default=name != "prepare_multimodal_stage",
        )
        for name, kind in _STAGES.items()
    }


def _engines(config: ProcessorConfig) -> tuple[EngineConfig, BackendConfig, list[str]]:
    """Return the options of engine and backend, and the names of those without effect."""
    backend = config.default_backend() if config.backend is None else config.backend
    if isinstance(backend, str):
        backend = {"kind": backend}
    if isinstance(backend, Mapping):
        backend = from_mapping(BackendConfig, backend, where="backend")
    if config.task_type != "generate":
        backend = replace(backend, task=config.task_type)  # type: ignore[arg-type]
    if not backend.is_decided:
        raise ConfigError(
            "backend='auto' is for stages and jobs: a processor reads engine_kwargs for one kind "
            "of engine; take vLLMEngineProcessorConfig, or set backend to 'vllm' or 'native'"
        )
    facts = type_of(backend)
    if facts.takes_vllm_options:
        return vllm_config(config.engine_kwargs, backend, model=config.model_source)
    check_options(backend, EngineConfig())
    engine, ignored = engine_config(config.engine_kwargs)
    if facts.is_endpoint:
        # the engine is somebody else's
        ignored = [f"engine_kwargs.{n}" for n in config.engine_kwargs if n != "max_model_len"]
    return engine, backend, ignored


def _pool(config: ProcessorConfig, engine: EngineConfig, backend: BackendConfig) -> PoolConfig:
    """Return the pool with what the options of ray.data.llm say of it."""
    changes: dict[str, Any] = {}
    if config.concurrency is not None:
        changes["replicas"] = replicas_of(config.concurrency)
    for name in ("accelerator_type", "runtime_env"):
        if getattr(config, name) is not None:
            changes[name] = getattr(config, name)
    if config.placement_group_config is not None:
        changes |= reserved_by(
            config.placement_group_config,
            num_ranks=max(1, gpus_of_engine(backend, engine)),
            are_actors=type_of(backend).num_actors(backend, engine) > 0,
        )
    pool = config.pool or PoolConfig()
    if isinstance(pool, Mapping):
        pool = from_mapping(PoolConfig, pool, where="pool")
    default = PoolConfig()
    for name, value in changes.items():
        own = getattr(pool, name)
        if own not in (getattr(default, name), value):
            raise ConfigError(
                f"pool.{name} is {own!r}, and concurrency, accelerator_type, runtime_env or "
                f"placement_group_config says {value!r}; leave one of them out"
            )
    return replace(pool, **changes)


def _template_kwargs(
    chat: ChatTemplateStageConfig, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    own = chat.chat_template_kwargs
    for options in (own, given):
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"chat_template_kwargs must be a mapping, got {options!r}")
    if own and given and dict(own) != dict(given):
        raise ConfigError(
            "chat_template_kwargs are given twice and differ, in chat_template_stage and in "
            "builder_kwargs; leave one of them out"
        )
    return dict(own or given or {})


def _prompt_columns(*, is_chat: bool, is_tokenized: bool) -> tuple[str, ...]:
    """Return where prompts are looked for: the first of these columns that is there is asked."""
    plain = ("prompt", "tokenized_prompt") if is_tokenized else ("tokenized_prompt", "prompt")
    return ("messages", *plain) if is_chat else plain


def _log_ignored(
    config: ProcessorConfig, stages: Mapping[str, ProcessorStageConfig], ignored: list[str]
) -> None:
    given = [name for name in _WITHOUT_EFFECT if getattr(config, name) is not None]
    given += [
        f"{name}.{option}" for name, stage in stages.items() for option in stage.without_effect()
    ]
    if not stages["detokenize_stage"].enabled:
        given.append("detokenize_stage")
    if stages["prepare_multimodal_stage"].enabled:
        given.append("prepare_multimodal_stage")
    if given or ignored:
        logger.warning(
            "options without effect, because rows do not wait for batches and the engine decides "
            "by memory: %s",
            ", ".join([*given, *ignored]),
        )
