"""What raybatch uses of one minor version of vLLM, and how it is looked up and checked.

vLLM is imported here alone. Each version has a module of data beside this one (`v0_32.py`), which
`versions.py` chooses.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from raybatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Names, arguments and attributes of vLLM that raybatch relies on; texts are lists of words."""

    module: str  # the file of this record
    # where each name lies, "module:name" or a module, by what needs it
    names: Mapping[str, Mapping[str, str]]
    # of names, and of what they have: what they are called with; others are only there
    arguments: Mapping[str, str]
    # attributes of an engine; of one whose scheduler is in this process; of one whose data-parallel
    # ranks are not
    read: str
    read_here: str
    read_of_ranks: str
    # attributes of one request: where the scheduler has it, and where its output is made
    read_of_request: str
    read_of_output: str
    read_of_parser: str
    parser_loggers: tuple[str, ...]  # parsers log what they do not raise
    # whether the tokens of a second text are told to the model by begin and end, or by their begin
    types_are_ranges: bool
    load_formats: str  # values of `load_format`, without those of plugins

    def load(self, part: str) -> Any:  # noqa: ANN401 - names of vLLM
        """Import the names of a part and return them; ConfigError for what vLLM has not."""
        found = {name: self._found(place) for name, place in self.names[part].items()}
        for call, needed in self.arguments.items():
            name, _, attribute = call.partition(".")
            if name in found:
                called = getattr(found[name], attribute, None) if attribute else found[name]
                self._check_call(called, call, needed.split())
        return SimpleNamespace(**found)

    def check(self, of: object, paths: str, what: str) -> None:
        """Raise ConfigError where an object of vLLM lacks something that is read of it."""
        for path in paths.split():
            try:
                reduce(getattr, path.split("."), of)
            except AttributeError as error:
                raise self._unfit(f"{what} has no {path}") from error

    def _found(self, place: str) -> Any:  # noqa: ANN401
        module, _, name = place.partition(":")
        try:
            found = import_module(module)
            return getattr(found, name) if name else found
        except (ImportError, AttributeError) as error:
            raise self._unfit(str(error)) from error

    def _check_call(self, call: Any, name: str, needed: list[str]) -> None:  # noqa: ANN401
        if call is None:
            raise self._unfit(f"there is no {name}")
        known = inspect.signature(call).parameters if needed else {}
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        missing = [argument for argument in needed if argument not in known]
        if missing and not takes_any:
            raise self._unfit(f"{name} takes no {', '.join(missing)}")

    def _unfit(self, reason: str) -> ConfigError:
        return ConfigError(
            f"the vLLM that is installed is not as raybatch knows it (raybatch/backends/vllm/"
            f"{self.module}.py): {reason}; install the newest patch of a version that it knows, or "
            "set backend='native'"
        )
