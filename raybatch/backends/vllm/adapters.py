"""LoRA adapters in vLLM: loaded when the first row asks for one, or refused with its rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from vllm.lora.request import LoRARequest

from raybatch.backends.vllm.requests import RequestRefused
from raybatch.errors import error_text
from raybatch.models.adapters import resolve_adapter

# an engine lives for days, and a bucket may be back by then; not every row costs an attempt
_REFUSED_FOR_S = 60.0


class VllmAdapters:
    """What vLLM knows the adapters of one engine by.

    They are loaded before any step, where a failure would end the engine.

    Args:
        load: gives an adapter to the engine; may raise anything.
        clock: seconds, for how long failures are remembered.
    """

    def __init__(
        self, load: Callable[[LoRARequest], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._clock = clock
        # vLLM may hold half of one that has failed: its id is not used again
        self._ids = count(1)
        self._loaded: dict[str, LoRARequest] = {}
        # by source: until when, and why
        self._refused: dict[str, tuple[float, str]] = {}

    def find(self, source: str | None) -> LoRARequest | None:
        """Return what vLLM knows an adapter by, loaded; None for none.

        Raises:
            RequestRefused: it cannot be loaded, or could not a short time ago.
        """
        if source is None:
            return None
        if source not in self._loaded:
            self._loaded[source] = self._load_now(source)
        return self._loaded[source]

    def _load_now(self, source: str) -> LoRARequest:
        until, message = self._refused.get(source, (0.0, ""))
        if message and self._clock() < until:
            raise RequestRefused(message)
        try:
            request = LoRARequest(source, next(self._ids), resolve_adapter(source))
            self._load(request)
        except Exception as error:  # whatever reads the files may raise anything
            message = f"the adapter {source!r} cannot be loaded: {error_text(error)}"
            self._refused[source] = self._clock() + _REFUSED_FOR_S, message
            raise RequestRefused(message) from error
        self._refused.pop(source, None)
        return request
