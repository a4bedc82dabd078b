"""The body of a request for one row, and the completions in its answer; no network.

Fields that only some servers know (top_k, min_p, ...) are sent only if not at their default:
OpenAI refuses unknown fields.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from raybatch.records.parsed_text import ParsedText, ToolCall
from raybatch.records.payload import POOLING
from raybatch.records.structured_outputs import StructuredOutputs, engine_constraint
from raybatch.records.types import UNBOUNDED_TOKENS, Completion, Request, Sampling, Vector
from raybatch_openai.endpoint.options import OpenAIOptions

# sent in other forms; vLLM and SGLang have further ones than OpenAI
_SENT_APART = ("temperature", "max_tokens", "seed", "n", "logprobs", "structured_outputs")
_LISTS = ("stop", "stop_token_ids")
_PLAIN = [f.name for f in fields(Sampling) if f.name not in (*_SENT_APART, *_LISTS)]
_DEFAULTS = Sampling()
# seeds have 31 bits on every server
_SEED_MASK = (1 << 31) - 1
_LENGTH = ("length", "max_tokens", "max_output_tokens")
_TOKEN_ID = "token_id:"
_MAX_SHOWN = 200


# what to do about a refused field other than removing it
_WAYS = {
    "model": "set the option `model` to a name that the endpoint has",
    "max_tokens": "set max_tokens_field: max_completion_tokens",
    "max_completion_tokens": "set max_tokens_field: max_tokens",
    "seed": "set send_seed: false",
    "tools": "remove the tools of the stage",
}


class BadAnswer(ValueError):  # noqa: N818 - the name is seen in outputs
    """A 2xx response that lacks a required field, or has one of a wrong type."""


def body_of(request: Request, options: OpenAIOptions, model: str) -> tuple[str, dict[str, Any]]:
    """Return (path below `base_url`, JSON body) of the request for a row.

    A prompt without a payload is sent as token ids, which servers such as vLLM accept.
    """
    payload, sampling = request.payload, request.sampling
    body: dict[str, Any] = {"model": model}
    is_chat = "messages" in payload
    if is_chat:
        body |= {name: payload[name] for name in ("tools", "messages") if name in payload}
    elif "prompt" in payload:
        body["prompt"] = payload["prompt"]
    else:
        body["prompt"] = request.prompt_token_ids.tolist()
    if is_bounded := sampling.max_tokens < UNBOUNDED_TOKENS:
        body[options.max_tokens_field if is_chat else "max_tokens"] = sampling.max_tokens
    # the API has another default
    body["temperature"] = sampling.temperature
    for name in _PLAIN:
        if getattr(sampling, name) != getattr(_DEFAULTS, name):
            body[name] = getattr(sampling, name)
    for name in _LISTS:
        if getattr(sampling, name):
            body[name] = list(getattr(sampling, name))
    if sampling.n > 1:
        body["n"] = sampling.n
    if sampling.temperature > 0 and options.send_seed:
        body["seed"] = request.seed & _SEED_MASK
    if sampling.structured_outputs is not None:
        body |= _constraint_fields(str(sampling.structured_outputs))
    if sampling.logprobs is not None and is_chat:
        body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    elif sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
    body = {name: v for name, v in {**body, **options.extra_body}.items() if v is not None}
    if not is_bounded and not is_chat:
        # its default would be 16, unlike in a chat
        body.setdefault("max_tokens", None)
    return "/chat/completions" if is_chat else "/completions", body


def way_out(name: str, options: OpenAIOptions) -> str:
    """Return the advice for an error: what to do about a request field that an endpoint refuses."""
    if options.extra_body.get(name) is not None:
        return "extra_body sets it; remove it there, or change its value"
    if name in _WAYS:
        return _WAYS[name]
    return (
        f"extra_body: {{{name}: null}} removes it, for the model's default; or set it to a "
        "value that the model accepts"
    )


def completions_of(request: Request, answer: object, options: OpenAIOptions) -> list[Completion]:
    """Return one completion per sample from the JSON of a response, or raise BadAnswer."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise BadAnswer(f"the endpoint's answer has no choices: {_shown(answer)}")
    by_index = {_index(choice, place): choice for place, choice in enumerate(choices)}
    if sorted(by_index) != list(range(request.sampling.n)):
        raise BadAnswer(
            f"the endpoint answered with {len(choices)} choices, and the request had "
            f"n={request.sampling.n}"
        )
    samples = [_sample(request, i, by_index[i], options) for i in sorted(by_index)]
    if failed := next((sample for sample in samples if sample.error), None):
        # a row has either an error or samples, and its first sample has the cost
        samples = [replace(failed, sample_idx=sample.sample_idx) for sample in samples]
    assert isinstance(answer, Mapping), "it has choices"
    return with_usage(samples, answer.get("usage"), options)


def _sample(
    request: Request, index: int, choice: Mapping[str, Any], options: OpenAIOptions
) -> Completion:
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        return Completion(
            request_id=request.request_id,
            sample_idx=index,
            finish_reason="error",
            error="ContentFilter: the endpoint's filter removed or cut the answer",
        )
    stop_reason, token_ids = choice.get("stop_reason"), choice.get("token_ids")
    message, text = choice.get("message"), choice.get("text")
    has_logprobs = request.sampling.logprobs is not None
    if isinstance(message, Mapping):
        text = text_of(message, are_calls_apart=options.return_tool_calls)
    elif not isinstance(text, str):
        raise BadAnswer(
            f"a choice of the endpoint's answer has neither a message nor a text: {_shown(choice)}"
        )
    return Completion(
        request_id=request.request_id,
        sample_idx=index,
        text=text,
        token_ids=np.array(token_ids if isinstance(token_ids, list) else [], np.int32),
        finish_reason="length" if reason in _LENGTH else "stop",
        stop_reason=stop_reason if isinstance(stop_reason, str | int) else None,
        logprobs=_logprobs(choice.get("logprobs")) if has_logprobs else None,
        parsed=_parsed(message, options) if isinstance(message, Mapping) else None,
    )


def text_of(message: Mapping[str, Any], *, are_calls_apart: bool = False) -> str:
    """Return the text of a chat message; raise BadAnswer if its content has another form.

    The text of a message of tool calls only is their JSON, or "" with `are_calls_apart`.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(p.get("text") or "") for p in content if isinstance(p, Mapping))
    if content is not None:
        raise BadAnswer(
            f"the content of the endpoint's message is neither a text nor a list: {_shown(content)}"
        )
    if (calls := message.get("tool_calls")) and not are_calls_apart:
        return json.dumps(calls, ensure_ascii=False)
    return str(message.get("refusal") or "")


def _parsed(message: Mapping[str, Any], options: OpenAIOptions) -> ParsedText | None:
    """Return reasoning and tool calls of a message, under any server's names."""
    reasoning, calls = None, message.get("tool_calls")
    if options.return_reasoning:
        reasoning = message.get("reasoning") or message.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning = None
    if not options.return_tool_calls or not isinstance(calls, list):
        calls = []
    if not calls and reasoning is None:
        return None
    return ParsedText(reasoning=reasoning, tool_calls=tuple(map(_tool_call, calls)))


def _tool_call(call: object) -> ToolCall:
    known = call if isinstance(call, Mapping) else {}
    function = known.get("function")
    if not isinstance(function, Mapping):
        # keep all paid output
        function = {"name": known.get("type"), "arguments": call}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    name = function.get("name")
    return ToolCall(id=str(known.get("id") or ""), name=str(name or ""), arguments=arguments)


def with_usage(
    samples: Sequence[Completion], usage: object, options: OpenAIOptions | None = None
) -> list[Completion]:
    """Return the samples of one response with their token counts and cost.

    `usage` of the response counts all samples together: its output tokens are split by the samples'
    lengths; its input tokens and the cost go to the first sample.
    """
    counts = usage if isinstance(usage, Mapping) else {}
    num_input, num_output = _count(counts, "prompt_tokens"), _count(counts, "completion_tokens")
    details = counts.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, Mapping) else None
    num_cached = cached or 0
    cost = None
    if options is not None and options.has_prices and num_input is not None:
        cost = options.cost(num_input, num_cached, num_output or 0)
    shares = zip(samples, _shares(num_output, samples), strict=True)
    first, *others = [replace(sample, num_generated_tokens=share) for sample, share in shares]
    first = replace(first, num_input_tokens=num_input, num_cached_tokens=num_cached, cost=cost)
    return [first, *others]


def _shares(total: int | None, samples: Sequence[Completion]) -> list[int | None]:
    """Split a sum of tokens over samples by text lengths; exact if there are token ids."""
    if total is None:
        return [None] * len(samples)
    if len(samples) == 1:
        return [total]
    if all(len(sample.token_ids) for sample in samples):
        return [len(sample.token_ids) for sample in samples]
    weights = np.array([1 + len((sample.text or "").encode()) for sample in samples], np.float64)
    ends = np.rint(np.cumsum(weights) / weights.sum() * total).astype(np.int64)
    return [int(share) for share in np.diff(ends, prepend=0)]


def _constraint_fields(text: str) -> dict[str, Any]:
    """Return the fields for a constraint: OpenAI's if it has one, else vLLM's."""
    constraint = StructuredOutputs.parse(text)
    if constraint.json is not None:
        schema = {"name": "answer", "strict": True, "schema": json.loads(constraint.json)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if constraint.json_object:
        return {"response_format": {"type": "json_object"}}
    return {"structured_outputs": engine_constraint(text)}


def _logprobs(reported: object) -> Any:  # noqa: ANN401 - as `Completion.logprobs`
    """Return the log probabilities of each token, the sampled one first.

    Servers name tokens by text, or as "token_id:7" if configured; for texts, ids are empty.
    """
    if not isinstance(reported, Mapping):
        return None
    if isinstance(content := reported.get("content"), list):
        tokens, values = [e["token"] for e in content], [e["logprob"] for e in content]
        ranked = [entry.get("top_logprobs") or () for entry in content]
        tops = [{each["token"]: each["logprob"] for each in top} for top in ranked]
    else:
        tokens, values = reported.get("tokens") or [], reported.get("token_logprobs") or []
        tops = [dict(top or {}) for top in reported.get("top_logprobs") or [None] * len(tokens)]
    places = zip(tokens, values, tops, strict=False)
    # the sampled token first, with its own value even if it is among the top ones
    return tuple(_pair({token: v} | top | {token: v}) for token, v, top in places)


def _pair(entry: Mapping[str, float]) -> tuple[Any, Any]:
    numbers = [name.removeprefix(_TOKEN_ID) for name in entry if name.startswith(_TOKEN_ID)]
    is_by_id = len(numbers) == len(entry) and all(number.isdigit() for number in numbers)
    token_ids = np.array([int(number) for number in numbers] if is_by_id else [], np.int32)
    return token_ids, np.array([np.nan if v is None else v for v in entry.values()], np.float32)


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return value if is_count else None


def _index(choice: object, place: int) -> int:
    if not isinstance(choice, Mapping):
        raise BadAnswer(f"a choice of the endpoint's answer is not an object: {_shown(choice)}")
    index = choice.get("index", place)
    return index if isinstance(index, int) else place


def _shown(value: object) -> str:
    return json.dumps(value, default=repr)[:_MAX_SHOWN]


def embedding_body(
    request: Request, options: OpenAIOptions, model: str
) -> tuple[str, dict[str, Any]]:
    """Return (path below `base_url`, JSON body) of an embedding request, as `body_of` does.

    It has the pooling options that the row sets: `dimensions` is OpenAI's, the others are vLLM's.
    """
    payload = request.payload
    body: dict[str, Any] = {
        "model": model,
        "input": payload.get("prompt") or request.prompt_token_ids.tolist(),
        # a third of the bytes
        "encoding_format": "base64",
        **payload.get(POOLING, {}),
        **options.extra_body,
    }
    return "/embeddings", {name: value for name, value in body.items() if value is not None}


def embedding_of(request: Request, answer: object, options: OpenAIOptions) -> list[Completion]:
    """Return a list of one completion, with the vector of a response, or raise BadAnswer."""
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, Sequence) or len(data) != 1 or not isinstance(data[0], Mapping):
        raise BadAnswer(
            f"the endpoint's answer does not have exactly one embedding: {_shown(answer)}"
        )
    completion = Completion(
        request_id=request.request_id,
        sample_idx=0,
        finish_reason="stop",
        vector=read_vector(data[0].get("embedding")),
    )
    assert isinstance(answer, Mapping), "it has data"
    return with_usage([completion], answer.get("usage"), options)


def read_vector(value: object) -> Vector:
    """Return an embedding, a list of numbers or base64, as float32 [D]; or raise BadAnswer."""
    try:
        if isinstance(value, str):
            vector = np.frombuffer(base64.b64decode(value, validate=True), "<f4")
        else:
            vector = np.array(value, np.float32)
    except (binascii.Error, ValueError, TypeError):
        raise BadAnswer(
            f"the endpoint's embedding is neither a list of numbers nor base64: {_shown(value)}"
        ) from None
    if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
        raise BadAnswer(
            f"the endpoint's embedding is not a list of finite numbers: {_shown(value)}"
        )
    return vector.astype(np.float32, copy=False)
