"""The options of one stage as a frozen, validated record; nothing heavy is imported for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from jinja2 import TemplateError

from raybatch.backends.create import check_options
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    OnError,
    PoolConfig,
    SpecialTokens,
    check_choice,
    check_min,
    from_mapping,
)
from raybatch.errors import ConfigError, did_you_mean, nearest_name
from raybatch.stages.schema import OutputSchema
from raybatch.types import Sampling

Chat = bool | Literal["auto"]
OnTooLong = Literal["error", "truncate_left", "truncate_right", "drop"]
Message = Mapping[str, Any]
MessagesOption = str | Callable[[Mapping[str, Any]], Sequence[Message]] | Sequence[Message]

# One value decides the type of a column, so it cannot differ from row to row.
FIXED_PER_STAGE = ("n", "logprobs")

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """Options of one stage; `LLMStage` says what each one means.

    Three options are for a processor, whose rows were made by a function of the user:

    Args:
        input_error_column: a column of error texts; it is not passed on, and a row whose text is
            not empty is an error row with it.
        prompt_column_special_tokens: `special_tokens` of the column `prompt` where no option
            names the prompts; None takes `special_tokens`.
        conventional_columns: where no option names the prompts, the first of these that is a
            column does.
    """

    model: str
    prompt: str | None = None
    messages: MessagesOption | None = None
    tokenized_prompt: str | None = None
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    overrides: Mapping[str, str] = field(default_factory=dict)
    sampling_column: str | None = None
    id_column: str | None = None
    chat: Chat = "auto"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs_column: str | None = None
    special_tokens: SpecialTokens = "escape"
    on_error: OnError = "row"
    on_too_long: OnTooLong = "error"
    output_prefix: str = ""
    dedup: bool = True
    max_row_bytes: int = 8 << 20
    engine: EngineConfig = field(default_factory=EngineConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    input_error_column: str | None = None
    prompt_column_special_tokens: SpecialTokens | None = None
    conventional_columns: tuple[str, ...] = ("messages", "tokenized_prompt", "prompt")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a path or a hub id, got {self.model!r}")
        check_choice(self, "special_tokens", ("escape", "allow"))
        check_choice(self, "on_error", ("row", "raise"))
        check_choice(self, "on_too_long", ("error", "truncate_left", "truncate_right", "drop"))
        check_min(self, "max_row_bytes", 1)
        if self.chat not in (True, False, "auto"):
            raise ConfigError(f"chat must be True, False or 'auto', got {self.chat!r}")
        _check_inputs(self)
        _check_chat_template(self.chat_template)
        check_options(self.backend)
        _check_overrides(self)

    @property
    def output(self) -> OutputSchema:
        """The columns that the stage adds."""
        return OutputSchema(
            num_samples=self.sampling.n,
            has_logprobs=self.sampling.logprobs is not None,
            prefix=self.output_prefix,
        )


def build_stage_config(model: str, options: Mapping[str, Any], *, where: str) -> StageConfig:
    """Build the options of a stage; the nested ones may be mappings.

    Args:
        model: path, hub id or URI.
        options: names of `StageConfig` and `seed`; None stands for the default.
        where: what the options belong to, for error messages.

    Raises:
        ConfigError: an unknown option (with a suggestion) or a value out of range.
    """
    known = {f.name for f in fields(StageConfig)} | {"seed"}
    for name in options:
        if name not in known:
            raise ConfigError(f"{where}: unknown option {name!r}{_suggestion(name, known)}")
    values = {name: value for name, value in options.items() if value is not None}
    seed = values.pop("seed", None)
    values["sampling"] = _nested(Sampling, values.get("sampling"), where=f"{where}: sampling")
    values["engine"] = _nested(EngineConfig, values.get("engine"), where=f"{where}: engine")
    values["pool"] = _nested(PoolConfig, values.get("pool"), where=f"{where}: pool")
    backend = values.get("backend")
    if isinstance(backend, str):
        backend = {"kind": backend}
    values["backend"] = _nested(BackendConfig, backend, where=f"{where}: backend")
    if seed is not None:
        values["sampling"] = replace(values["sampling"], seed=seed)
    return from_mapping(StageConfig, {"model": model, **values}, where=where)


def _suggestion(name: str, known: set[str]) -> str:
    """Say which option may be meant; those that lie deeper are named with where they lie."""
    nested = {
        f.name: f"{option}.{f.name}"
        for option, cls in (("pool", PoolConfig), ("engine", EngineConfig), ("sampling", Sampling))
        for f in fields(cls)
    }
    nearest = nearest_name(name, [*nested, *known])
    return "" if nearest is None else f" (did you mean {nested.get(nearest, nearest)!r}?)"


def _nested(cls: type[_T], value: object, *, where: str) -> _T:
    if isinstance(value, cls):
        return value
    if value is None:
        return cls()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a {cls.__name__} or a mapping, got {value!r}")
    listed = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return from_mapping(cls, listed, where=where)


def _check_inputs(config: StageConfig) -> None:
    given = [
        name
        for name in ("prompt", "messages", "tokenized_prompt")
        if getattr(config, name) is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"give one of prompt, messages and tokenized_prompt, got {given}")
    if config.prompt is not None and not isinstance(config.prompt, str):
        raise ConfigError(f"prompt must be a template text, got {config.prompt!r}")
    if config.prompt == "":
        raise ConfigError("prompt is empty; name a column in it, such as prompt='{text}'")
    if config.tokenized_prompt is not None and not isinstance(config.tokenized_prompt, str):
        raise ConfigError(
            f"tokenized_prompt must be the name of a column, got {config.tokenized_prompt!r}"
        )
    is_messages = (
        config.messages is None
        or isinstance(config.messages, str | Sequence)
        or callable(config.messages)
    )
    if not is_messages:
        raise ConfigError(
            "messages must be the name of a column, a function of the row, or a list of "
            f"messages with templates, got {config.messages!r}"
        )
    if config.system is not None and config.tokenized_prompt is not None:
        raise ConfigError("system has no effect on tokenized_prompt; leave one of them out")
    if config.system is not None and config.chat is False:
        raise ConfigError("system needs a chat template; leave chat=False out")
    if config.messages is not None and config.chat is False:
        raise ConfigError("messages need a chat template; leave chat=False out")
    if config.chat_template_kwargs_column is not None and not isinstance(config.messages, str):
        raise ConfigError(
            "chat_template_kwargs_column is read beside a column of messages; set messages to the "
            "name of one"
        )


def _check_chat_template(text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise ConfigError(f"chat_template must be a template text, got {text!r:.200}")
    from raybatch.engine.chat_template import ChatTemplate

    try:
        ChatTemplate(text)
    except (TemplateError, ValueError, RecursionError) as error:
        raise ConfigError(f"chat_template is no template: {error}") from error


def _check_overrides(config: StageConfig) -> None:
    names = {f.name for f in fields(Sampling)}
    for name, column in config.overrides.items():
        if name not in names:
            raise ConfigError(
                f"overrides: unknown sampling option {name!r}{did_you_mean(name, names)}"
            )
        if name in FIXED_PER_STAGE:
            raise ConfigError(
                f"overrides: {name} decides the type of the output columns and is one value for "
                f"the whole stage; set Sampling({name}=...)"
            )
        if not isinstance(column, str):
            raise ConfigError(f"overrides: {name} must name a column, got {column!r}")
