"""The protocol of backends, and the facts of a backend kind that need no engine.

To add a backend, add a module or folder here with a class of the protocol and a `BackendType`, and
a line in `registry.py`; or name the `BackendType` in an entry point of the group
`raybatch.backends`, whose name is the kind, in another distribution.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from raybatch.backends.endpoint import EndpointType
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.models.checkpoint import check_tensors, stored_tensors
from raybatch.models.config import read_model_spec
from raybatch.models.json_files import read_json
from raybatch.records.share import ShareLink
from raybatch.records.types import (
    Capacity,
    Completion,
    ReplicaStats,
    Request,
    RowProgress,
    SequenceState,
    Task,
)

# query and document as one sequence with a separator, as one without, or as two sequences
ScoreForm = Literal["pair", "joined", "apart"]


class BackendExtension(Protocol):
    """A part of an engine that works together with other engines, such as in a TP group.

    It is used in the thread that polls the engine. An extension of the pool calls further methods
    of it by name; after a RankError the engine continues alone.
    """

    @property
    def is_exchanging(self) -> bool:
        """Whether `serve` must be called regularly while this engine has no rows."""

    def serve(self) -> None:
        """Run a forward pass without rows if another engine waits for one; else return at once."""

    def close(self) -> None:
        """Stop background work."""


# of an engine that works alone
NO_EXTENSIONS: Mapping[str, BackendExtension] = MappingProxyType({})


class Backend(Protocol):
    """One engine inside one replica; owned by one thread.

    Feedback flows only through `poll`, `stats` and `capacity`. A bad request comes back from
    `poll` as completions with an error, one per sample; only a broken engine raises. The suite in
    `tests/backends/test_contract.py` holds every backend to this.
    """

    def capacity(self) -> Capacity:
        """Return the current capacity; it may change with the execution mode."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in this order; never blocks and never raises for a row.

        Raises:
            ValueError: a request id that is still in the backend.
        """

    def poll(self) -> list[Completion]:
        """Run at most one engine step and return the samples that finished in it."""

    def watch(self, scheduled: Callable[[], None]) -> None:
        """Let the backend call `scheduled` in each step, after scheduling; for long steps."""

    def num_unfinished(self) -> int:
        """Return the number of unfinished requests."""

    def drain(self) -> list[Request]:
        """Remove and return the unstarted requests, in order of submission."""

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop requests and free their memory; they return no completion.

        Unknown ids are ignored.
        """

    def checkpoint(self, min_new_tokens: int) -> list[SequenceState]:
        """Return states of running sequences, from which `restore` can resume; they keep running.

        Only sequences with at least `min_new_tokens` tokens since their last state are returned.
        """

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        """Remove the unfinished sequences of these requests; return their states, in order.

        `with_kv` includes their KV in the states, if the engine can read it.
        """

    def restore(self, states: Sequence[SequenceState]) -> None:
        """Resume sequences from their states, which any engine may have exported."""

    def progress(self) -> RowProgress:
        """Return the progress of running sequences; it is empty if the engine cannot report it."""

    def peek(self, request_id: int, from_block: int, max_blocks: int) -> SequenceState | None:
        """Return the state of a running row with copies of some whole KV blocks; it keeps running.

        The blocks are at most `max_blocks` from block `from_block` on. None if the engine cannot
        export KV, or the row has several samples or does not decode now.
        """

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Reserve `num_blocks` KV blocks for an arriving row; return False if too few are free."""

    def receive(self, state: SequenceState) -> bool:
        """Accept the next KV blocks of an arriving row, from `peek`; return False if not usable."""

    def depart(self, request_id: int, from_block: int | None) -> list[SequenceState]:
        """Remove a row and return its states, as `export` does; KV from block `from_block` on.

        None for `from_block` includes no KV. The memory of the row is kept until `restore` resumes
        it here, or until `forget`.
        """

    def forget(self, request_id: int) -> None:
        """Free the memory kept for a row that has left, or that does not arrive after all."""

    @property
    def extensions(self) -> Mapping[str, BackendExtension]:
        """Extensions of the engine by name, such as "tp_groups"."""

    def stats(self) -> ReplicaStats:
        """Return the counters of the engine."""

    def close(self) -> None:
        """Free everything; the backend is not used again."""


def progress_of(running: Iterable[tuple[Request, int]]) -> RowProgress:
    """Return the progress of sequences, given (request, number of generated tokens) pairs."""
    rows = [(r.request_id, len(r.prompt_token_ids) + n, n) for r, n in running]
    ids, num_tokens, num_generated = np.array(rows, np.int64).reshape(-1, 3).T
    return RowProgress(request_ids=ids, num_tokens=num_tokens, num_generated=num_generated)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStart:
    """The arguments of an engine start."""

    model: str  # checkpoint directory, hub id or URI; for an endpoint the name there
    backend: BackendConfig
    engine: EngineConfig
    num_engines_on_host: int = 1  # they share its memory
    num_replicas: int | None = 1  # of the pool; None: by the resources of the cluster
    share: ShareLink | None = None  # link to replicas that share weights


def _takes_no_options(backend: BackendConfig, engine: EngineConfig) -> None:
    if backend.options:
        names = ", ".join(sorted(backend.options))
        raise ConfigError(
            f"backend.options: the {backend.kind} backend has no options, got {names}; remove them"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendType:
    """What raybatch knows of a kind of backend; only `create` imports the engine."""

    kind: str
    create: Callable[[EngineStart], Backend]
    # longest prompt plus output of the model in a folder (None: an endpoint); returns None if
    # unknown, and raises ConfigError for a model that the backend cannot run, by its config
    max_model_len: Callable[[BackendConfig, EngineConfig, Path | None], int | None]
    package: str = ""  # required where engines start; `missing` is the error
    missing: Callable[[], str] = lambda: ""
    # why the installed version of it cannot be used, None if it can
    why_unusable: Callable[[], str | None] = lambda: None
    packages: tuple[str, ...] = ("raybatch",)  # whose versions decide how fast an engine is
    tasks: tuple[Task, ...] = ("generate",)
    makes: str = "generates text"  # for the error of another task
    # raises ConfigError for unsupported options of backend or engine
    check: Callable[[BackendConfig, EngineConfig], object] = _takes_no_options
    # raises ConfigError for a folder that its engines cannot run, by file headers
    check_files: Callable[[Path, BackendConfig], None] = lambda *_: None
    # the options that determine answers, given all options and the stage's model
    answering: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda options, _: options
    # output columns in addition to the text
    parsed_columns: Callable[[BackendConfig, EngineConfig], tuple[str, ...]] = lambda *_: ()
    # GPUs of one engine, if it uses any
    num_gpus: Callable[[BackendConfig, EngineConfig], int] = lambda *_: 1
    # ranks of one engine that are Ray actors
    num_actors: Callable[[BackendConfig, EngineConfig], int] = lambda *_: 0
    # whether options bound the memory of an engine on a shared GPU
    bounds_gpu_memory: Callable[[BackendConfig, EngineConfig], bool] = lambda *_: False
    # how query and document are passed to an engine
    score_form: Callable[[BackendConfig, str], ScoreForm] = lambda *_: "pair"
    # whether a row may crash the process of its engine
    may_end_process: Callable[[BackendConfig], bool] = lambda _: True
    # returns the cost of (input, cached input, output) tokens; None without prices
    cost: Callable[[BackendConfig], Callable[[int, int, int], float] | None] = lambda _: None
    # warning to log for engines on GPUs, if unproven
    gpu_warning: Callable[[], str] = lambda: ""
    endpoint: EndpointType | None = None  # of a remote engine
    # whether its engines read safetensors files in the folder of the model
    reads_safetensors: Callable[[BackendConfig], bool] = lambda _: True
    has_weights: bool = True  # it loads weights from the folder of the model
    forms_tp_groups: bool = False  # idle engines can join the steps of others
    refuses_native_options: bool = False  # refuses options of the native engine
    obeys_engine_options: bool = False  # all, including memory
    chooses_mode: bool = False  # its engines ask `raybatch.policy.choose_engine` how they run
    checks_grammars: bool = False  # as `raybatch.engine.sampling.grammars` does
    reads_images: bool = False
    has_adapters: bool = False  # rows may name some
    takes_vllm_options: bool = False  # in `engine_kwargs`
    # shares weights by shard and by activation exchange too; else by layer, by fetch only
    shares_shards: bool = False

    @property
    def is_endpoint(self) -> bool:
        """Whether the engine is remote."""
        return self.endpoint is not None


def check_checkpoint(folder: Path, *, as_native: bool) -> None:
    """Raise ConfigError if no backend can load the checkpoint in a folder.

    With `as_native` also if tensors are missing or have wrong shapes, for models that the native
    engine knows.
    """
    if read_json(folder / "config.json") is None:
        raise ConfigError(
            f"{folder} has no config.json; pass the folder of a Hugging Face checkpoint"
        )
    stored_tensors(folder)
    if as_native:
        try:
            spec = read_model_spec(folder)
        except ConfigError:
            return
        check_tensors(folder, spec, is_native=False)
