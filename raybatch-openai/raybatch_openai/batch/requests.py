"""Parses requests into records; a refusal names the key that is wrong or not supported."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from raybatch.errors import ConfigError, RaybatchError, did_you_mean, encodable
from raybatch.records.pooling import pooling_of
from raybatch.records.types import Sampling, Task
from raybatch.rows.row_options import RENAMED
from raybatch.text.chat import InvalidPrompt, check_messages
from raybatch.text.chat import with_parsed_calls as _with_parsed_calls

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

# by the task of the stage; OpenAI has no endpoints for other tasks
_ENDPOINTS: Mapping[Task, tuple[str, ...]] = {
    "generate": (CHAT, COMPLETIONS),
    "embed": (EMBEDDINGS,),
}

Kind = Literal["messages", "prompt", "tokens"]

MAX_PROMPTS = 2048
MAX_TEMPERATURE = 2
# OpenAI's default of max_tokens
COMPLETION_TOKENS = 16

# keys that change no answer
_LABELS = ("metadata", "safety_identifier", "service_tier", "store", "user")
_CACHE_KEYS = ("prompt_cache_key", "prompt_cache_retention")
_IGNORED = (*_LABELS, *_CACHE_KEYS, "parallel_tool_calls", "stream_options")
_NEWER = {**RENAMED, "functions": "tools", "function_call": "tool_choice"}
# sampling options that are passed on as they are
_PASSED = tuple(
    option.name for option in fields(Sampling) if option.name not in ("max_tokens", "n", "logprobs")
)
# options of embeddings; all but the first are vLLM's
_POOLING = ("dimensions", "normalize", "use_activation")
# keys of OpenAI with one supported value
_UNSUPPORTED = ("stream", "logit_bias", "modalities", "echo", "suffix")

_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# error types of pydantic, in the words of JSON instead of Python
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "model_type": "an object",
    "string_too_long": "a string of at most {max_length} characters",
    "string_type": "a string",
    "string_unicode": "a string without unpaired surrogates",
    "too_long": "an object of at most {max_length} keys",
    "whole_number": "a whole number from {least} to {most}",
}


def _within(least: int, most: int) -> PlainValidator:
    """Return a validator of whole numbers within these bounds."""

    def checked(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise PydanticCustomError("whole_number", "", {"least": least, "most": most})
        return value

    return PlainValidator(checked)


_NumLogprobs = Annotated[int, _within(0, 20)]


class Form(NamedTuple):
    """What is equal for all rows of a job, so the requests of each form run in a separate job."""

    kind: Kind  # also the name of the prompt column
    num_samples: int
    has_logprobs: bool

    @property
    def name(self) -> str:
        """Name of the folders with the rows and outputs of this form."""
        return f"{self.kind}-n{self.num_samples}{'-logprobs' if self.has_logprobs else ''}"


class Reply(NamedTuple):
    """Facts of a request that its answer needs, besides the results of its rows."""

    endpoint: str
    model: str
    num_logprobs: int | None = None  # most likely tokens to return per position
    encoding: str = "float"  # of embeddings: "float" or "base64"


class ParsedRequest(NamedTuple):
    """A valid request, converted to rows: one for each prompt."""

    form: Form
    prompts: Sequence[Any]  # by the form's kind: messages as JSON, texts, or token ids
    sampling: Mapping[str, Any]  # non-default options; for embeddings, of pooling
    reply: Reply
    template_options: Mapping[str, Any] = MappingProxyType({})


def endpoints_of(task: Task) -> tuple[str, ...]:
    """Return the endpoints whose requests a stage with this task can answer."""
    return _ENDPOINTS.get(task, ())


class Refusal(RaybatchError):  # noqa: N818 - it becomes the answer to a request
    """Raised for a batch line or an HTTP request that cannot be answered.

    Args:
        message: why, and what to do.
        code: error code of OpenAI's API, if it has one.
        param: key that is wrong; None if it is no single key.
        status: HTTP status; None for a line that is not even a request.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int | None = 400,
    ) -> None:
        super().__init__(encodable(message))
        # not redacted: it quotes a request for its author, and requests hold no secrets
        self.message = encodable(message)
        self.code = code
        self.param = param if param is None else encodable(param)
        self.status = status

    def record(self) -> dict[str, Any]:
        """Return plain data to store, from which `Refusal(**record)` makes an equal error."""
        return dict(vars(self))

    def body(self) -> dict[str, Any]:
        """Return the body of an HTTP error response."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        kind = "server_error" if (self.status or 0) >= 500 else kind
        about = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": kind, **about}}


def refusal_of(error: ValidationError) -> Refusal:
    """Return a refusal for the first error that pydantic found in a body."""
    first = error.errors(include_url=False)[0]
    key, kind = str(first["loc"][0]), first["type"]
    where = ".".join(map(str, first["loc"]))
    if first["loc"][-1] == "[key]":
        where = f"a key of {key}"
    if kind == "extra_forbidden":
        return Refusal(f"{where} is not supported", param=key, code="unknown_parameter")
    if kind == "missing":
        return Refusal(f"{where} is missing", param=key)
    wanted = first["msg"].removeprefix("Input should be ")
    if kind in _WANTED:
        wanted = _WANTED[kind].format_map(first.get("ctx", {}))
    elif wanted == first["msg"]:
        return Refusal(f"{where}: {wanted}", param=key)
    return Refusal(f"{where} must be {wanted}, got {first['input']!r:.200}", param=key)


def unexecuted(code: str) -> Refusal:
    """Return the error for a request that was not executed before its batch ended.

    `code` is why it ended: "batch_expired" or "batch_cancelled".
    """
    ended = {
        "batch_expired": "the completion window ended",
        "batch_cancelled": "the batch was cancelled",
    }
    return Refusal(f"This request was not executed before {ended[code]}.", code=code, status=None)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str


class _Generation(_Body):
    n: Annotated[int, _within(1, 128)] = 1
    max_tokens: Any = None
    stream: Literal[False] = False
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}


class _Function(BaseModel):
    name: str


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


class _Chat(_Generation):
    messages: Any = None
    max_completion_tokens: Any = None
    logprobs: bool = False
    top_logprobs: _NumLogprobs = 0
    response_format: Any = None
    reasoning_effort: _Effort | None = None
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] = ["text"]
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class _Completion(_Generation):
    prompt: Any = None
    logprobs: _NumLogprobs | None = None
    best_of: Any = None
    echo: Literal[False] = False
    suffix: Literal[""] = ""


class _Embedding(_Body):
    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"


_B = TypeVar("_B", bound=_Body)


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyRules:
    """What the requests of a batch may contain, by the model and the options of its jobs."""

    names: tuple[str, ...]  # of the model in bodies
    endpoint: str | None = None  # the only one allowed; None: all of the task
    reads_tools: bool = False  # the chat template renders them
    reads_reasoning_effort: bool = False
    context: int | None = None  # tokens of the model; None: unknown
    chat: Sampling = field(default_factory=Sampling)  # defaults of its requests
    completions: Sampling = field(default_factory=Sampling)
    task: Task = "generate"


def read_request(request: Mapping[str, Any], rules: BodyRules) -> ParsedRequest:
    """Parse the JSON object of a line, except for its `custom_id`; raise Refusal if invalid."""
    unknown = [key for key in request if key not in ("custom_id", "method", "url", "body")]
    if unknown:
        raise _bad(unknown[0], f"unknown key {unknown[0]!r} of the request", "unknown_parameter")
    if request.get("method") != "POST":
        raise _bad("method", f"method must be 'POST', got {request.get('method')!r}")
    url, body, known = request.get("url"), request.get("body"), endpoints_of(rules.task)
    if url == EMBEDDINGS and url not in known:
        raise _bad(
            "url", f"{url}: the job makes no embeddings (--set stage.task=embed)", "invalid_url"
        )
    if not isinstance(url, str) or url not in known:
        raise _bad("url", f"url must be one of {', '.join(known)}, got {url!r}", "invalid_url")
    if rules.endpoint not in (None, url):
        raise _bad(
            "url", f"the batch is for {rules.endpoint}, but this line is for {url}", "invalid_url"
        )
    if not isinstance(body, dict):
        raise _bad("body", "body is missing" if body is None else "body must be an object")
    values = {key: value for key, value in body.items() if value is not None}
    if values.get("model") not in rules.names:
        raise Refusal(
            f"model must be {' or '.join(map(repr, rules.names))}, got {values.get('model')!r}; "
            "add names with --model-name",
            code="model_not_found",
            param="model",
            status=404,
        )
    return _READERS[url](values, rules)


def _checked(kind: type[_B], body: dict[str, Any], others: tuple[str, ...] = _PASSED) -> _B:
    """Validate a body; raise Refusal for an unknown key or an unsupported value."""
    known = (*kind.model_fields, *_IGNORED, *others)
    for key in body:
        if key not in known:
            hint = f"; use {_NEWER[key]}" if key in _NEWER else did_you_mean(key, known)
            raise _bad(key, f"unknown key {key!r} of the body{hint}", "unknown_parameter")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        refusal = refusal_of(error)
        if refusal.param in _UNSUPPORTED:
            message = f"{refusal.param}={body[refusal.param]!r} is not supported"
            raise _bad(refusal.param, message, "unsupported_parameter") from None
        if refusal.param == "tool_choice":
            message = f"{refusal.message}; this backend cannot force a tool call"
            raise _bad("tool_choice", message, "unsupported_parameter") from None
        raise refusal from None


def _read_chat(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    parsed = _checked(_Chat, body)
    try:
        checked = check_messages(parsed.messages, kinds=None)
        messages = [_with_parsed_calls(message, idx) for idx, message in enumerate(checked)]
        prompt = json.dumps(messages)
    except (InvalidPrompt, RecursionError) as error:
        raise _bad("messages", str(error)) from None
    longest = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    sampling = _sampling(body, rules, rules.chat, longest)
    if parsed.top_logprobs and not parsed.logprobs:
        raise _bad("top_logprobs", "top_logprobs needs logprobs=true")
    return ParsedRequest(
        form=Form("messages", parsed.n, parsed.logprobs),
        prompts=[prompt],
        sampling=sampling,
        template_options=_template_options(parsed, body, rules, ends_with=messages[-1]["role"]),
        reply=Reply(CHAT, parsed.model, parsed.top_logprobs if parsed.logprobs else None),
    )


def _read_completion(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    parsed = _checked(_Completion, body)
    if parsed.best_of not in (None, 1, parsed.n):
        raise _bad("best_of", "best_of must be n; samples are not ranked", "unsupported_parameter")
    kind, prompts = _prompts_of(body, "prompt")
    return ParsedRequest(
        form=Form(kind, parsed.n, parsed.logprobs is not None),
        prompts=prompts,
        sampling=_sampling(body, rules, rules.completions, "max_tokens"),
        reply=Reply(COMPLETIONS, parsed.model, parsed.logprobs),
    )


def _read_embedding(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    parsed = _checked(_Embedding, body, _POOLING)
    try:
        pooling = pooling_of({name: body[name] for name in _POOLING if name in body}).given()
    except ConfigError as error:
        message = str(error).removeprefix("pooling.")
        raise _bad(message.split(" ")[0], message) from None
    kind, prompts = _prompts_of(body, "input")
    return ParsedRequest(
        form=Form(kind, 1, False),
        prompts=prompts,
        sampling=pooling,
        reply=Reply(EMBEDDINGS, parsed.model, encoding=parsed.encoding_format),
    )


_READERS: Mapping[str, Callable[[dict[str, Any], BodyRules], ParsedRequest]] = {
    CHAT: _read_chat,
    COMPLETIONS: _read_completion,
    EMBEDDINGS: _read_embedding,
}


def _template_options(
    parsed: _Chat, body: Mapping[str, Any], rules: BodyRules, *, ends_with: str
) -> dict[str, Any]:
    """Return the options of the chat template: kwargs, tools, reasoning effort, and the end."""
    options = dict(parsed.chat_template_kwargs)
    if parsed.tools and parsed.tool_choice == "auto":
        if not rules.reads_tools:
            message = (
                "the chat template of this model does not render tools; remove tools, or start the "
                "job with a chat_template that does"
            )
            raise _bad("tools", message, "unsupported_parameter")
        options["tools"] = body["tools"]
    if (effort := parsed.reasoning_effort) is not None:
        options.setdefault("enable_thinking", effort != "none")
        if rules.reads_reasoning_effort:
            options["reasoning_effort"] = effort
    is_continued, begins = parsed.continue_final_message, parsed.add_generation_prompt
    if begins is None:
        begins = not is_continued
    if is_continued and begins:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise _bad("continue_final_message", message)
    # stages continue a last message of the assistant by default, OpenAI does not
    if ends_with == "assistant" or is_continued or not begins:
        options |= {"add_generation_prompt": begins, "continue_final_message": is_continued}
    return options


def _sampling(
    body: Mapping[str, Any], rules: BodyRules, defaults: Sampling, longest: str
) -> dict[str, Any]:
    """Return the sampling options of a row; raise Refusal for a bad value.

    `longest` is the key of the body with the maximum output tokens.
    """
    max_tokens = body.get(longest)
    options = {name: body[name] for name in _PASSED if name in body}
    if (constraint := _format(body.get("response_format"))) is not None:
        options["structured_outputs"] = constraint
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    # values of vLLM for all tokens
    if options.get("top_k") in (0, -1):
        del options["top_k"]
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    for name in ("max_tokens", "min_tokens", "top_k", "seed"):
        limit = 1 << (63 if name == "seed" else 31)
        if isinstance(options.get(name), int) and abs(options[name]) >= limit:
            raise _bad(name, f"{name} is out of range: {options[name]}")
    try:
        replace(defaults, **options)
        plain: dict[str, Any] = json.loads(json.dumps(options, allow_nan=False))
    except (ConfigError, ValueError) as error:
        message = str(error).removeprefix("sampling.")
        named = next((name for name in options if message.startswith(name)), None)
        if named == "max_tokens":
            message, named = message.replace(named, longest, 1), longest
        raise Refusal(message, code="invalid_value", param=named) from None
    if plain.get("temperature", 0) > MAX_TEMPERATURE:
        message = f"temperature must be from 0 to {MAX_TEMPERATURE}, got {plain['temperature']}"
        raise _bad("temperature", message)
    if rules.context is not None and plain.get("max_tokens", 0) > rules.context:
        message = f"{longest} must fit in the context of {rules.context} tokens, got {max_tokens}"
        raise _bad(longest, message)
    return plain


def _format(wanted: Any) -> dict[str, Any] | None:  # noqa: ANN401 - any JSON
    """Return the structured output of a response format; None for plain text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    about = wanted.get("json_schema") if kind == "json_schema" else None
    if not isinstance(about, dict) or not isinstance(about.get("schema"), dict):
        message = (
            "response_format must have the type text, json_object or json_schema, the last as "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
        )
        raise _bad("response_format", message)
    return {"json": about["schema"]}


def _prompts_of(body: Mapping[str, Any], key: str) -> tuple[Kind, list[Any]]:
    """Return the kind of the prompts at a key of a body, and the prompts."""
    prompt = body.get(key)
    wanted = f"{key} must be a string, a list of strings, token ids or a list of lists of token ids"
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if not prompts:
        raise _bad(key, f"{wanted}, got an empty list")
    if len(prompts) > MAX_PROMPTS and not isinstance(prompts[0], int):
        raise _bad(key, f"{key} has {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in prompts):
        if any(encodable(text) != text for text in prompts):
            raise _bad(key, f"{key} has an unpaired surrogate")
        return "prompt", prompts
    ids = [prompts] if isinstance(prompt, list) and isinstance(prompt[0], int) else prompts
    if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in ids):
        return "tokens", ids
    raise _bad(key, wanted)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _bad(param: str, message: str, code: str = "invalid_value") -> Refusal:
    return Refusal(message, code=code, param=param)
