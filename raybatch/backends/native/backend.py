"""The native engine as a backend: builds model, sampler and step loop, and adapts the names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.records.types import Capacity, Completion, ReplicaStats, Request, SequenceState


class NativeBackend:
    """Follows the `Backend` protocol over an `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine

    def capacity(self) -> Capacity:
        return self._open().capacity()

    def submit(self, requests: Sequence[Request]) -> None:
        self._open().add(requests)

    def poll(self) -> list[Completion]:
        return self._open().step()

    def num_unfinished(self) -> int:
        return self._open().num_unfinished()

    def drain(self) -> list[Request]:
        return self._open().drain()

    def abort(self, request_ids: Collection[int]) -> None:
        self._open().abort(request_ids)

    def begun(self, min_new_tokens: int) -> list[SequenceState]:
        return self._open().begun(min_new_tokens)

    def export(self, request_ids: Collection[int]) -> list[SequenceState]:
        return self._open().export(request_ids)

    def restore(self, states: Sequence[SequenceState]) -> None:
        self._open().restore(states)

    def stats(self) -> ReplicaStats:
        return self._open().stats()

    def close(self) -> None:
        self._engine = None

    def _open(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the backend is closed")
        return self._engine


def create(model: str, engine: EngineConfig, *, num_engines_on_host: int = 1) -> NativeBackend:
    """Load a model and return a backend that is ready for `submit`.

    Args:
        num_engines_on_host: engines that share the host's memory.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    # torch and the model's parts are loaded only where an engine runs
    from raybatch.engine.loading.runner import ModelRunner
    from raybatch.engine.sampling.grammars import GrammarSlots
    from raybatch.engine.sampling.sampler import Sampler
    from raybatch.models.source import resolve_model
    from raybatch.text.stopping import LazyTokenizer, StopChecker

    path = resolve_model(model)
    runner = ModelRunner.load(str(path), engine, num_engines_on_host=num_engines_on_host)
    max_slots = min(engine.max_num_seqs, engine.max_batched_tokens)
    spec, tokenizer = runner.spec, LazyTokenizer(path)
    grammars = GrammarSlots(tokenizer.hugging_face, spec.vocab_size, spec.eos_token_ids)
    sampler = Sampler(spec.vocab_size, max_slots, spec.eos_token_ids, grammars)
    return NativeBackend(Engine(runner, sampler, StopChecker(tokenizer), engine))
