"""Values below the keys of a body, checked; what is wrong is refused by the name of its key."""

import json
from collections.abc import Mapping
from typing import Any

from raybatch.errors import did_you_mean
from raybatch.openai_batch.requests import Refusal

MAX_PROMPTS = 2048

# they change no answer
IGNORED = (
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


def prompts_of(body: Mapping[str, Any], key: str) -> tuple[Any, list[Any]]:
    """Return the kind of the prompts below a key, and each prompt that it holds."""
    prompt = body.get(key)
    wanted = f"{key} must be a text, a list of texts, token ids or a list of lists of token ids"
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts:
        raise bad(key, f"{wanted}, got an empty list")
    if len(prompts) > MAX_PROMPTS and not isinstance(prompts[0], int):
        raise bad(key, f"{key} holds {len(prompts)} prompts, {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in prompts):
        if not all(map(_is_encodable, prompts)):
            raise bad(key, f"{key} holds half of a surrogate pair")
        return "prompt", prompts
    ids = [prompts] if isinstance(prompt, list) and isinstance(prompt[0], int) else prompts
    if all(isinstance(item, list) and item and all(map(is_id, item)) for item in ids):
        return "tokens", ids
    raise bad(key, wanted)


def is_id(value: object) -> bool:
    """Return whether a value may be the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_keys(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise Refusal for a key that is unknown, or has a value that cannot be had."""
    for key, value in body.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise bad(key, f"unknown key {key!r} of the body{hint}", "unknown_parameter")
        if key in _ONLY and value not in _ONLY[key]:
            raise bad(key, f"{key}={value!r} is not supported", "unsupported_parameter")


def flag(body: Mapping[str, Any], key: str) -> bool:
    """Return a value that is true or false, false where it is not there."""
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise bad(key, f"{key} must be true or false, got {value!r}")
    return value


def whole(body: Mapping[str, Any], key: str, least: int, most: int, *, default: int) -> int:
    """Return a whole number in a range."""
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise bad(key, f"{key} must be a whole number from {least} to {most}, got {value!r}")
    return value


def bad(param: str, message: str, code: str = "invalid_value") -> Refusal:
    """Return why the value of a key cannot be had."""
    return Refusal(message, code=code, param=param)


def read_tools(body: Mapping[str, Any], *, is_read: bool) -> dict[str, Any]:
    """Return the options of the chat template that tell it the tools.

    Raises:
        Refusal: they are malformed, or the model must be held to one, or cannot be shown any.
    """
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise bad("tools", "tools must be a list of functions with a name")
    if choice not in ("auto", "none"):
        raise bad(
            "tool_choice",
            f"tool_choice must be 'auto' or 'none', got {choice!r}; the backend of this job cannot "
            "hold an answer to a call",
            "unsupported_parameter",
        )
    if not tools or choice == "none":
        return {}
    if not is_read:
        message = "the chat template of this model has no place for tools"
        raise bad("tools", message, "unsupported_parameter")
    return {"tools": tools}


def with_parsed_calls(message: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a message with the arguments of its calls as objects, as templates expect them."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_parsed_arguments(call) for call in calls]}


def _with_parsed_arguments(call: Any) -> Any:  # noqa: ANN401
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return (
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(function, dict)
        and isinstance(function.get("name"), str)
    )
