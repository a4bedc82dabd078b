"""Checks OpenAI messages of a row and maps their text; errors of prompts. The tokenizer renders."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from raybatch.errors import RaybatchError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Message = dict[str, Any]
# stands for the longest text of messages
LONGEST = "\ue006\ue007"


class PromptError(RaybatchError, ValueError):
    """A row's prompt cannot be used."""


class InvalidPrompt(PromptError):  # noqa: N818 - the name is seen in outputs
    """A null, a wrong type, a wrong message, or text that is not valid UTF-8."""


class RenderError(PromptError):
    """The chat template refused the row or wrote too much."""


class TokenizeError(PromptError):
    """The tokenizer could not turn the text into tokens."""


class PromptTooLong(PromptError):  # noqa: N818 - the name is seen in outputs
    """The prompt leaves no room in the model's context."""


def check_messages(messages: object, *, kinds: Collection[str] | None = ("text",)) -> list[Message]:
    """Return the messages as plain dicts, without keys that are null.

    A null key is what an Arrow struct makes of an absent one. `kinds` are the types of the parts
    that a content may have; None takes all, as they are.

    Raises:
        InvalidPrompt: naming the message and what is wrong with it.
    """
    if isinstance(messages, np.ndarray):
        messages = messages.tolist()
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidPrompt(f"messages must be a list of dicts, got {_kind(messages)}")
    if not messages:
        raise InvalidPrompt("messages is empty")
    return [_check_message(message, idx, kinds) for idx, message in enumerate(messages)]


def _check_message(message: object, idx: int, kinds: Collection[str] | None) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(f"messages[{idx}] must be a dict, got {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidPrompt(f"messages[{idx}].role must be one of {', '.join(ROLES)}, got {role!r}")
    checked = {str(key): value for key, value in message.items() if value is not None}
    content = checked.get("content")
    if content is None:
        if role != "assistant" or not checked.get("tool_calls"):
            raise InvalidPrompt(f"messages[{idx}].content is null")
        checked["content"] = None
    elif not isinstance(content, str):
        checked["content"] = _check_parts(content, idx, kinds)
    return checked


def _check_parts(content: object, idx: int, kinds: Collection[str] | None) -> list[Message]:
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise InvalidPrompt(
            f"messages[{idx}].content must be a string or a list of text parts, "
            f"got {_kind(content)}"
        )
    parts: list[Message] = []
    for part_idx, part in enumerate(content):
        where = f"messages[{idx}].content[{part_idx}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not (kind in kinds if kinds else isinstance(kind, str)):
            received = repr(kind) if isinstance(part, Mapping) else _kind(part)
            wanted = " or ".join(map(repr, kinds or ("text",)))
            raise InvalidPrompt(f"{where} must be a part of type {wanted}, got {received}")
        if kind != "text":
            parts.append({str(key): item for key, item in part.items() if item is not None})
            continue
        if not isinstance(part.get("text"), str):
            raise InvalidPrompt(f"{where}.text must be a string, got {_kind(part.get('text'))}")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def join_parts(messages: Sequence[Message]) -> list[Message]:
    """Turn contents of several parts into one string each, a line break between parts."""
    joined = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        joined.append({**message, "content": content})
    return joined


def mark_longest(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a mark in place of the longest text that a content has."""
    parts = [
        (len(part.get("text", "")), i, j)
        for i, message in enumerate(messages)
        for j, part in enumerate(_parts(message))
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
    """Return every string inside the messages, in order; roles left out."""
    strings: list[str] = []

    def keep(text: str) -> str:
        strings.append(text)
        return text

    map_texts(messages, keep)
    return strings


def map_texts(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    """Return the messages with every string changed, at any depth; roles stay."""
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
