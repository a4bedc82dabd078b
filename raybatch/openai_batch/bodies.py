"""From the body of a request to rows; what cannot be done is refused by the name of its key."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raybatch.errors import ConfigError, did_you_mean
from raybatch.openai_batch.refusal import Refusal
from raybatch.openai_batch.requests import CHAT, COMPLETIONS, EMBEDDINGS, Asked, Form, Reply
from raybatch.openai_batch.tool_options import read_tools, with_parsed_calls
from raybatch.types import Sampling

__all__ = ["BodyRules", "read_request"]

MAX_SAMPLES = 128
MAX_PROMPTS = 2048
MAX_LOGPROBS = 20
# what most clients leave to the server
COMPLETION_TOKENS = 16

_PASSED = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    # of vLLM and other servers
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
)
# they change no answer
_IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
)
# key to the values that ask for nothing
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
_COMMON = (*_PASSED, *_IGNORED, "model", "max_tokens", "n", "logprobs", "stream", "logit_bias")
_CHAT_KEYS = (
    *_COMMON,
    "chat_template_kwargs",
    "max_completion_tokens",
    "messages",
    "modalities",
    "reasoning_effort",
    "response_format",
    "tool_choice",
    "tools",
    "top_logprobs",
)
_COMPLETION_KEYS = (*_COMMON, "best_of", "echo", "prompt", "suffix")


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyRules:
    """What requests may ask of the job that answers them.

    Args:
        names: of the model, as bodies may write them.
        endpoint: the only one that may be asked; None takes all that there are.
        reads_tools: the chat template has a place for tools.
        reads_reasoning_effort: and for `reasoning_effort`.
        chat: options of a chat request that says nothing.
        completions: of a completion request that says nothing.
    """

    names: tuple[str, ...]
    endpoint: str | None = None
    reads_tools: bool = False
    reads_reasoning_effort: bool = False
    chat: Sampling = field(default_factory=Sampling)
    completions: Sampling = field(default_factory=Sampling)


def read_request(request: Mapping[str, Any], rules: BodyRules) -> Asked:
    """Return what a request asks.

    Args:
        request: object of a line, whose `custom_id` is fine.
        rules: of the job.

    Raises:
        Refusal: it cannot be answered.
    """
    unknown = [key for key in request if key not in ("custom_id", "method", "url", "body")]
    if unknown:
        raise _bad(unknown[0], f"unknown key {unknown[0]!r} of the request", "unknown_parameter")
    if request.get("method") != "POST":
        raise _bad("method", f"method must be 'POST', got {request.get('method')!r}")
    read = _reader(request.get("url"), rules)
    body = request.get("body")
    if not isinstance(body, dict):
        raise _bad("body", f"body must be an object, got {type(body).__name__}")
    given = {key: value for key, value in body.items() if value is not None}
    _check_model(given.get("model"), rules)
    return read(given, rules)


def _reader(url: object, rules: BodyRules) -> Callable[[dict[str, Any], BodyRules], Asked]:
    readers = {CHAT: _read_chat, COMPLETIONS: _read_completion}
    if url == EMBEDDINGS:
        raise _bad("url", f"{EMBEDDINGS}: the backend of this job makes no embeddings", "bad_url")
    if not isinstance(url, str) or url not in readers:
        raise _bad("url", f"url must be one of {', '.join(readers)}, got {url!r}", "invalid_url")
    if rules.endpoint not in (None, url):
        raise _bad("url", f"the batch is for {rules.endpoint}, the line asks {url}", "bad_url")
    return readers[url]


def _check_model(name: object, rules: BodyRules) -> None:
    if name not in rules.names:
        raise Refusal(
            f"model must name the model of the job ({', '.join(rules.names)}), got {name!r}; "
            "--model-name gives it further names",
            code="model_not_found",
            param="model",
            status=404,
        )


def _read_chat(body: dict[str, Any], rules: BodyRules) -> Asked:
    _check_keys(body, _CHAT_KEYS)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "messages must be a list of at least one message")
    template = body.get("chat_template_kwargs", {})
    if not isinstance(template, dict):
        raise _bad(
            "chat_template_kwargs", f"chat_template_kwargs must be an object, got {template!r}"
        )
    template = {**template, **read_tools(body, is_read=rules.reads_tools)}
    if (effort := body.get("reasoning_effort")) is not None and rules.reads_reasoning_effort:
        template["reasoning_effort"] = effort
    sampling = _sampling(
        body, rules.chat, body.get("max_completion_tokens", body.get("max_tokens"))
    )
    has_logprobs = _flag(body, "logprobs")
    num_logprobs = _whole(body, "top_logprobs", 0, MAX_LOGPROBS, default=0)
    if num_logprobs and not has_logprobs:
        raise _bad("top_logprobs", "top_logprobs needs logprobs=true")
    return Asked(
        form=Form("messages", _num_samples(body), has_logprobs),
        prompts=[json.dumps([with_parsed_calls(message) for message in messages])],
        sampling=sampling,
        template_options=template,
        reply=Reply(CHAT, body["model"], num_logprobs if has_logprobs else None),
    )


def _read_completion(body: dict[str, Any], rules: BodyRules) -> Asked:
    _check_keys(body, _COMPLETION_KEYS)
    num_samples = _num_samples(body)
    if body.get("best_of", num_samples) not in (1, num_samples):
        raise _bad("best_of", "best_of must be n; samples are not ranked", "unsupported_parameter")
    num_logprobs: int | None = None
    if "logprobs" in body:
        num_logprobs = _whole(body, "logprobs", 0, MAX_LOGPROBS, default=0)
    kind, prompts = _prompts(body.get("prompt"))
    return Asked(
        form=Form(kind, num_samples, num_logprobs is not None),
        prompts=prompts,
        sampling=_sampling(body, rules.completions, body.get("max_tokens")),
        template_options={},
        reply=Reply(COMPLETIONS, body["model"], num_logprobs),
    )


def _prompts(prompt: object) -> tuple[Any, list[Any]]:
    """Return the kind of a prompt of a completion, and each prompt that it holds."""
    wanted = "prompt must be a text, a list of texts, token ids or a list of lists of token ids"
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts:
        raise _bad("prompt", f"{wanted}, got an empty list")
    if len(prompts) > MAX_PROMPTS and not isinstance(prompts[0], int):
        raise _bad("prompt", f"prompt holds {len(prompts)} prompts, {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in prompts):
        if not all(map(_is_encodable, prompts)):
            raise _bad("prompt", "prompt holds half of a surrogate pair")
        return "prompt", prompts
    ids = [prompts] if isinstance(prompt, list) and isinstance(prompt[0], int) else prompts
    if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in ids):
        return "tokens", ids
    raise _bad("prompt", wanted)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_keys(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key, value in body.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise _bad(key, f"unknown key {key!r} of the body{hint}", "unknown_parameter")
        if key in _ONLY and value not in _ONLY[key]:
            raise _bad(key, f"{key}={value!r} is not supported", "unsupported_parameter")


def _sampling(body: Mapping[str, Any], defaults: Sampling, max_tokens: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the options of a body that are options of a row; raise Refusal for a bad value."""
    found = {name: body[name] for name in _PASSED if name in body}
    if (constraint := _format(body.get("response_format"))) is not None:
        found["structured_outputs"] = constraint
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    ids = found.get("stop_token_ids", [])
    if not isinstance(ids, list) or not all(map(_is_id, ids)):
        raise _bad("stop_token_ids", f"stop_token_ids must be a list of token ids, got {ids!r}")
    # all tokens, as vLLM writes it
    if found.get("top_k") in (0, -1):
        del found["top_k"]
    if max_tokens is not None:
        found["max_tokens"] = max_tokens
    for name in ("max_tokens", "min_tokens", "top_k", "seed"):
        limit = 1 << (63 if name == "seed" else 31)
        if isinstance(found.get(name), int) and abs(found[name]) >= limit:
            raise _bad(name, f"{name} is out of range: {found[name]}")
    try:
        replace(defaults, **found)
        return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]
    except (ConfigError, ValueError) as error:
        message = str(error).removeprefix("Sampling.")
        named = next((name for name in found if message.startswith(name)), None)
        raise Refusal(message, code="invalid_value", param=named) from None


def _format(wanted: Any) -> dict[str, Any] | None:  # noqa: ANN401 - any JSON
    """Return what a response format says of an answer; None where that is nothing."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    about = wanted.get("json_schema") if kind == "json_schema" else None
    if not isinstance(about, dict) or not isinstance(about.get("schema"), dict):
        raise _bad(
            "response_format",
            "response_format must have the type text, json_object, or json_schema with its schema",
        )
    return {"json": about["schema"]}


def _num_samples(body: Mapping[str, Any]) -> int:
    return _whole(body, "n", 1, MAX_SAMPLES, default=1)


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key, False)
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
