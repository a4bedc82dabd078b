"""Reasoning and tool calls that were parsed out of an answer."""

import json
from dataclasses import dataclass
from typing import Any

# columns of an output
REASONING = "reasoning"
TOOL_CALLS = "tool_calls"
PARSE_ERROR = "parse_error"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call requested by the model; `arguments` is JSON as generated."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText:
    """Parts that were parsed out of an answer and removed from its text."""

    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""
    """Why a part could not be parsed, "Type: message"; it is still in the text."""

    def to_json(self) -> str:
        calls = [[call.id, call.name, call.arguments] for call in self.tool_calls]
        return json.dumps([self.reasoning, calls, self.error])

    @classmethod
    def from_json(cls, text: str) -> "ParsedText":
        reasoning, calls, error = json.loads(text)
        tool_calls = tuple(ToolCall(id=i, name=n, arguments=args) for i, n, args in calls)
        return cls(reasoning=reasoning, tool_calls=tool_calls, error=error)

    def columns(self) -> dict[str, Any]:
        """Return the values of the output columns, by name."""
        calls = [call.to_openai() for call in self.tool_calls]
        return {REASONING: self.reasoning, TOOL_CALLS: calls, PARSE_ERROR: self.error}
