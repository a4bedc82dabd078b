"""LoRA adapters in the hands of an engine of vLLM."""

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from raybatch.backends.vllm.requests import RequestRefused
from raybatch.errors import error_text
from raybatch.models.source import resolve_adapter

# an engine lives for days, and a bucket may be back by then; not every row costs an attempt
_REFUSED_FOR_S = 60.0


class VllmAdapters:
    """The LoRA adapters of one engine of vLLM.

    Each is loaded when it is first requested, not in a step, where a failure would end the engine.
    `make` is vLLM's class `LoRARequest`; `load` loads such a request into the engine, and may raise
    anything.
    """

    def __init__(
        self,
        make: Callable[[str, int, str], Any],
        load: Callable[[Any], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._load = load
        self._clock = clock
        # vLLM may hold half of one that has failed: its id is not used again
        self._ids = count(1)
        self._loaded: dict[str, Any] = {}
        # by source: until when, and why
        self._refused: dict[str, tuple[float, str]] = {}

    def find(self, source: str | None) -> Any:  # noqa: ANN401 - vLLM's
        """Return vLLM's `LoRARequest` of an adapter, and load it if needed; None for no adapter.

        Raises RequestRefused if loading fails, or failed within the last minute.
        """
        if source is None:
            return None
        if source in self._loaded:
            return self._loaded[source]
        until, message = self._refused.get(source, (0.0, ""))
        if message and self._clock() < until:
            raise RequestRefused(message)
        try:
            request = self._make(source, next(self._ids), resolve_adapter(source))
            self._load(request)
        except Exception as error:  # whatever reads the files may raise anything
            message = f"the adapter {source!r} cannot be loaded: {error_text(error)}"
            self._refused[source] = self._clock() + _REFUSED_FOR_S, message
            raise RequestRefused(message) from error
        self._refused.pop(source, None)
        self._loaded[source] = request
        return request
