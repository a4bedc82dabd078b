"""The options of one stage as a frozen, validated record; nothing heavy is imported for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, Literal, TypeVar

from pydantic.dataclasses import dataclass

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
from raybatch.config.option import (
    CHECKED,
    Answers,
    Hidden,
    Place,
    Positive,
    Speed,
    Unchecked,
    options,
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

# columns with the prompts where no option names one
PROMPT_COLUMNS = ("messages", "tokenized_prompt", "prompt")

_T = TypeVar("_T")


@options("")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class StageConfig:
    """Options of one stage, as `LLMStage` takes them, and five for processors and batch files."""

    model: Place[Unchecked[str]]
    """Checkpoint folder, hub id or URI; "demo" is the embedded model."""

    prompt: Answers[Unchecked[str | None]] = None
    """Template with columns in braces, such as "{document} Q: {question}"."""

    messages: Answers[Unchecked[MessagesOption | None]] = None
    """A column of OpenAI messages, a function of the row, or messages with templates."""

    tokenized_prompt: Answers[Unchecked[str | None]] = None
    """A column of token ids."""

    system: Answers[str | None] = None
    """System message put before the messages of each row that has none."""

    sampling: Sampling = field(default_factory=Sampling)
    """Options that decide the tokens."""

    overrides: Answers[Unchecked[Mapping[str, str]]] = field(default_factory=dict)
    """Sampling option to the column that replaces it per row; null takes `sampling`."""

    sampling_column: Answers[str | None] = None
    """A column of JSON texts or structs with several options per row."""

    query: Answers[str | None] = None
    """Template of the first text of a score; "{query}" unless a prompt is named."""

    document: Answers[str | None] = None
    """Template of the second text of a score."""

    pooling: Answers[Pooling] = field(default_factory=Pooling)
    """Options that decide the numbers."""

    pooling_column: Answers[str | None] = None
    """A column of JSON texts or structs with several of them per row."""

    lora_column: Answers[str | None] = None
    """A column that names the LoRA adapter of each row; null for none."""

    lora_path: Answers[str | None] = None
    """Folder or URI in which the adapters lie that it names; without it they are folders or URIs
    themselves."""

    id_column: Answers[str | None] = None
    """Identity of the rows; without it a hash of the prompt and a count."""

    chat: Answers[Unchecked[Chat]] = "auto"
    """Make `prompt` a user message; "auto" does where the model has a chat template."""

    chat_template: Answers[Unchecked[str | None]] = None
    """In place of the model's own."""

    chat_template_kwargs: Answers[Unchecked[Mapping[str, Any]]] = field(default_factory=dict)
    """Options of the chat template, such as enable_thinking."""

    chat_template_kwargs_column: Answers[str | None] = None
    """Such options per row, as JSON; read beside `messages`."""

    tools: Answers[Unchecked[str | Sequence[Mapping[str, Any]] | None]] = None
    """That the model may call, as OpenAI's chat API has them; or a column of such lists."""

    images: Answers[str | None] = None
    """A column of files as bytes, or of data: URLs; or of lists of them."""

    special_tokens: Answers[SpecialTokens] = "escape"
    """Of the data: "escape" makes special tokens plain text."""

    on_error: Speed[OnError] = "row"
    """Either of two: "row" turns a failure into `__inference_error__`; "raise" ends the job."""

    on_too_long: Answers[OnTooLong] = "error"
    """Either "error", "truncate_left", "truncate_right" or "drop", for too long prompts."""

    output_prefix: Answers[str] = ""
    """Put before every output column, for a second stage over the same rows."""

    dedup: Speed[bool] = True
    """Generate identical greedy prompts of a row batch once, and give the result to all."""

    max_row_bytes: Answers[Positive] = 8 << 20
    """A row whose columns take more becomes an error row."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Options of the engines."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    """Replicas and their resources."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    """What a replica runs."""

    input_error_column: Answers[Hidden[str | None]] = None
    """A column of error texts; it is not passed on, and a row whose text is not empty is an error
    row with it."""

    prompt_column_special_tokens: Answers[Hidden[SpecialTokens | None]] = None
    """`special_tokens` of the column `prompt` where no option names the prompts; None takes
    `special_tokens`."""

    conventional_columns: Answers[Hidden[tuple[str, ...]]] = PROMPT_COLUMNS
    """Where no option names the prompts, the first of these that is a column does."""

    row_logprobs: Answers[Hidden[bool]] = False
    """Rows may ask for log probabilities by themselves; the column is always there."""

    conventional_images: Answers[Hidden[str | None]] = None
    """Where `images` names none, a column of this name has the images."""

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


def build_stage_config(model: str, given: Mapping[str, Any], *, where: str) -> StageConfig:
    """Build the options of a stage; the nested ones may be mappings.

    Args:
        model: path, hub id or URI.
        given: options of `StageConfig`, `task` and `seed`; None stands for the default.
        where: what the options belong to, for error messages.

    Raises:
        ConfigError: an unknown option (with a suggestion) or a value out of range.
    """
    known = {f.name for f in fields(StageConfig)} | {"seed", "task"}
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: unknown option {name!r}{_suggestion(name, known)}")
    values = {name: value for name, value in given.items() if value is not None}
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
