"""The options of ray.data.llm's processors, and the stages they map to."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import check_options, type_of
from raybatch.backends.vllm.meanings import IGNORED, MEANINGS, UNKNOWN, Meaning
from raybatch.compat.row_columns import (
    ADAPTER_COLUMN,
    INPUT_ERROR_COLUMN,
    MEDIA_COLUMN,
    POOLING_COLUMN,
    SAMPLING_COLUMN,
)
from raybatch.compat.stage_options import (
    ChatTemplateStageConfig,
    Concurrency,
    DetokenizeStageConfig,
    LeftOut,
    Options,
    PrepareMultimodalStageConfig,
    ProcessorStageConfig,
    TokenizerStageConfig,
    replicas_of,
)
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    PoolConfig,
    Strategy,
    check_bundles,
    from_mapping,
)
from raybatch.config.option import fields_of
from raybatch.errors import ConfigError, did_you_mean
from raybatch.records.types import UNBOUNDED_TOKENS, Sampling
from raybatch.rows.options import StageConfig, build_stage_config

logger = logging.getLogger(__name__)

StageOption = bool | Mapping[str, Any] | ProcessorStageConfig

# vLLM's defaults, which migrated scripts rely on
_SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "max_tokens": 16}
_STAGES: Mapping[str, type[ProcessorStageConfig]] = {
    "chat_template_stage": ChatTemplateStageConfig,
    "tokenize_stage": TokenizerStageConfig,
    "detokenize_stage": DetokenizeStageConfig,
    "prepare_multimodal_stage": PrepareMultimodalStageConfig,
}
_ONE_ENGINE = LeftOut(1)
_WITHOUT_EFFECT = (
    "batch_size",
    "max_concurrent_batches",
    "max_tasks_in_flight_per_actor",
    "max_pending_requests",
)
# allowed values of options that are not checked elsewhere; a bool counts as a number
_KINDS: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("should_continue_on_error", "log_engine_metrics"), (bool | None, "true or false")
    ),
    **dict.fromkeys(_WITHOUT_EFFECT, (int | None, "a whole number")),
    "engine_kwargs": (Mapping, "a mapping"),
}
_EAGER = "enforce_eager"
# options of vLLM's server, which is not used
_OF_SERVER = ("enable_log_requests",)
# passed to vLLM under its own name, which has more values than ours
_OF_VLLM = ("kv_cache_dtype",)
# also set under vLLM's name, whose methods the native engine supports too
_AS_OURS = ("quantization",)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig(Options):
    """Options of a processor, with the names of ray.data.llm's `vLLMEngineProcessorConfig`.

    Options not listed here work as in ray.data.llm.

    Args:
        model_source: checkpoint folder, hub id or URI; "demo" is the embedded model.
        engine_kwargs: options of vLLM's engine; with `backend="vllm"` all are used, else those
            with an equivalent.
        concurrency: replicas; the larger one of a pair. Default: one per GPU of the cluster.
        should_continue_on_error: False fails the job at the first row that fails, also in your
            functions; with True, errors are values of `__inference_error__`.
        chat_template_stage: a bool, a mapping or a `ChatTemplateStageConfig`; further stages have
            their own config classes.
        accelerator_type: only use hosts with this accelerator.
        placement_group_config: resources of one replica: the sum of its bundles, or the bundles
            themselves if the ranks of an engine are Ray actors.
        runtime_env: Ray's runtime_env of engines and feeders.
        batch_size: no effect: rows do not wait for a batch. Nor have `max_concurrent_batches`,
            `max_tasks_in_flight_per_actor`, `max_pending_requests` and `log_engine_metrics`.
        task_type: "generate", or with vLLM also "embed", "classify" and "score".
        dynamic_lora_loading_path: folder or URI of the adapters that the column `model` names;
            needs vLLM and `enable_lora` in `engine_kwargs`.
        sampling: for rows without `sampling_params`; a mapping is completed by vLLM's defaults, a
            `Sampling` is used as is.
        pool: replicas and their resources, for settings beyond the options above; both must agree.
        backend: what a replica runs: "native" by default, or "vllm".

    Raises:
        ConfigError: an unknown option (with a suggestion), or an unsupported value.
    """

    _default_backend: ClassVar[str] = "native"

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: Concurrency | None = _ONE_ENGINE
    should_continue_on_error: bool | None = True
    chat_template_stage: StageOption = True
    tokenize_stage: StageOption = True
    detokenize_stage: StageOption = True
    prepare_multimodal_stage: StageOption = False
    accelerator_type: str | None = None
    placement_group_config: Mapping[str, Any] | None = None
    runtime_env: Mapping[str, Any] | None = None
    batch_size: int | None = LeftOut(32)
    max_concurrent_batches: int | None = LeftOut(8)
    max_tasks_in_flight_per_actor: int | None = None
    max_pending_requests: int | None = None
    log_engine_metrics: bool | None = True
    task_type: str = "generate"
    dynamic_lora_loading_path: str | None = None
    sampling: Sampling | Mapping[str, Any] | None = None
    pool: PoolConfig | Mapping[str, Any] | None = None
    backend: BackendConfig | Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        for name, (kind, expected) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(f"{name} must be {expected}, got {value!r}")
        if self.concurrency is not None and not isinstance(self.concurrency, LeftOut):
            replicas_of(self.concurrency)
        own = self.engine_kwargs.get("task_type", self.task_type)
        if own != self.task_type:
            logger.warning(
                "engine_kwargs.task_type is %r, but the task_type of the config, %r, is used: set "
                "it there",
                own,
                self.task_type,
            )
        _of_adapters(self)
        engine, backend, _ = _engines(self)
        reads_images = type_of(backend).takes_vllm_options
        if _stages(self)["prepare_multimodal_stage"].enabled and not reads_images:
            raise ConfigError("prepare_multimodal_stage needs backend='vllm', which reads images")
        _pool(self, engine, backend)


class vLLMEngineProcessorConfig(ProcessorConfig):  # noqa: N801 - the name of ray.data.llm
    """`ProcessorConfig` with vLLM as the default `backend`."""

    _default_backend: ClassVar[str] = "vllm"


def stage_config(config: ProcessorConfig, template_kwargs: Mapping[str, Any] | None) -> StageConfig:
    """Return the config of the stage that a processor with this config runs.

    `template_kwargs` are the `chat_template_kwargs` given to `build_processor`.
    """
    engine, backend, ignored = _engines(config)
    stages = _stages(config)
    _log_ignored(config, stages, ignored)
    chat = stages["chat_template_stage"]
    assert isinstance(chat, ChatTemplateStageConfig), "the table of stages says so"
    prompts = ("prompt", "tokenized_prompt")
    if not stages["tokenize_stage"].enabled:
        prompts = ("tokenized_prompt", "prompt")
    reads_images = type_of(backend).takes_vllm_options and config.task_type == "generate"
    options = {
        "engine": engine,
        "pool": _pool(config, engine, backend),
        "backend": backend,
        **_of_task(config),
        **_of_adapters(config),
        "conventional_images": MEDIA_COLUMN if reads_images else None,
        "input_error_column": INPUT_ERROR_COLUMN,
        "chat": False,
        "chat_template": chat.chat_template,
        "chat_template_kwargs": _template_kwargs(chat, template_kwargs),
        "prompt_column_special_tokens": "allow",
        # the first existing column is used
        "conventional_columns": ("messages", *prompts) if chat.enabled else prompts,
        "on_error": "raise" if config.should_continue_on_error is False else "row",
    }
    return build_stage_config(config.model_source, options, where="build_processor")


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
    """Return the options of each stage, which may be a bool, a mapping or a config."""
    stages = {}
    for name, kind in _STAGES.items():
        stage = getattr(config, name)
        if stage is None:
            stage = name != "prepare_multimodal_stage"
        if isinstance(stage, bool):
            stage = {"enabled": stage}
        if isinstance(stage, Mapping):
            try:
                stage = kind(**stage)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        if not isinstance(stage, kind):
            raise ConfigError(
                f"{name} must be a bool, a mapping or a raybatch.llm.{kind.__name__}, got {stage!r}"
            )
        own = getattr(stage, "model_source", None)
        if own not in (None, config.model_source):
            raise ConfigError(
                f"{name}.model_source is {own!r}, but only the tokenizer of the model, "
                f"{config.model_source!r}, can be used; leave it out. For another chat template, "
                "set chat_template"
            )
        stages[name] = stage
    return stages


def _engines(config: ProcessorConfig) -> tuple[EngineConfig, BackendConfig, list[str]]:
    """Return the options of engine and backend, and the names of those without effect."""
    backend = config._default_backend if config.backend is None else config.backend
    if isinstance(backend, str):
        backend = {"kind": backend}
    if isinstance(backend, Mapping):
        backend = from_mapping(BackendConfig, backend, where="backend")
    if config.task_type != "generate":
        backend = replace(backend, task=config.task_type)  # type: ignore[arg-type]
    if not backend.is_decided:
        raise ConfigError(
            "backend='auto' is not supported by processors, whose engine_kwargs are for one kind "
            "of engine; use vLLMEngineProcessorConfig, or set backend to 'vllm' or 'native'"
        )
    backend_type = type_of(backend)
    # the config says it
    engine_kwargs = {n: v for n, v in config.engine_kwargs.items() if n != "task_type"}
    if backend_type.takes_vllm_options:
        return _vllm_config(engine_kwargs, backend, model=config.model_source)
    check_options(backend, EngineConfig())
    engine, ignored = _engine_config(engine_kwargs)
    if backend_type.is_endpoint:
        # endpoints have no engine options
        ignored = [f"engine_kwargs.{n}" for n in engine_kwargs if n != "max_model_len"]
    return engine, backend, ignored


def _pool(config: ProcessorConfig, engine: EngineConfig, backend: BackendConfig) -> PoolConfig:
    """Return the pool, updated by the options of ray.data.llm."""
    names = ("accelerator_type", "runtime_env")
    changes = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.concurrency is not None and not isinstance(config.concurrency, LeftOut):
        changes["replicas"] = replicas_of(config.concurrency)
    if config.placement_group_config is not None:
        changes |= _reserved_by(
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
                f"pool.{name} is {own!r}, but concurrency, accelerator_type, runtime_env or "
                f"placement_group_config sets it to {value!r}; leave one of them out"
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
            "chat_template_kwargs differ between chat_template_stage and builder_kwargs; leave one "
            "of them out"
        )
    return dict(own or given or {})


def _log_ignored(
    config: ProcessorConfig, stages: Mapping[str, ProcessorStageConfig], ignored: list[str]
) -> None:
    given = [n for n in _WITHOUT_EFFECT if not isinstance(getattr(config, n), LeftOut | None)]
    given += [] if config.log_engine_metrics else ["log_engine_metrics"]
    for name, stage in stages.items():
        given += [f"{name}.{option}" for option in stage.without_effect()]
    # these are always on, or always off
    for name, is_usual in (("detokenize_stage", True), ("prepare_multimodal_stage", False)):
        given += [name] if stages[name].enabled != is_usual else []
    if given or ignored:
        logger.warning(
            "ignoring options that have no effect here: %s; rows do not wait for batches, and the "
            "engine schedules by memory",
            ", ".join([*given, *ignored]),
        )


def _vllm_config(
    engine_kwargs: Mapping[str, Any], backend: BackendConfig, *, model: str
) -> tuple[EngineConfig, BackendConfig, list[str]]:
    """Return the options of a vLLM engine, and the names of those without effect.

    The `engine_kwargs` of the backend take precedence; they may repeat the model.
    """
    engine_kwargs = {n: v for n, v in engine_kwargs.items() if (n, v) != ("model", model)}
    values, others = dict[str, Any](), dict[str, Any]()
    for name, value in engine_kwargs.items():
        meaning = MEANINGS.get(name, Meaning())
        if meaning.ours is not None and name not in _OF_VLLM:
            values[meaning.ours] = _ours(meaning, value)
        if not meaning.is_ours_alone and name not in _OF_SERVER:
            others[name] = value
    engine = EngineConfig(**{name: value for name, value in values.items() if value is not None})
    others |= backend.options.get("engine_kwargs", {})
    backend = replace(backend, options={**backend.options, "engine_kwargs": others})
    check_options(backend, engine)
    return engine, backend, [f"engine_kwargs.{n}" for n in _OF_SERVER if n in engine_kwargs]


def _engine_config(engine_kwargs: Mapping[str, Any]) -> tuple[EngineConfig, list[str]]:
    """Return the options of the native engine, and the names of those without effect."""
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in engine_kwargs.items():
        meaning = MEANINGS.get(name, Meaning())
        if meaning.ours is not None:
            if value is not None:
                values[meaning.ours] = _ours(meaning, value)
        elif name in _AS_OURS:
            values[name] = value
        elif name == _EAGER:
            # CUDA graphs are taken where they can be, unless this says no
            values["cuda_graphs"] = False if value else "auto"
        elif meaning.native is IGNORED:
            ignored.append(f"engine_kwargs.{name}")
        elif meaning.native is not UNKNOWN:
            if value is not None and value != meaning.native:
                raise ConfigError(
                    f"engine_kwargs.{name}={value!r} is not supported by the native engine; leave "
                    "it out"
                )
        elif name in fields_of(EngineConfig):
            raise ConfigError(
                f"engine_kwargs takes only options of vLLM, and {name!r} is one of raybatch's "
                f"native engine; to set it, use LLMStage(model, engine={{{name!r}: ...}})"
            )
        else:
            known = [n for n, m in MEANINGS.items() if m.ours or m.native is not UNKNOWN]
            hint = did_you_mean(name, [*known, *_AS_OURS, _EAGER])
            raise ConfigError(f"engine_kwargs: unknown option {name!r}{hint}")
    return EngineConfig(**values), ignored


def _ours(meaning: Meaning, value: object) -> object:
    """Return raybatch's name for a value of vLLM, or the value if the names are equal."""
    return meaning.values.get(value, value) if isinstance(value, str) else value


def _reserved_by(group: Mapping[str, Any], *, num_ranks: int, are_actors: bool) -> dict[str, Any]:
    """Return the options of `PoolConfig` that reserve the bundles of a placement group.

    Ranks that are Ray actors run in these bundles, on any hosts. Otherwise all ranks of an engine
    run on one host, in one actor and its child processes: the bundles are summed, without a
    placement group, and cannot be spread over hosts.
    """
    where, names = "placement_group_config", ("bundles", "bundle_per_worker", "strategy")
    if not isinstance(group, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {group!r}")
    for name in group:
        if name not in names:
            raise ConfigError(f"{where}: unknown option {name!r}{did_you_mean(str(name), names)}")
    given = [name for name in names[:2] if group.get(name) is not None]
    if len(given) != 1:
        raise ConfigError(f"{where} must have either bundles or bundle_per_worker")
    (name,) = given
    bundles = group[name] if name == "bundles" else [group[name]] * num_ranks
    check_bundles(bundles, where=f"{where}.{name}", is_zero_allowed=True)
    strategy = group.get("strategy", "PACK")
    if strategy not in get_args(Strategy):
        raise ConfigError(
            f"{where}.strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}"
        )
    if are_actors:
        # Ray refuses empty bundles
        kept = [{n: amount for n, amount in bundle.items() if amount} for bundle in bundles]
        return {"bundles": kept, "strategy": strategy}
    if strategy in ("SPREAD", "STRICT_SPREAD") and len(bundles) > 1:
        raise ConfigError(
            f"{where}.strategy {strategy!r} spreads the ranks of one engine over hosts, but they "
            "are processes of one host; set engine_kwargs.distributed_executor_backend='ray', or "
            "leave the strategy out"
        )
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return {
        "num_cpus_per_replica": float(total.pop("CPU", 0)),
        "num_gpus_per_replica": float(total.pop("GPU", 0)),
        "resources": {name: amount for name, amount in total.items() if amount},
    }
