"""Engines whose runs are compared with simulations: of one model, alike in all but their sizes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

from raybatch.backends.base import Backend
from raybatch.backends.cost_cache import limits_of
from raybatch.backends.native import NativeBackend, load_once
from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import CostModel, EngineLimits
from raybatch_lab.simulator.engine import EngineSpec


class Engines(ABC):
    """Starts engines of one model in this process, several at a time if needed.

    Attributes:
        limits: batch limits of an engine with the given options.
        full_step_tokens: of such an engine; see `EngineSpec`.
        max_len: longest row that such an engine accepts, in tokens.
        kv_token_bytes: KV bytes per token when a row moves to another engine; 0 if its KV is
            recomputed there.
    """

    limits: EngineLimits
    full_step_tokens: float
    max_len: int
    kv_token_bytes: int

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        with closing(self._start(engine, None)) as backend:
            self.limits = self.limits_of(backend)
            self.full_step_tokens = self._full_step_tokens(backend)
            capacity = backend.capacity()
            self.max_len, self.kv_token_bytes = capacity.max_model_len, capacity.kv_token_bytes

    def start(self, kv_tokens: int, *, max_num_seqs: int, max_len: int) -> Backend:
        """Start an engine with KV memory for about `kv_tokens` tokens, at least one row.

        Raises ConfigError or CapacityError.
        """
        engine = replace(self._engine, max_num_seqs=max_num_seqs, max_model_len=max_len)
        block_size = self.limits.block_size
        num_blocks = -(-max(kv_tokens, max_len) // block_size)
        return self._start(engine, num_blocks * block_size)

    def spec(self, backend: Backend, cost: CostModel) -> EngineSpec:
        """Return the simulation parameters of a started engine: its limits, and the given cost."""
        return EngineSpec(
            cost=replace(cost, limits=self.limits_of(backend)),
            full_step_tokens=self._full_step_tokens(backend),
            enable_prefix_caching=self._engine.enable_prefix_caching,
            is_vllm=isinstance(self, _VllmEngines),
        )

    @abstractmethod
    def _full_step_tokens(self, backend: Backend) -> float: ...

    @abstractmethod
    def _start(self, engine: EngineConfig, kv_tokens: int | None) -> Backend: ...

    def limits_of(self, backend: Backend) -> EngineLimits:
        """Return the batch limits of a started engine."""
        return limits_of(backend, self._engine.token_budget)


class _NativeEngines(Engines):
    """They share the weights."""

    def __init__(self, model: str, _: BackendConfig, engine: EngineConfig) -> None:
        self._make = load_once(model, engine)
        super().__init__(engine)

    def _full_step_tokens(self, backend: Backend) -> float:
        assert isinstance(backend, NativeBackend), "an engine of another kind"
        return backend.runner.full_step_tokens

    def _start(self, engine: EngineConfig, kv_tokens: int | None) -> Backend:
        if kv_tokens is not None:
            engine = replace(engine, kv_cache_bytes=kv_tokens * self.kv_token_bytes)
        return self._make(engine)


class _VllmEngines(Engines):
    """Each has its own weights."""

    def __init__(self, model: str, backend: BackendConfig, engine: EngineConfig) -> None:
        self._model, self._backend = model, backend
        super().__init__(engine)

    def _full_step_tokens(self, backend: Backend) -> float:
        return math.inf

    def _start(self, engine: EngineConfig, kv_tokens: int | None) -> Backend:
        options = dict(self._backend.options)
        if kv_tokens is not None:
            num_blocks = kv_tokens // self.limits.block_size
            given = options.get("engine_kwargs", {})
            # one of its blocks has no tokens
            options["engine_kwargs"] = given | {"num_gpu_blocks_override": num_blocks + 1}
        return create_backend(self._model, replace(self._backend, options=options), engine)

    def limits_of(self, backend: Backend) -> EngineLimits:
        limits = super().limits_of(backend)
        return replace(limits, kv_tokens=limits.kv_tokens - limits.block_size)


# by the kind of their backend: those whose schedulers are simulated
_KINDS: Mapping[str, Callable[[str, BackendConfig, EngineConfig], Engines]] = {
    "native": _NativeEngines,
    "vllm": _VllmEngines,
}


def engines_of(model: str, backend: BackendConfig, engine: EngineConfig) -> Engines:
    """Return the `Engines` of a model; raise ConfigError if this kind cannot be simulated."""
    make = _KINDS.get(backend.kind)
    if make is None:
        raise ConfigError(
            f"the scheduler of the {backend.kind} backend cannot be simulated; set the backend to "
            f"{' or '.join(_KINDS)}"
        )
    return make(model, backend, engine)
