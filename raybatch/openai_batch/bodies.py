"""From the body of a request to rows; what cannot be done is refused by the name of its key."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raybatch.errors import ConfigError
from raybatch.openai_batch.body_values import (
    IGNORED,
    bad,
    check_keys,
    flag,
    is_id,
    prompts_of,
    read_tools,
    whole,
    with_parsed_calls,
)
from raybatch.openai_batch.requests import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Form,
    ParsedRequest,
    Refusal,
    Reply,
    endpoints_of,
)
from raybatch.records.pooling import pooling_of
from raybatch.records.types import Sampling, Task

MAX_SAMPLES = 128
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
# of embeddings; all but the first are of vLLM
_POOLING = ("dimensions", "normalize", "use_activation")
_COMMON = (*_PASSED, *IGNORED, "model", "max_tokens", "n", "logprobs", "stream", "logit_bias")
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
_EMBEDDING_KEYS = (*IGNORED, "model", "input", "encoding_format", *_POOLING)
_COMPLETION_KEYS = (*_COMMON, "best_of", "echo", "prompt", "suffix")


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyRules:
    """What requests may ask of the job that answers them.

    Args:
        names: of the model, as bodies may write them.
        endpoint: the only one that requests may name; None takes all.
        reads_tools: the chat template has a place for tools.
        chat: options of a chat request that says nothing.
        completions: of a completion request that says nothing.
    """

    names: tuple[str, ...]
    endpoint: str | None = None
    reads_tools: bool = False
    reads_reasoning_effort: bool = False
    chat: Sampling = field(default_factory=Sampling)
    completions: Sampling = field(default_factory=Sampling)
    task: Task = "generate"


def read_request(request: Mapping[str, Any], rules: BodyRules) -> ParsedRequest:
    """Return what the object of a line asks, whose `custom_id` is fine.

    Raises:
        Refusal: it cannot be answered.
    """
    unknown = [key for key in request if key not in ("custom_id", "method", "url", "body")]
    if unknown:
        raise bad(unknown[0], f"unknown key {unknown[0]!r} of the request", "unknown_parameter")
    if request.get("method") != "POST":
        raise bad("method", f"method must be 'POST', got {request.get('method')!r}")
    read = _reader(request.get("url"), rules)
    body = request.get("body")
    if not isinstance(body, dict):
        raise bad("body", f"body must be an object, got {type(body).__name__}")
    values = {key: value for key, value in body.items() if value is not None}
    _check_model(values.get("model"), rules)
    return read(values, rules)


def _reader(url: object, rules: BodyRules) -> Callable[[dict[str, Any], BodyRules], ParsedRequest]:
    known = endpoints_of(rules.task)
    if url == EMBEDDINGS and url not in known:
        raise bad("url", f"{url}: the job makes no embeddings (--set stage.task=embed)", "bad_url")
    if not isinstance(url, str) or url not in known:
        raise bad("url", f"url must be one of {', '.join(known)}, got {url!r}", "invalid_url")
    if rules.endpoint not in (None, url):
        raise bad("url", f"the batch is for {rules.endpoint}, the line asks {url}", "bad_url")
    return _READERS[url]


def _check_model(name: object, rules: BodyRules) -> None:
    if name not in rules.names:
        raise Refusal(
            f"model must name the model of the job ({', '.join(rules.names)}), got {name!r}; "
            "--model-name gives it further names",
            code="model_not_found",
            param="model",
            status=404,
        )


def _read_chat(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    check_keys(body, _CHAT_KEYS)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "messages must be a list of at least one message")
    template = body.get("chat_template_kwargs", {})
    if not isinstance(template, dict):
        raise bad(
            "chat_template_kwargs", f"chat_template_kwargs must be an object, got {template!r}"
        )
    template = {**template, **read_tools(body, is_read=rules.reads_tools)}
    if (effort := body.get("reasoning_effort")) is not None and rules.reads_reasoning_effort:
        template["reasoning_effort"] = effort
    sampling = _sampling(
        body, rules.chat, body.get("max_completion_tokens", body.get("max_tokens"))
    )
    has_logprobs = flag(body, "logprobs")
    num_logprobs = whole(body, "top_logprobs", 0, MAX_LOGPROBS, default=0)
    if num_logprobs and not has_logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs=true")
    return ParsedRequest(
        form=Form("messages", _num_samples(body), has_logprobs),
        prompts=[json.dumps([with_parsed_calls(message) for message in messages])],
        sampling=sampling,
        template_options=template,
        reply=Reply(CHAT, body["model"], num_logprobs if has_logprobs else None),
    )


def _read_completion(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    check_keys(body, _COMPLETION_KEYS)
    num_samples = _num_samples(body)
    if body.get("best_of", num_samples) not in (1, num_samples):
        raise bad("best_of", "best_of must be n; samples are not ranked", "unsupported_parameter")
    num_logprobs: int | None = None
    if "logprobs" in body:
        num_logprobs = whole(body, "logprobs", 0, MAX_LOGPROBS, default=0)
    kind, prompts = prompts_of(body, "prompt")
    return ParsedRequest(
        form=Form(kind, num_samples, num_logprobs is not None),
        prompts=prompts,
        sampling=_sampling(body, rules.completions, body.get("max_tokens")),
        template_options={},
        reply=Reply(COMPLETIONS, body["model"], num_logprobs),
    )


def _read_embedding(body: dict[str, Any], rules: BodyRules) -> ParsedRequest:
    check_keys(body, _EMBEDDING_KEYS)
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise bad("encoding_format", f"encoding_format must be float or base64, got {encoding!r}")
    try:
        pooling = pooling_of({name: body[name] for name in _POOLING if name in body}).given()
    except ConfigError as error:
        message = str(error).removeprefix("pooling.")
        raise Refusal(message, code="invalid_value", param=message.split(" ")[0]) from None
    kind, prompts = prompts_of(body, "input")
    return ParsedRequest(
        form=Form(kind, 1, False),
        prompts=prompts,
        sampling=pooling,
        template_options={},
        reply=Reply(EMBEDDINGS, body["model"], encoding=encoding),
    )


_READERS: Mapping[str, Callable[[dict[str, Any], BodyRules], ParsedRequest]] = {
    CHAT: _read_chat,
    COMPLETIONS: _read_completion,
    EMBEDDINGS: _read_embedding,
}


def _sampling(body: Mapping[str, Any], defaults: Sampling, max_tokens: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the options of a body that are options of a row; raise Refusal for a bad value."""
    options = {name: body[name] for name in _PASSED if name in body}
    if (constraint := _format(body.get("response_format"))) is not None:
        options["structured_outputs"] = constraint
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    ids = options.get("stop_token_ids", [])
    if not isinstance(ids, list) or not all(map(is_id, ids)):
        raise bad("stop_token_ids", f"stop_token_ids must be a list of token ids, got {ids!r}")
    # all tokens, as vLLM writes it
    if options.get("top_k") in (0, -1):
        del options["top_k"]
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    for name in ("max_tokens", "min_tokens", "top_k", "seed"):
        limit = 1 << (63 if name == "seed" else 31)
        if isinstance(options.get(name), int) and abs(options[name]) >= limit:
            raise bad(name, f"{name} is out of range: {options[name]}")
    try:
        replace(defaults, **options)
        return json.loads(json.dumps(options, allow_nan=False))  # type: ignore[no-any-return]
    except (ConfigError, ValueError) as error:
        message = str(error).removeprefix("sampling.")
        named = next((name for name in options if message.startswith(name)), None)
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
        raise bad(
            "response_format",
            "response_format must have the type text, json_object, or json_schema with its schema",
        )
    return {"json": about["schema"]}


def _num_samples(body: Mapping[str, Any]) -> int:
    return whole(body, "n", 1, MAX_SAMPLES, default=1)
