"""The options of one stage as a frozen, validated record; nothing heavy is imported for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from raybatch.backends.registry import parsed_columns
from raybatch.backends.vllm.args import VllmOptions
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    OnError,
    PoolConfig,
    SpecialTokens,
    from_mapping,
)
from raybatch.errors import ConfigError, nearest_name
from raybatch.records.pooling import Pooling, pooling_of
from raybatch.records.types import Sampling, Task
from raybatch.rows.option_checks import FIXED_PER_STAGE, PROMPT_OPTIONS, check_stage
from raybatch.rows.schema import OutputSchema

Chat = bool | Literal["auto"]
OnTooLong = Literal["error", "truncate_left", "truncate_right", "drop"]
Message = Mapping[str, Any]
MessagesOption = str | Callable[[Mapping[str, Any]], Sequence[Message]] | Sequence[Message]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """Options of one stage, as `LLMStage` takes them, and five for processors and batch files.

    Args:
        model: checkpoint folder, hub id or URI; "demo" is the embedded model.
        prompt: template with columns in braces, such as "{document} Q: {question}".
        messages: a column of OpenAI messages, a function of the row, or messages with templates.
        tokenized_prompt: a column of token ids.
        system: system message put before the messages of each row that has none.
        sampling: options that decide the tokens.
        overrides: sampling option to the column that replaces it per row; null takes `sampling`.
        sampling_column: a column of JSON texts or structs with several options per row.
        query: template of the first text of a score; "{query}" unless a prompt is named.
        document: template of the second text of a score.
        pooling: options that decide the numbers.
        pooling_column: a column of JSON texts or structs with several of them per row.
        lora_column: a column that names the LoRA adapter of each row; null for none.
        lora_path: folder or URI in which the adapters lie that it names; without it they are
            folders or URIs themselves.
        id_column: identity of the rows; without it a hash of the prompt and a count.
        chat: make `prompt` a user message; "auto" does where the model has a chat template.
        chat_template: in place of the model's own.
        chat_template_kwargs: options of the chat template, such as enable_thinking.
        chat_template_kwargs_column: such options per row, as JSON; read beside `messages`.
        tools: that the model may call, as OpenAI's chat API has them; or a column of such lists.
        images: a column of files as bytes, or of data: URLs; or of lists of them.
        special_tokens: "escape" makes special tokens in the data plain text.
        on_error: "row" turns a failure into `__inference_error__`; "raise" ends the job.
        on_too_long: "error", "truncate_left", "truncate_right" or "drop", for too long prompts.
        output_prefix: put before every output column, for a second stage over the same rows.
        dedup: generate identical greedy prompts of a row batch once, and give the result to all.
        max_row_bytes: a row whose columns take more becomes an error row.
        engine: options of the engines.
        pool: replicas and their resources.
        backend: what a replica runs.
        input_error_column: a column of error texts; it is not passed on, and a row whose text is
            not empty is an error row with it.
        prompt_column_special_tokens: `special_tokens` of the column `prompt` where no option
            names the prompts; None takes `special_tokens`.
        conventional_columns: where no option names the prompts, the first of these that is a
            column does.
        row_logprobs: rows may ask for log probabilities by themselves; the column is always there.
        conventional_images: where `images` names none, a column of this name has the images.
    """

    model: str
    prompt: str | None = None
    messages: MessagesOption | None = None
    tokenized_prompt: str | None = None
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    overrides: Mapping[str, str] = field(default_factory=dict)
    sampling_column: str | None = None
    query: str | None = None
    document: str | None = None
    pooling: Pooling = field(default_factory=Pooling)
    pooling_column: str | None = None
    lora_column: str | None = None
    lora_path: str | None = None
    id_column: str | None = None
    chat: Chat = "auto"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs_column: str | None = None
    tools: str | Sequence[Mapping[str, Any]] | None = None
    images: str | None = None
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
    row_logprobs: bool = False
    conventional_images: str | None = None

    def __post_init__(self) -> None:
        check_stage(self)

    @property
    def task(self) -> Task:
        """What is made of each prompt."""
        return self.backend.task

    @property
    def fixed_options(self) -> tuple[str, ...]:
        """The sampling options that no row may set for itself."""
        return tuple(n for n in FIXED_PER_STAGE if n != "logprobs" or not self.row_logprobs)

    @property
    def output(self) -> OutputSchema:
        """The columns that the stage adds."""
        return OutputSchema(
            num_samples=self.sampling.n,
            has_logprobs=self.row_logprobs or self.sampling.logprobs is not None,
            prefix=self.output_prefix,
            task=self.task,
            parsed=parsed_columns(self.backend, self.engine),
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
    known = {f.name for f in fields(StageConfig)} | {"seed", "task"}
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
    backend = _nested(BackendConfig, backend, where=f"{where}: backend")
    if (task := values.pop("task", "generate")) != "generate":
        backend = replace(backend, task=task)
    values["backend"] = backend
    if isinstance(values.get("pooling"), Mapping):
        values["pooling"] = pooling_of(values["pooling"])
    if backend.task == "score" and not any(name in values for name in (*PROMPT_OPTIONS, "query")):
        values |= {"query": "{query}", "document": "{document}"}
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
    nested |= {f.name: f"backend.options.{f.name}" for f in fields(VllmOptions)}
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
