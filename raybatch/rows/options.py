"""The options of one stage as a frozen, validated record, built from any form users may write."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic.dataclasses import dataclass

from raybatch.backends.choice import check_pool
from raybatch.backends.registry import check_options, parsed_columns, type_of
from raybatch.backends.vllm.args import ENGINE_ARGS, VllmOptions, place_of
from raybatch.config import BackendConfig, EngineConfig, PoolConfig, SpecialTokens, from_mapping
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
from raybatch.errors import ConfigError, did_you_mean, nearest_name
from raybatch.records.pooling import Pooling, pooling_of
from raybatch.records.types import Sampling, Task
from raybatch.rows.schema import OutputSchema
from raybatch.text.chat import InvalidPrompt, check_messages
from raybatch.text.typed_answers import answer_type

Chat = bool | Literal["auto"]
OnError = Literal["row", "raise"]
OnTooLong = Literal["error", "truncate_left", "truncate_right", "drop"]
Message = Mapping[str, Any]
MessagesOption = str | Callable[[Mapping[str, Any]], Sequence[Message]] | Sequence[Message]

# columns that hold the prompts if no option names one
PROMPT_COLUMNS = ("messages", "tokenized_prompt", "prompt")

# these decide the type of an output column, so they cannot differ between rows
FIXED_PER_STAGE = ("n", "logprobs")
# options that name the prompt; a pair of query and document is another way
PROMPT_OPTIONS = ("prompt", "messages", "tokenized_prompt")

_NO_SAMPLING = Sampling()

_OUTER: Mapping[str, Any] = {"sampling": Sampling, "engine": EngineConfig, "pool": PoolConfig}
# options of other libraries and their names here
_MEANT = {
    "concurrency": "pool.replicas",
    "batch_size": "engine.max_num_seqs",
    "num_gpus": "pool.num_gpus_per_replica",
    "num_cpus": "pool.num_cpus_per_replica",
}


@options("")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class StageConfig:
    """Options of one stage: model, prompt, and how rows become answers."""

    model: Place[Unchecked[str]]
    """Checkpoint folder, hub id (also org/name@revision) or URI; "demo" is the embedded model."""

    prompt: Answers[str | None] = None
    """Template with columns in braces, such as "{document} Q: {question}"."""

    messages: Answers[Unchecked[MessagesOption | None]] = None
    """Column of OpenAI messages, a list of message templates, or (in Python) a function of the
    row."""

    tokenized_prompt: Answers[str | None] = None
    """Column of token ids."""

    system: Answers[str | None] = None
    """System message for rows whose messages have none."""

    sampling: Sampling = field(default_factory=Sampling)
    """Options that decide the generated tokens."""

    overrides: Answers[Unchecked[Mapping[str, str]]] = field(default_factory=dict)
    """Sampling options that a column sets per row, as {"max_tokens": "budget"}; null uses
    `sampling`."""

    sampling_column: Answers[str | None] = None
    """Column of several sampling options, as JSON texts or structs."""

    query: Answers[str | None] = None
    """Template of the first text of a score; "{query}" unless a prompt is set."""

    document: Answers[str | None] = None
    """Template of the second text of a score."""

    pooling: Answers[Pooling] = field(default_factory=Pooling)
    """Options of embeddings, classes and scores."""

    pooling_column: Answers[str | None] = None
    """Column of pooling options, as JSON texts or structs."""

    lora_column: Answers[str | None] = None
    """Column of the LoRA adapter's name per row; null for none."""

    lora_path: Answers[str | None] = None
    """Folder or URI of the adapters that `lora_column` names; without it the column holds whole
    paths or URIs."""

    id_column: Answers[str | None] = None
    """Column that becomes `row_id`. Without it: file and position in a job, else a hash of the
    prompt and a count."""

    chat: Answers[Chat] = "auto"
    """Whether `prompt` becomes a user message in the chat template; "auto": if the model has
    one."""

    chat_template: Answers[str | None] = None
    """Jinja template instead of the model's."""

    chat_template_kwargs: Answers[Unchecked[Mapping[str, Any]]] = field(default_factory=dict)
    """Variables of the chat template, such as {"enable_thinking": false}."""

    chat_template_kwargs_column: Answers[str | None] = None
    """Column of such variables, as JSON; needs a column of `messages`."""

    tools: Answers[Unchecked[str | Sequence[Mapping[str, Any]] | None]] = None
    """Tools as in OpenAI's chat API; or a column of such lists."""

    images: Answers[str | None] = None
    """Column of images: bytes of a file, a data: URL, or a list of them."""

    special_tokens: Answers[SpecialTokens] = "escape"
    """Special tokens in your data: "escape" makes them plain text, "allow" keeps their effect."""

    on_error: Speed[OnError] = "row"
    """"row" makes a failed row an error row (`__inference_error__` has the reason); "raise" fails
    the job."""

    on_too_long: Answers[OnTooLong] = "error"
    """Prompts beyond `max_model_len`: "error" makes an error row, "truncate_left" cuts the start of
    the longest message, "truncate_right" its end, "drop" leaves no answer (status filtered)."""

    output_prefix: Answers[str] = ""
    """Prefix of output columns, for a second stage over the same rows."""

    parse: Answers[bool] = False
    """Add columns `parsed`, the answer typed by its JSON schema, and `parsed_error`."""

    dedup: Speed[bool] = True
    """Generate identical greedy prompts once; a plan groups them. The last 64 MiB of answers are
    cached."""

    max_row_bytes: Answers[Positive] = 8 << 20
    """A row with more bytes becomes an error row."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Options of the engines."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    """Replicas and their resources."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    """What a replica runs."""

    # hidden from here on: for processors and batch files
    input_error_column: Answers[Hidden[str | None]] = None
    """Column of error texts; rows with a text become error rows with it. The column is dropped."""

    prompt_column_special_tokens: Answers[Hidden[SpecialTokens | None]] = None
    """`special_tokens` of the column `prompt` if no option names the prompts; None uses
    `special_tokens`."""

    conventional_columns: Answers[Hidden[tuple[str, ...]]] = PROMPT_COLUMNS
    """Columns to look for, in order, if no option names the prompts."""

    row_logprobs: Answers[Hidden[bool]] = False
    """Rows may request log probabilities themselves; the column always exists."""

    conventional_images: Answers[Hidden[str | None]] = None
    """Column of images if `images` is not set and the column exists."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a path or a hub id, got {self.model!r}")
        _check_inputs(self)
        _check_tools(self)
        _check_images(self)
        _check_chat_template(self.chat_template)
        check_options(self.backend, self.engine)
        check_pool(self.pool, self.backend, self.engine)
        _check_overrides(self)
        _check_task(self)
        _check_parse(self)
        _check_adapters(self)

    @property
    def task(self) -> Task:
        """The task of the stage."""
        return self.backend.task

    def is_chat(self, *, has_template: bool) -> bool:
        """Return whether `prompt` becomes a user message; pooling tasks use the text itself."""
        is_auto = has_template and self.task == "generate"
        return is_auto if self.chat == "auto" else bool(self.chat)

    @property
    def fixed_options(self) -> tuple[str, ...]:
        """The sampling options that no row may set."""
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
            answers=str(self.sampling.structured_outputs) if self.parse else None,
        )


def _check_parse(config: StageConfig) -> None:
    constraint = config.sampling.structured_outputs
    if config.parse and (not isinstance(constraint, str) or answer_type(constraint) is None):
        raise ConfigError(
            "parse needs a JSON schema for the whole stage: set sampling.structured_outputs to "
            "{'json': schema}"
        )


def _check_inputs(config: StageConfig) -> None:
    given = [name for name in (*PROMPT_OPTIONS, "query") if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"set only one of {', '.join(PROMPT_OPTIONS)} and query, got {given}")
    if config.prompt == "":
        raise ConfigError("prompt is empty; name a column in it, such as prompt='{text}'")
    if not isinstance(config.messages, str | Sequence | None) and not callable(config.messages):
        raise ConfigError(
            "messages must be a column name, a function of the row, or a list of message "
            f"templates, got {config.messages!r}"
        )
    if isinstance(config.messages, Sequence) and not isinstance(config.messages, str):
        try:
            contents = [message["content"] for message in check_messages(config.messages)]
        except InvalidPrompt as error:
            raise ConfigError(str(error)) from error
        if bad := [(i, text) for i, text in enumerate(contents) if not isinstance(text, str)]:
            place, text = bad[0]
            raise ConfigError(f"messages[{place}].content must be a template text, got {text!r}")
    if not isinstance(config.chat_template_kwargs, Mapping):
        raise ConfigError(
            f"chat_template_kwargs must be a mapping, got {config.chat_template_kwargs!r}"
        )
    if config.system is not None:
        if config.tokenized_prompt is not None:
            raise ConfigError("system has no effect on tokenized_prompt; leave one of them out")
        if config.chat is False:
            raise ConfigError("system needs a chat template; leave chat=False out")
    if config.messages is not None and config.chat is False:
        raise ConfigError("messages need a chat template; leave chat=False out")
    if config.chat_template_kwargs_column is not None and not isinstance(config.messages, str):
        raise ConfigError(
            "chat_template_kwargs_column needs a column of messages; set messages to its name"
        )


def _check_images(config: StageConfig) -> None:
    if config.images is None:
        return
    if not type_of(config.backend).reads_images:
        raise ConfigError(
            f"images: the {_kind(config)} backend only reads text; set backend='vllm', or "
            "'openai' for an endpoint"
        )
    if config.task != "generate":
        raise ConfigError(f"images: task {config.task!r} only reads text; leave images out")
    if not isinstance(config.messages, str | None):
        raise ConfigError(
            "images needs a prompt, a column of messages or token ids; leave it out, as a messages "
            "function must return messages that contain the images"
        )


def _check_tools(config: StageConfig) -> None:
    tools = config.tools
    if tools is None:
        return
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str | bytes)
    if not isinstance(tools, str) and not (is_list and all(isinstance(t, Mapping) for t in tools)):
        raise ConfigError(
            "tools must be a list of tools as in OpenAI's chat API, or the name of a column of "
            f"such lists, got {tools!r:.200}"
        )
    if config.tokenized_prompt is not None or config.chat is False:
        raise ConfigError("tools need a chat template; leave tokenized_prompt and chat=False out")
    has_other = config.prompt is not None or not isinstance(config.messages, str | None)
    if isinstance(tools, str) and has_other:
        raise ConfigError(
            "a column of tools needs a column of messages; set messages to its name, or list the "
            "tools of all rows"
        )


def _check_chat_template(text: str | None) -> None:
    if text is None:
        return
    from raybatch.text.chat_template import ChatTemplate

    try:
        ChatTemplate(text)
    except (TemplateError, ValueError, RecursionError) as error:
        raise ConfigError(f"chat_template is not a valid template: {error}") from error


def _check_overrides(config: StageConfig) -> None:
    names = {f.name for f in fields(Sampling)}
    if not isinstance(config.overrides, Mapping):
        raise ConfigError(f"overrides must map options to columns, got {config.overrides!r}")
    for name, column in config.overrides.items():
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"overrides: unknown sampling option {name!r}{hint}")
        if name in FIXED_PER_STAGE:
            raise ConfigError(
                f"overrides: {name} decides the type of output columns and must be the same for "
                f"all rows; set sampling.{name}"
            )
        if not isinstance(column, str):
            raise ConfigError(f"overrides: {name} must name a column, got {column!r}")


def _check_task(config: StageConfig) -> None:
    if (config.query is None) != (config.document is None):
        raise ConfigError("query and document need each other; set both")
    task = config.task
    for name in ("query", "document"):
        if task != "score" and getattr(config, name) is not None:
            raise ConfigError(f"{name} needs task 'score', got task {task!r}")
    if config.query is not None and config.system is not None:
        raise ConfigError("system has no effect on query and document; leave it out")
    if task == "generate":
        if config.pooling != Pooling() or config.pooling_column is not None:
            raise ConfigError(
                "pooling and pooling_column need task 'embed', 'classify' or 'score'; set task"
            )
        return
    if config.overrides or config.sampling_column is not None:
        raise ConfigError(
            f"overrides and sampling_column have no effect with task {config.task!r}; leave them "
            "out (pooling_column sets options per row)"
        )
    for name in (*FIXED_PER_STAGE, "structured_outputs"):
        value = getattr(config.sampling, name)
        if value != getattr(_NO_SAMPLING, name):
            raise ConfigError(
                f"sampling.{name}={value!r} has no effect with task {config.task!r}; leave it out"
            )


def _check_adapters(config: StageConfig) -> None:
    if config.lora_column is None:
        if config.lora_path is not None:
            raise ConfigError("lora_path needs lora_column; set it, or leave lora_path out")
        return
    backend_type = type_of(config.backend)
    if not backend_type.has_adapters:
        raise ConfigError(
            f"lora_column: the {_kind(config)} backend does not support LoRA; set backend='vllm'"
        )
    kwargs = config.backend.options.get("engine_kwargs") or {}
    if backend_type.takes_vllm_options and not kwargs.get("enable_lora"):
        raise ConfigError(
            "lora_column needs engines with LoRA; set enable_lora in the engine_kwargs of the "
            "backend (with max_loras and max_lora_rank)"
        )


def _kind(config: StageConfig) -> str:
    """Return the backend that options are checked for; an undecided one may become native."""
    return config.backend.kind if config.backend.is_decided else "native"


def build_stage_config(model: str, given: Mapping[str, Any], *, where: str) -> StageConfig:
    """Build the options of a stage; nested options may be mappings, and None means the default.

    Args:
        given: options of `StageConfig`, `task` and `seed`.
        where: origin of the options, for error messages.

    Raises:
        ConfigError: an unknown option (with a suggestion) or a value out of range.
    """
    known = {f.name for f in fields(StageConfig)} | {"seed", "task"}
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: unknown option {name!r}{_suggestion(name, known)}")
    values = {name: value for name, value in given.items() if value is not None}
    seed, task = values.pop("seed", None), values.pop("task", "generate")
    if isinstance(values.get("backend"), str):
        values["backend"] = {"kind": values["backend"]}
    for name, cls in {**_OUTER, "backend": BackendConfig}.items():
        value = values.setdefault(name, {})
        if isinstance(value, cls):
            continue
        if not isinstance(value, Mapping):
            what = f"{where}: {name} must be a {cls.__name__} or a mapping"
            raise ConfigError(f"{what}, got {value!r}")
        listed = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
        engine_args = ENGINE_ARGS.union(_MEANT).intersection(listed)
        for key in sorted(engine_args.difference(f.name for f in fields(cls))):
            raise ConfigError(f"{where}: {name}: unknown option {key!r}{_suggestion(key, known)}")
        values[name] = from_mapping(cls, listed, where=f"{where}: {name}")
    if task != "generate":
        values["backend"] = replace(values["backend"], task=task)
    if isinstance(values.get("pooling"), Mapping):
        values["pooling"] = pooling_of(values["pooling"])
    is_score = values["backend"].task == "score"
    if is_score and not any(name in values for name in (*PROMPT_OPTIONS, "query")):
        values |= {"query": "{query}", "document": "{document}"}
    if seed is not None:
        values["sampling"] = replace(values["sampling"], seed=seed)
    return from_mapping(StageConfig, {"model": model, **values}, where=where)


def _suggestion(name: str, known: set[str]) -> str:
    """Return a hint at the option that may be meant, with the full name of a nested one."""
    nested = {f.name: f"{option}.{f.name}" for option, cls in _OUTER.items() for f in fields(cls)}
    nested |= {f.name: f"backend.options.{f.name}" for f in fields(VllmOptions)}
    if ours := _MEANT.get(name):
        return f"; in raybatch it is {ours!r}"
    if name not in nested and (place := place_of(name)):
        return place
    nearest = nearest_name(name, [*nested, *known])
    return "" if nearest is None else f" (did you mean {nested.get(nearest, nearest)!r}?)"
