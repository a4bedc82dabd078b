"""Tools and their calls in a chat request, as the chat template is shown them."""

import json
from collections.abc import Mapping
from typing import Any

from raybatch.openai_batch.refusal import Refusal


def read_tools(body: Mapping[str, Any], *, is_read: bool) -> dict[str, Any]:
    """Return the options of the chat template that tell it the tools.

    Raises:
        Refusal: they are malformed, or the model must be held to one, or cannot be shown any.
    """
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise _refused("tools", "tools must be a list of functions with a name", "invalid_value")
    if choice not in ("auto", "none"):
        raise _refused(
            "tool_choice",
            f"tool_choice must be 'auto' or 'none', got {choice!r}; the backend of this job cannot "
            "hold an answer to a call",
        )
    if not tools or choice == "none":
        return {}
    if not is_read:
        raise _refused("tools", "the chat template of this model has no place for tools")
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


def _refused(param: str, message: str, code: str = "unsupported_parameter") -> Refusal:
    return Refusal(message, code=code, param=param)
