"""What stands for an object on another loop or in another process, as an actor handle of Ray does.

`handle.method.remote(...)` begins a call, and what it returns can be awaited.
"""

from collections.abc import Callable
from typing import Any


class CallHandle:
    """Begins calls of an object's methods.

    Args:
        begin: takes the name of a method and its arguments, and returns the call that has begun.
    """

    def __init__(self, begin: Callable[..., Any]) -> None:
        self._begin = begin

    def __getattr__(self, name: str) -> "_Method":
        return _Method(self._begin, name)


class _Method:
    def __init__(self, begin: Callable[..., Any], name: str) -> None:
        self._begin = begin
        self._name = name

    def remote(self, *args: object) -> Any:  # noqa: ANN401 - what can be awaited
        return self._begin(self._name, *args)
