"""Normalization of a row's messages, as in vLLM's server, and errors of prompts.

The tokenizer renders them.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from raybatch.errors import RaybatchError

logger = logging.getLogger(__name__)

Message = dict[str, Any]
# placeholder for the longest text of messages
LONGEST = "\ue006\ue007"
# roles that templates compare with; others may be any word without special tokens
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
INSTRUCTING = ("system", "developer")
_ROLE = re.compile(r"\w[\w .:-]*")
# roles whose content may be null in OpenAI's API
_SILENT = ("assistant", "function")
# the key of the text in parts of OpenAI's two APIs, and of vLLM
_TEXT_KEYS = {
    **{"text": "text", "input_text": "text", "output_text": "text"},
    **{"refusal": "refusal", "thinking": "thinking"},
}


class PromptError(RaybatchError, ValueError):
    """A row's prompt cannot be used."""


class InvalidPrompt(PromptError):  # noqa: N818 - the name is seen in outputs
    """The row has null, a wrong type, a wrong message, or text that is not valid UTF-8."""


class RenderError(PromptError):
    """The chat template raised an error or exceeded its limits."""


class TokenizeError(PromptError):
    """The tokenizer could not turn the text into tokens."""


def read_messages(value: Any) -> Any:  # noqa: ANN401 - a cell, or what a function returned
    """Return messages from JSON text, or from Arrow without the nulls of absent keys.

    Nulls in JSON text are explicit, and are kept inside of arguments.
    """
    if isinstance(value, Exception):
        raise InvalidPrompt(str(value))
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(f"messages is a text that is not valid JSON: {error}") from error


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Return Arrow values as lists and dicts, without null keys, which come from other rows."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def lacks_system(messages: object) -> bool:
    """Return whether messages lack a system message, so that the stage's may be prepended."""
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, Mapping) and first.get("role") not in INSTRUCTING


def check_messages(messages: object, *, kinds: Collection[str] | None = ("text",)) -> list[Message]:
    """Return messages as dicts without empty keys: nulls, and empty tool calls.

    Text parts of any API become parts of type "text". `kinds` are the allowed types of parts; None
    allows those of OpenAI's chat API.

    Raises:
        InvalidPrompt: names the message and its problem.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidPrompt(f"messages must be a list of dicts, got {_kind(messages)}")
    if not messages:
        raise InvalidPrompt("messages is empty")
    return [_check_message(one, f"messages[{idx}]", kinds) for idx, one in enumerate(messages)]


def _check_message(message: object, where: str, kinds: Collection[str] | None) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(f"{where} must be a dict, got {_kind(message)}")
    checked = {str(key): value for key, value in message.items() if value is not None}
    role, content = checked.get("role"), checked.setdefault("content", None)
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidPrompt(f"{where}.role must be a word such as {', '.join(ROLES)}, got {role!r}")
    if content is None and role not in _SILENT:
        raise InvalidPrompt(f"{where}.content is null; only an assistant message may have none")
    if content is not None and not isinstance(content, str):
        checked["content"] = _check_parts(content, f"{where}.content", kinds)
    calls = checked.pop("tool_calls", None)
    if isinstance(calls, str):  # values of an Arrow map are texts
        calls = read_messages(calls)
    return {**checked, "tool_calls": calls} if calls else checked


def _check_parts(content: object, where: str, kinds: Collection[str] | None) -> list[Message]:
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        got = _kind(content)
        raise InvalidPrompt(f"{where} must be a string or a list of text parts, got {got}")
    return [_check_part(part, f"{where}[{idx}]", kinds) for idx, part in enumerate(content)]


def _check_part(part: object, where: str, kinds: Collection[str] | None) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    is_known = isinstance(kind, str) if kinds is None else key or kind in kinds
    if not isinstance(part, Mapping) or not is_known:
        received = repr(kind) if isinstance(part, Mapping) else _kind(part)
        wanted = " or ".join(map(repr, kinds or ("text",)))
        raise InvalidPrompt(f"{where} must be a part of type {wanted}, got {received}")
    checked = {str(name): item for name, item in part.items() if item is not None}
    if key is None or (kinds is None and key != "text"):
        return checked
    text = checked.pop(key, None)
    if not isinstance(text, str):
        raise InvalidPrompt(f"{where}.{key} must be a string, got {_kind(text)}")
    return {**checked, "type": "text", "text": text}


def for_template(
    messages: Sequence[Message],
    *,
    takes_parts: Callable[[str], bool],
    knows_developer: bool,
    wants_texts: bool = False,
) -> list[Message]:
    """Return checked messages in the form that a template expects.

    Tool call arguments become objects, and lists of text parts become texts where it is needed.

    The role "developer" becomes "system" if the template does not know it.

    Args:
        takes_parts: whether the template reads lists of parts in messages of a role; if not, their
            texts are joined by newlines.
        wants_texts: the template reads arguments as JSON texts.

    Raises:
        InvalidPrompt: names a tool call that is not a function call.
    """
    shown = []
    for idx, message in enumerate(messages):
        one, content, role = with_parsed_calls(message, idx), message["content"], message["role"]
        if isinstance(content, list):
            is_text = all("text" in part for part in content)
            read_as = "system" if role == "developer" and not knows_developer else role
            # most templates expect tool results as texts
            if is_text and (role == "tool" or not takes_parts(read_as)):
                one["content"] = _joined(content)
        if role == "assistant":
            reasoning = [one.pop(name, None) for name in ("reasoning", "reasoning_content")]
            given = [text for text in reasoning if text is not None]
            if given and not isinstance(given[0], str):
                got = _kind(given[0])
                raise InvalidPrompt(f"messages[{idx}].reasoning must be a string, got {got}")
            one |= {"reasoning": given[0]} if given else {}
        shown.append(one)
    shown = for_api(shown) if wants_texts else shown
    if knows_developer or all(message["role"] != "developer" for message in shown):
        return shown
    return _with_one_system(shown)


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    systems = [message for message in messages if message["role"] in INSTRUCTING]
    others = [message for message in messages if message["role"] not in INSTRUCTING]
    first = {name: value for name, value in systems[0].items() if name != "tools"}
    if len(systems) > 1 or messages[0]["role"] not in INSTRUCTING:
        contents = filter(None, (_joined(message["content"]) for message in systems))
        first = {"content": "\n\n".join(contents)}
    return [{**first, "role": "system"}, *others]


def as_shown(messages: Sequence[Message], *, keeps_null: bool) -> list[Message]:
    """Return messages with `reasoning` also as `reasoning_content`, and "" for null content.

    `keeps_null` keeps null content, for a template that tests for it.
    """
    return [
        {
            **message,
            **({"reasoning_content": message["reasoning"]} if "reasoning" in message else {}),
            **({"content": ""} if message["content"] is None and not keeps_null else {}),
        }
        for message in messages
    ]


def with_parsed_calls(message: Mapping[str, Any], idx: int = 0) -> Message:
    """Return a message with its tool call arguments as objects; InvalidPrompt: a call is wrong."""
    if "tool_calls" not in message:
        return dict(message)
    calls = message["tool_calls"]
    if not isinstance(calls, list | tuple):
        raise InvalidPrompt(f"messages[{idx}].tool_calls must be a list, got {_kind(calls)}")
    parsed = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type") not in (None, "function"):
            raise InvalidPrompt(
                f"messages[{idx}].tool_calls[{number}] must be a function call: "
                '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            )
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}


def for_api(messages: Sequence[Message]) -> list[Message]:
    """Return checked messages for OpenAI's chat API: tool call arguments are texts."""

    def sent(call: Any) -> Any:  # noqa: ANN401 - data of a row, which the other side judges
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
            return call
        arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**message, "tool_calls": list(map(sent, message["tool_calls"]))}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _arguments(value: object) -> Mapping[str, Any]:
    if value and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            _warn_of_arguments()
            return {}
    if value and not isinstance(value, Mapping):
        _warn_of_arguments()
    return value if isinstance(value, Mapping) else {}


@cache
def _warn_of_arguments() -> None:
    """Warn once per process that tool call arguments are not an object."""
    logger.warning("replacing tool call arguments that are not a JSON object by {}, as in vLLM")


def _joined(content: Any) -> str:  # noqa: ANN401 - text, parts or null
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


def mark_longest(messages: Sequence[Message], among: Sequence[int] = ()) -> list[Message]:
    """Return the messages with the mark `LONGEST` in place of the longest content text.

    `among` are the indices of messages to consider; empty for all.
    """
    parts = [
        (len(part.get("text", "")), i, j)
        for i in among or range(len(messages))
        for j, part in enumerate(_parts(messages[i]))
    ]
    _, longest, place = max(parts)
    content: Any = LONGEST
    if isinstance(messages[longest]["content"], list):
        content = list(_parts(messages[longest]))
        content[place] = {**content[place], "text": LONGEST}
    return [{**m, "content": content} if i == longest else m for i, m in enumerate(messages)]


def _parts(message: Message) -> Sequence[Message]:
    content = message["content"]
    return content if isinstance(content, list) else [{"text": content or ""}]


def texts(messages: Sequence[Message]) -> list[str]:
    """Return every string in the messages except roles, in order."""
    strings: list[str] = []

    def keep(text: str) -> str:
        strings.append(text)
        return text

    map_texts(messages, keep)
    return strings


def map_texts(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    """Return the messages with every string but roles changed, at any depth."""
    return [
        {key: value if key == "role" else _map(value, change) for key, value in message.items()}
        for message in messages
    ]


def _map(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map(item, change) for item in value]
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
