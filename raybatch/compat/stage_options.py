"""The nested stage configs of ray.data.llm: there each stage is a pool of actors, here a function.

Options that decide a prompt or a text are supported; options of those actors have no effect.
Unsupported configs raise an error that names the alternative.
"""

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from raybatch.errors import ConfigError, did_you_mean, error_text

Concurrency = int | tuple[int, int]

# options of a stage's actors, which do not exist here
_OF_ACTORS = ("batch_size", "concurrency", "runtime_env", "num_cpus", "memory")


class Checked(type):
    """Metaclass that raises ConfigError for unknown options, with a suggestion."""

    def __call__(cls, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"{cls.__name__}: unknown option {name!r}{hint}")
        return super().__call__(*args, **options)


class LeftOut(int):
    """An option that was left out; as a number, the default of ray.data.llm, without effect."""


class Options(metaclass=Checked):
    """Base of configs, with the pydantic methods that scripts call on configs of ray.data.llm."""

    @classmethod
    def from_file(cls, path: str) -> Self:
        """Read a config from a YAML file; ConfigError: it is invalid."""
        try:
            options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error_text(error)}") from error
        if not isinstance(options, Mapping):
            raise ConfigError(f"{path} must hold the options of a {cls.__name__}, got {options!r}")
        return cls(**options)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a checked copy with the options in `update` changed; `deep` also copies values."""
        changed = replace(self, **(update or {}))  # type: ignore[type-var]
        return deepcopy(changed) if deep else changed

    def model_dump(
        self,
        *,
        include: Collection[str] | None = None,
        exclude: Collection[str] = (),
        exclude_defaults: bool = False,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """Return the options as a dict from which the class makes the same config again."""
        values = {}
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            is_out = f.name in exclude or (include is not None and f.name not in include)
            is_out |= (exclude_none and value is None) or (exclude_defaults and value == f.default)
            # given, it would count: on eight GPUs, concurrency=1 is one engine
            is_out |= isinstance(value, LeftOut)
            if not is_out:
                is_nested = isinstance(value, Options)
                values[f.name] = value.model_dump() if is_nested else deepcopy(value)
        return values


@dataclass(frozen=True, kw_only=True)
class ProcessorStageConfig(Options):
    """Options of all stages of ray.data.llm.

    Args:
        enabled: whether the stage runs; see each stage for its effect here.
        batch_size: no effect, like `concurrency`, `runtime_env`, `num_cpus` and `memory`: stages
            have no actors.

    Raises:
        ConfigError: an unknown option (with a suggestion), or a value of the wrong type.
    """

    _IDLE: ClassVar[tuple[str, ...]] = _OF_ACTORS

    enabled: bool = True
    batch_size: int | None = None
    concurrency: Concurrency | None = None
    runtime_env: Mapping[str, Any] | None = None
    num_cpus: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(
                f"{type(self).__name__}.enabled must be true or false, got {self.enabled!r}"
            )
        if self.concurrency is not None:
            replicas_of(self.concurrency)

    def without_effect(self) -> list[str]:
        """Return the names of options that are set but have no effect."""
        idle = [f for f in fields(self) if f.name in self._IDLE]
        return [f.name for f in idle if getattr(self, f.name) != f.default]


@dataclass(frozen=True, kw_only=True)
class ChatTemplateStageConfig(ProcessorStageConfig):
    """How `messages` become a prompt; if disabled, a column `messages` is not read.

    Template and options, such as enable_thinking, replace the model's; `model_source` can only be
    the model of the processor.
    """

    model_source: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizerStageConfig(ProcessorStageConfig):
    """Options of tokenization; if disabled, `tokenized_prompt` takes precedence over `prompt`."""

    model_source: str | None = None


@dataclass(frozen=True, kw_only=True)
class DetokenizeStageConfig(ProcessorStageConfig):
    """Has no effect: `generated_text` always exists, without the stop string that ended it."""

    model_source: str | None = None


@dataclass(frozen=True, kw_only=True)
class PrepareMultimodalStageConfig(ProcessorStageConfig):
    """Has no effect: vLLM always reads images of messages, other backends never do."""

    _IDLE: ClassVar[tuple[str, ...]] = (
        *_OF_ACTORS,
        "model_config_kwargs",
        "chat_template_content_format",
        "apply_sys_msg_formatting",
    )

    model_config_kwargs: Mapping[str, Any] | None = None
    chat_template_content_format: str | None = "string"
    apply_sys_msg_formatting: bool | None = False


def replicas_of(concurrency: object) -> int:
    """Return the most replicas that `concurrency` allows: itself, or the larger one of a pair."""
    sizes = concurrency if isinstance(concurrency, tuple | list) else (concurrency, concurrency)
    is_valid = len(sizes) == 2 and all(type(n) is int and n >= 1 for n in sizes)
    if not is_valid or sizes[0] > sizes[1]:
        raise ConfigError(
            f"concurrency must be a number of at least 1 or a pair (min, max), got {concurrency!r}"
        )
    return int(sizes[1])


_ENDPOINT = (
    'ProcessorConfig(model_source=..., backend={"kind": "openai", "options": {"base_url": ...}}), '
    "which sends messages or prompts to an endpoint of OpenAI's API and handles rate limits and "
    "retries (docs/how-to/endpoints.md)"
)


class _Refused:
    """A class whose call raises an error with the alternative."""

    instead = _ENDPOINT

    def __init__(self, *args: object, **options: object) -> None:
        raise ConfigError(f"{type(self).__name__} is not supported; use {self.instead}")


class HttpRequestProcessorConfig(_Refused):
    """Not supported, raises ConfigError: an endpoint is a backend of any stage instead."""


class HttpRequestStageConfig(_Refused):
    """Not supported, raises ConfigError; see `HttpRequestProcessorConfig`."""


class ServeDeploymentProcessorConfig(_Refused):
    """Not supported, raises ConfigError: processors of one model and options share engines."""

    instead = (
        "vLLMEngineProcessorConfig: processors with the same model and options share their engines "
        "within one driver; a server of Ray Serve LLM that runs already is an endpoint: "
        f"{_ENDPOINT}"
    )


class SGLangEngineProcessorConfig(_Refused):
    """Not supported, raises ConfigError: SGLang does not run inside a replica."""

    instead = f"vLLMEngineProcessorConfig, or a server of SGLang as an endpoint: {_ENDPOINT}"
