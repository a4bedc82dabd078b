"""The names of vLLM that raybatch uses in one minor version, with their import and checks.

Only this module imports vLLM. `versions.py` has the data of each version and chooses one.
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
    """The names, arguments and attributes that raybatch uses of one minor version of vLLM.

    Several names in one string are separated by blanks.
    """

    # import path of each name, "module:name" or a module, by the part that needs it
    names: Mapping[str, Mapping[str, str]]
    # arguments by name or `name.method`; empty if it must only exist
    arguments: Mapping[str, str]
    # attributes of every engine; of one with its scheduler in this process; of one with
    # data-parallel ranks in other processes
    read: str
    read_here: str
    read_of_ranks: str
    # attributes of a request in the scheduler, and in the output processor
    read_of_request: str
    read_of_output: str
    read_of_parser: str
    parser_loggers: tuple[str, ...]  # parsers log what they do not raise
    # whether the tokens of a second text are passed as (begin, end) and not as begin
    types_are_ranges: bool
    load_formats: str  # values of `load_format`, without those of plugins

    def load(self, part: str) -> Any:  # noqa: ANN401 - names of vLLM
        """Import the names that a part of raybatch needs; return an object with them as attributes.

        `part` is a key of `names`. Raises ConfigError if vLLM lacks a name or an argument.
        """
        found = {name: self._found(place) for name, place in self.names[part].items()}
        for call, needed in self.arguments.items():
            name, _, attribute = call.partition(".")
            if name in found:
                called = getattr(found[name], attribute, None) if attribute else found[name]
                self._check_call(called, call, needed.split())
        return SimpleNamespace(**found)

    def check(self, of: object, paths: str, what: str) -> None:
        """Raise ConfigError if `of`, an object of vLLM, lacks an attribute that raybatch reads.

        `paths` are attributes such as "a.b c", separated by blanks; `what` names the object in the
        error.
        """
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
            raise self._unfit(f"{name} takes no argument {', '.join(missing)}")

    def _unfit(self, reason: str) -> ConfigError:
        return ConfigError(
            "the installed vLLM does not match its adapter (raybatch/backends/vllm/versions.py): "
            f"{reason}; install the newest patch of a supported version, or set backend='native'"
        )
