"""From the body of a request to rows; what cannot be done is refused by the name of its key."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from raybatch.errors import ConfigError, did_you_mean
from raybatch.openai_batch.requests import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Form,
    Kind,
    ParsedRequest,
    Refusal,
    Reply,
    endpoints_of,
    is_encodable,
)
from raybatch.records.pooling import pooling_of
from raybatch.records.types import Sampling, Task
from raybatch.rows.row_options import RENAMED
from raybatch.text.chat import InvalidPrompt, check_messages
from raybatch.text.chat import with_parsed_calls as _with_parsed_calls

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_PROMPTS = 2048
MAX_TEMPERATURE = 2
# what most clients leave to the server
COMPLETION_TOKENS = 16

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# they change no answer
_LABELS = ("metadata", "safety_identifier", "service_tier", "store", "user")
_CACHE_KEYS = ("prompt_cache_key", "prompt_cache_retention")
_IGNORED = (*_LABELS, *_CACHE_KEYS, "parallel_tool_calls", "stream_options")
# key to the values that ask for nothing
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
_NEWER = {**RENAMED, "functions": "tools", "function_call": "tool_choice"}
# of OpenAI, of vLLM and of other servers; what is left out has rules of its own
_PASSED = tuple(
    option.name for option in fields(Sampling) if option.name not in ("max_tokens", "n", "logprobs")
)
# of embeddings; all but the first are of vLLM
_POOLING = ("dimensions", "normalize", "use_activation")
_COMMON = (*_PASSED, *_IGNORED, "model", "max_tokens", "n", "logprobs", "stream", "logit_bias")
_CHAT_INPUTS = ("messages", "chat_template_kwargs", "modalities", "tools", "tool_choice")
_CHAT_OPTIONS = ("max_completion_tokens", "reasoning_effort", "response_format", "top_logprobs")
_CHAT_ENDS = ("add_generation_prompt", "continue_final_message")
_CHAT_KEYS = (*_COMMON, *_CHAT_INPUTS, *_CHAT_OPTIONS, *_CHAT_ENDS)
_EMBEDDING_KEYS = (*_IGNORED, "model", "input", "encoding_format", *_POOLING)
_COMPLETION_KEYS = (*_COMMON, "best_of", "echo", "prompt", "suffix")


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyRules:
    """What requests may ask of the job that answers them."""

    names: tuple[str, ...]  # of the model, as bodies may write them
    endpoint: str | None = None  # the only one that requests may name
    reads_tools: bool = False  # the chat template has a place for them
    reads_reasoning_effort: bool = False
    context: int | None = None  # of the model; None knows no limit
    chat: Sampling = field(default_factory=Sampling)  # of a request that says nothing
    completions: Sampling = field(default_factory=Sampling)
    task: Task = "generate"


def read_request(request: Mapping[str, Any], rules: BodyRules) -> ParsedRequest:
    """Return what the object of a line asks, whose `custom_id` is fine; raise Refusal."""
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
            "url", f"the batch is for {rules.endpoint}, and this line asks for {url}", "invalid_url"
        )
    if not isinstance(body, dict):
        raise _bad("body", "body is missing" if body is None else "body must be an object")
    values = {key: value for key, value in body.items() if value is not None}
    if values.get("model") not in rules.names:
        raise Refusal(
            f"model must be {' or '.join(map(repr, rules.names))}, got {values.get('model')!r}; "
            "--model-name adds names",
            code="model_not_found",
            param="model",
            status=404,
        )
    return _READERS[url](values, rules)


def _read_chat(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    _check_keys(body, _CHAT_KEYS)
    try:
        checked = check_messages(body.get("messages"), kinds=None)
        messages = [_with_parsed_calls(message, idx) for idx, message in enumerate(checked)]
        prompt = json.dumps(messages)
    except (InvalidPrompt, RecursionError) as error:
        raise _bad("messages", str(error)) from None
    longest = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    sampling = _sampling(body, rules, rules.chat, longest)
    has_logprobs = _flag(body, "logprobs")
    num_logprobs = _whole(body, "top_logprobs", 0, MAX_LOGPROBS, default=0)
    if num_logprobs and not has_logprobs:
        raise _bad("top_logprobs", "top_logprobs needs logprobs=true")
    return ParsedRequest(
        form=Form("messages", _num_samples(body), has_logprobs),
        prompts=[prompt],
        sampling=sampling,
        template_options=_template_options(body, rules, ends_with=messages[-1]["role"]),
        reply=Reply(CHAT, body["model"], num_logprobs if has_logprobs else None),
    )


def _read_completion(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    _check_keys(body, _COMPLETION_KEYS)
    num_samples = _num_samples(body)
    if body.get("best_of", num_samples) not in (1, num_samples):
        raise _bad("best_of", "best_of must be n; samples are not ranked", "unsupported_parameter")
    has_logprobs = "logprobs" in body
    num_logprobs = _whole(body, "logprobs", 0, MAX_LOGPROBS, default=0) if has_logprobs else None
    kind, prompts = _prompts_of(body, "prompt")
    return ParsedRequest(
        form=Form(kind, num_samples, has_logprobs),
        prompts=prompts,
        sampling=_sampling(body, rules, rules.completions, "max_tokens"),
        reply=Reply(COMPLETIONS, body["model"], num_logprobs),
    )


def _read_embedding(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    _check_keys(body, _EMBEDDING_KEYS)
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise _bad("encoding_format", f"encoding_format must be float or base64, got {encoding!r}")
    try:
        pooling = pooling_of({name: body[name] for name in _POOLING if name in body}).given()
    except ConfigError as error:
        message = str(error).removeprefix("pooling.")
        raise Refusal(message, code="invalid_value", param=message.split(" ")[0]) from None
    kind, prompts = _prompts_of(body, "input")
    return ParsedRequest(
        form=Form(kind, 1, False),
        prompts=prompts,
        sampling=pooling,
        reply=Reply(EMBEDDINGS, body["model"], encoding=encoding),
    )


_READERS: Mapping[str, Callable[[dict[str, Any], BodyRules], ParsedRequest]] = {
    CHAT: _read_chat,
    COMPLETIONS: _read_completion,
    EMBEDDINGS: _read_embedding,
}


def _template_options(
    body: Mapping[str, Any], rules: BodyRules, *, ends_with: str
) -> dict[str, Any]:
    """Return what a body tells the chat template: its options, the effort, the tools, the end."""
    options = body.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        message = f"chat_template_kwargs must be an object, got {options!r}"
        raise _bad("chat_template_kwargs", message)
    options = {**options, **_read_tools(body, is_read=rules.reads_tools)}
    if (effort := body.get("reasoning_effort")) is not None:
        if effort not in _EFFORTS:
            message = f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got {effort!r}"
            raise _bad("reasoning_effort", message)
        options.setdefault("enable_thinking", effort != "none")
        if rules.reads_reasoning_effort:
            options["reasoning_effort"] = effort
    is_continued = _flag(body, "continue_final_message")
    begins = _flag(body, "add_generation_prompt", default=not is_continued)
    if is_continued and begins:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise _bad("continue_final_message", message)
    # elsewhere a last message of the assistant is continued
    if ends_with == "assistant" or is_continued or not begins:
        options |= {"add_generation_prompt": begins, "continue_final_message": is_continued}
    return options


def _sampling(
    body: Mapping[str, Any], rules: BodyRules, defaults: Sampling, longest: str
) -> dict[str, Any]:
    """Return the options of a body that are options of a row; raise Refusal for a bad value.

    `longest` is the key that says how long the answer may be.
    """
    max_tokens = body.get(longest)
    options = {name: body[name] for name in _PASSED if name in body}
    if (constraint := _format(body.get("response_format"))) is not None:
        options["structured_outputs"] = constraint
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    # all tokens, as vLLM writes it
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
    """Return what a response format says of an answer; None where that is nothing."""
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


def _num_samples(body: Mapping[str, Any]) -> int:
    return _whole(body, "n", 1, MAX_SAMPLES, default=1)


def _prompts_of(body: Mapping[str, Any], key: str) -> tuple[Kind, list[Any]]:
    """Return the kind of the prompts below a key, and each prompt that it holds."""
    prompt = body.get(key)
    wanted = f"{key} must be a text, a list of texts, token ids or a list of lists of token ids"
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts:
        raise _bad(key, f"{wanted}, got an empty list")
    if len(prompts) > MAX_PROMPTS and not isinstance(prompts[0], int):
        raise _bad(key, f"{key} holds {len(prompts)} prompts, {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in prompts):
        if not all(map(is_encodable, prompts)):
            raise _bad(key, f"{key} holds half of a surrogate pair")
        return "prompt", prompts
    ids = [prompts] if isinstance(prompt, list) and isinstance(prompt[0], int) else prompts
    if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in ids):
        return "tokens", ids
    raise _bad(key, wanted)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _check_keys(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise Refusal for a key that is unknown, or has a value that cannot be had."""
    for key, value in body.items():
        if key not in known:
            hint = f"; it is {_NEWER[key]} now" if key in _NEWER else did_you_mean(key, known)
            raise _bad(key, f"unknown key {key!r} of the body{hint}", "unknown_parameter")
        if key in _ONLY and value not in _ONLY[key]:
            raise _bad(key, f"{key}={value!r} is not supported", "unsupported_parameter")


def _flag(body: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise _bad(key, f"{key} must be true or false, got {value!r}")
    return value


def _whole(body: Mapping[str, Any], key: str, least: int, most: int, *, default: int) -> int:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _bad(key, f"{key} must be a whole number from {least} to {most}, got {value!r}")
    return value


def _bad(param: str, message: str, code: str = "invalid_value") -> Refusal:
    return Refusal(message, code=code, param=param)


def _read_tools(body: Mapping[str, Any], *, is_read: bool) -> dict[str, Any]:
    """Return the options of the chat template that tell it the tools."""
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise _bad("tools", 'tools: each must be {"type": "function", "function": {"name": ...}}')
    if choice not in ("auto", "none"):
        message = (
            f"tool_choice must be 'auto' or 'none', got {choice!r}; this backend cannot force a "
            "tool call"
        )
        raise _bad("tool_choice", message, "unsupported_parameter")
    if not tools or choice == "none":
        return {}
    if not is_read:
        message = (
            "the chat template of this model has no place for tools; leave tools out, or start the "
            "job with a chat_template that writes them"
        )
        raise _bad("tools", message, "unsupported_parameter")
    return {"tools": tools}


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    has_name = isinstance(function, dict) and isinstance(function.get("name"), str)
    return has_name and isinstance(tool, dict) and tool.get("type") == "function"
