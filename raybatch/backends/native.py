"""The native engine as a backend; torch and the engine are imported when one starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from raybatch.backends.base import NO_EXTENSIONS, BackendExtension, BackendType
from raybatch.config import BackendConfig, EngineConfig
from raybatch.installation import engine_extension, install_command, torch_command, weight_sharing
from raybatch.models.checkpoint import check_tensors
from raybatch.models.config import read_model_spec
from raybatch.models.source import resolve_model
from raybatch.records.share import ShareLink
from raybatch.records.types import (
    Capacity,
    Completion,
    ReplicaStats,
    Request,
    RowProgress,
    SequenceState,
)

if TYPE_CHECKING:
    from raybatch.engine.engine import Engine
    from raybatch.engine.loading.prepared import PreparedModel
    from raybatch.engine.loading.runner import ModelRunner
    from raybatch.engine.phases import MakeExtension, PhasedEngine
    from raybatch.engine.weights.layer_store import PlaceWeights


class NativeBackend:
    """Implements the `Backend` protocol with a native engine."""

    def __init__(
        self,
        engine: Engine | PhasedEngine,
        extensions: Mapping[str, BackendExtension] = NO_EXTENSIONS,
    ) -> None:
        self._open: Engine | PhasedEngine | None = engine
        self.extensions = extensions

    @property
    def _engine(self) -> Engine | PhasedEngine:
        if self._open is None:
            raise RuntimeError("the backend is closed")
        return self._open

    @property
    def runner(self) -> ModelRunner:
        """Return the current model runner."""
        return self._engine.runner

    def capacity(self) -> Capacity:
        return self._engine.capacity()

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.add(requests)

    def poll(self) -> list[Completion]:
        return self._engine.step()

    def watch(self, scheduled: Callable[[], None]) -> None:
        self._engine.on_scheduled = scheduled

    def num_unfinished(self) -> int:
        return self._engine.num_unfinished()

    def drain(self) -> list[Request]:
        return self._engine.drain()

    def abort(self, request_ids: Collection[int]) -> None:
        self._engine.abort(request_ids)

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        return self._engine.checkpoint(min_new_tokens)

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        return self._engine.export(request_ids, with_kv=with_kv)

    def restore(self, states: Sequence[SequenceState]) -> None:
        self._engine.restore(states)

    def progress(self) -> RowProgress:
        return self._engine.moves.progress()

    def peek(self, request_id: int, from_block: int, max_blocks: int) -> SequenceState | None:
        return self._engine.moves.peek(request_id, from_block, max_blocks)

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        return self._engine.moves.reserve(request_id, num_blocks)

    def receive(self, state: SequenceState) -> bool:
        return self._engine.moves.receive(state)

    def depart(self, request_id: int, from_block: int | None) -> list[SequenceState]:
        return self._engine.moves.depart(request_id, from_block)

    def forget(self, request_id: int) -> None:
        self._engine.moves.forget(request_id)

    def stats(self) -> ReplicaStats:
        return self._engine.stats()

    def close(self) -> None:
        for extension in self.extensions.values():
            extension.close()
        self._open = None


def create(
    model: str,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    share: ShareLink | None = None,
    may_form_tp_groups: bool = False,
) -> NativeBackend:
    """Load a model and return a backend that is ready for `submit`, or raise ConfigError.

    With `share`, feed-forward weights are shared with other replicas, and RankError is raised if
    one of them has exited. `num_engines_on_host` engines share the memory of this host.
    """
    from raybatch.engine.loading.prepared import PreparedModel

    path = resolve_model(model)
    place = placement_of(share, path, engine)
    prepared = PreparedModel.load(
        str(path), engine, num_engines_on_host=num_engines_on_host, place=place
    )
    shares_weights = share is not None
    return _backend_of(
        prepared,
        extensions_of(shares_weights=shares_weights, may_form_tp_groups=may_form_tp_groups),
    )


def placement_of(link: ShareLink | None, folder: Path, engine: EngineConfig) -> PlaceWeights | None:
    """Return the function that loads shared feed-forward weights; None if `link` is None."""
    if link is None:
        return None
    place: PlaceWeights = weight_sharing().placement(link, read_model_spec(folder), engine)
    return place


def extensions_of(*, shares_weights: bool, may_form_tp_groups: bool) -> tuple[MakeExtension, ...]:
    """Return functions that make the enabled extensions of an engine; imports no others."""
    made: list[MakeExtension] = []
    if shares_weights:
        made.append(weight_sharing().engine_extension)
    if may_form_tp_groups and (found := engine_extension("tp_groups")) is not None:
        made.append(found)
    return tuple(made)


def load_once(model: str, engine: EngineConfig) -> Callable[[EngineConfig], NativeBackend]:
    """Load a model, and return a function that makes backends on its weights from engine options.

    These options may differ from `engine` in KV memory and batch sizes only. All backends must run
    in one thread. Raises ConfigError.
    """
    from raybatch.engine.loading.loaded_model import load_model
    from raybatch.engine.loading.prepared import PreparedModel
    from raybatch.engine.memory.pinned import current_device

    loaded = load_model(str(resolve_model(model)), engine)

    def make(options: EngineConfig) -> NativeBackend:
        with current_device(loaded.device):
            return _backend_of(PreparedModel.of(loaded, options))

    return make


def _backend_of(prepared: PreparedModel, extensions: Sequence[MakeExtension] = ()) -> NativeBackend:
    from raybatch.engine.engine import Engine
    from raybatch.engine.memory.pinned import IndexUploads
    from raybatch.engine.phases import PhasedEngine
    from raybatch.engine.sampling.grammars import GrammarSlots
    from raybatch.engine.sampling.sampler import Sampler
    from raybatch.text.detokenizer import StopChecker
    from raybatch.text.tokenizer import Tokenizer

    spec, load = prepared.model.spec, cache(partial(Tokenizer.load, prepared.model.path))
    stops = StopChecker(load)

    def make(runner: ModelRunner) -> Engine:
        config = runner.config
        grammars = GrammarSlots(lambda: load().hugging_face, spec.vocab_size, spec.eos_token_ids)
        upload = IndexUploads(runner.device).upload
        max_slots = min(config.max_num_seqs, config.token_budget)
        sampler = Sampler(spec.vocab_size, max_slots, spec.eos_token_ids, grammars, upload)
        return Engine(runner, sampler, stops, config)

    engine = PhasedEngine(prepared, make, extensions)
    return NativeBackend(engine, engine.extensions)


def _max_model_len(backend: BackendConfig, engine: EngineConfig, folder: Path | None) -> int | None:
    assert folder is not None, "only an endpoint's model has no folder"
    return read_model_spec(folder).max_model_len


NATIVE = BackendType(
    kind="native",
    forms_tp_groups=True,
    shares_shards=True,
    create=lambda start: create(
        start.model,
        start.engine,
        num_engines_on_host=start.num_engines_on_host,
        share=start.share,
        may_form_tp_groups=start.num_replicas != 1,
    ),
    max_model_len=_max_model_len,
    package="torch",
    packages=("raybatch", "torch"),
    missing=lambda: (
        f"the native backend needs torch, which is not installed here: {torch_command()}"
    ),
    check_files=lambda folder, _: check_tensors(folder, read_model_spec(folder)),
    gpu_warning=lambda: (
        "the native engine is untested on GPUs: it may fail and will be slow. Install vLLM where "
        f"the engines run ({install_command('vllm')}) and leave backend unset, or set it to "
        "'vllm'; engine.device='cpu' keeps engines off the GPUs"
    ),
    obeys_engine_options=True,
    chooses_mode=True,
    checks_grammars=True,
)
