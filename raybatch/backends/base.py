"""What every backend is: the protocol of one engine, and what is known of a kind before one starts.

A backend is added by a module or folder here with a class of the protocol and a `BackendType`, and
a line in `registry.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

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

# a query and a document as one sequence with a border, as one without, or as two sequences
ScoreForm = Literal["pair", "joined", "apart"]


class BackendExtension(Protocol):
    """What an engine does together with others; of the thread that polls.

    Its own methods are steps that an extension of the pool takes by name; what raises TeamError
    there leaves the engine to go on alone.
    """

    @property
    def is_in_rounds(self) -> bool:
        """Whether `serve` is to be called now and then while this engine has no rows."""

    def serve(self) -> None:
        """Run a pass without rows where another engine waits for it; else nothing, at once."""

    def close(self) -> None:
        """End what runs in the background."""


# of an engine that does nothing together with others
NO_EXTENSIONS: Mapping[str, BackendExtension] = MappingProxyType({})


class Backend(Protocol):
    """One engine inside one replica; owned by one thread.

    Feedback flows only through `poll`, `stats` and `capacity`. A bad request comes back from
    `poll` as completions with an error, one per sample; only a broken engine raises. The suite in
    `tests/backends/test_contract.py` holds every backend to this.
    """

    def capacity(self) -> Capacity:
        """Return what the engine can hold now; one that chooses anew how it runs changes it."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in this order; never blocks and never raises for a row.

        Raises:
            ValueError: a request id that is still in the backend.
        """

    def poll(self) -> list[Completion]:
        """Run at most one engine step and return the samples that finished in it."""

    def watch(self, scheduled: Callable[[], None]) -> None:
        """Call `scheduled` in each step once its rows are known, where a step may take long."""

    def num_unfinished(self) -> int:
        """Return the number of submitted requests that have samples to come."""

    def drain(self) -> list[Request]:
        """Give back the requests that have not started, last submitted last."""

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop requests and free what they hold; no completion comes for them.

        Ids that are not in the backend are ignored.
        """

    def begun(self, min_new_tokens: int) -> list[SequenceState]:
        """Return sequences that run on, as `restore` takes them.

        Each has `min_new_tokens` beyond those returned here before.
        """

    def export(self, request_ids: Collection[int], *, with_kv: bool = False) -> list[SequenceState]:
        """Take the unfinished sequences of these requests out as data, in order of arrival.

        `with_kv` takes their KV along, where the engine has a way to read it.
        """

    def restore(self, states: Sequence[SequenceState]) -> None:
        """Go on with sequences that another engine exported, or this one."""

    def progress(self) -> RowProgress:
        """Return how far the running sequences are, as far as the engine tells."""

    def peek(self, request_id: int, from_block: int, max_blocks: int) -> SequenceState | None:
        """Return a running row with copies of whole blocks of its KV; it goes on.

        None where the engine gives no KV, or the row has other samples, or does not decode now.
        """

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Keep KV memory for a row that is to come; False where there is none for it."""

    def receive(self, state: SequenceState) -> bool:
        """Take copies of blocks behind those that came before; False where they are of no use."""

    def depart(self, request_id: int, from_block: int | None) -> list[SequenceState]:
        """Take a row out, as `export` does, with its KV from a block on, or without.

        What `restore` needs to go on with it here stays until then, or until `forget`.
        """

    def forget(self, request_id: int) -> None:
        """Free what is kept for a row that has left, or will not come."""

    @property
    def extensions(self) -> Mapping[str, BackendExtension]:
        """What the engine does together with others, by its name in the pool."""

    def stats(self) -> ReplicaStats:
        """Return the counters."""

    def close(self) -> None:
        """Free everything; the backend is not used again."""


class RecomputingBackend(ABC):
    """The part of the `Backend` protocol about moves, for engines that neither give nor take KV.

    A row that moves is computed again from its tokens; and they do nothing together.
    """

    extensions = NO_EXTENSIONS

    @abstractmethod
    def export(
        self, request_ids: Collection[int], *, with_kv: bool = False
    ) -> list[SequenceState]: ...

    def watch(self, scheduled: Callable[[], None]) -> None:  # noqa: B027 - other engines have none
        """Do nothing."""

    def progress(self) -> RowProgress:
        return progress_of(())

    def peek(self, request_id: int, from_block: int, max_blocks: int) -> SequenceState | None:
        return None

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        return False

    def receive(self, state: SequenceState) -> bool:
        return False

    def depart(self, request_id: int, from_block: int | None) -> list[SequenceState]:
        return self.export([request_id])

    def forget(self, request_id: int) -> None:  # noqa: B027 - nothing is kept
        """Do nothing."""


def progress_of(running: Iterable[tuple[Request, int]]) -> RowProgress:
    """Return how far sequences are, each given by its request and its generated tokens."""
    rows = [(r.request_id, len(r.prompt_token_ids) + n, n) for r, n in running]
    ids, num_tokens, num_generated = np.array(rows, np.int64).reshape(-1, 3).T
    return RowProgress(request_ids=ids, num_tokens=num_tokens, num_generated=num_generated)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStart:
    """What one engine is started with."""

    model: str  # checkpoint directory, hub id or URI; for an endpoint the name there
    backend: BackendConfig
    engine: EngineConfig
    num_engines_on_host: int = 1  # which share its memory
    num_replicas: int | None = 1  # of the pool; None: as many as there is room for
    share: ShareLink | None = None  # to others with which it shares weights


def _takes_no_options(backend: BackendConfig, engine: EngineConfig) -> None:
    if backend.options:
        names = ", ".join(sorted(backend.options))
        raise ConfigError(f"backend.options: the {backend.kind} backend takes none, got {names}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendType:
    """A kind of backend; its functions import no engine but `create`."""

    kind: str
    create: Callable[[EngineStart], Backend]
    # longest prompt plus output of the model in a folder, None for that of an endpoint; None if
    # nothing says it, and ConfigError for a model that the backend cannot run, by its config
    max_model_len: Callable[[BackendConfig, EngineConfig, Path | None], int | None]
    package: str = ""  # that has to be installed where engines start; `missing` is the error
    missing: Callable[[], str] = lambda: ""
    # why the version of it that is installed on this host cannot be used, None where it can
    why_unusable: Callable[[], str | None] = lambda: None
    packages: tuple[str, ...] = ("raybatch",)  # whose versions decide how fast an engine is
    tasks: tuple[Task, ...] = ("generate",)
    makes: str = "generates text"  # for the error of another task
    # raises ConfigError for options of backend or engine that it cannot take
    check: Callable[[BackendConfig, EngineConfig], object] = _takes_no_options
    # refuses a folder that its engines cannot run, as far as headers tell
    check_files: Callable[[Path, BackendConfig], None] = lambda *_: None
    # of its options and the stage's model, what decides answers
    answering: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda options, _: options
    # output columns in addition to the text
    parsed_columns: Callable[[BackendConfig, EngineConfig], tuple[str, ...]] = lambda *_: ()
    # that one engine computes on, where it computes on any
    num_gpus: Callable[[BackendConfig, EngineConfig], int] = lambda *_: 1
    # ranks of one engine that are actors of Ray
    num_actors: Callable[[BackendConfig, EngineConfig], int] = lambda *_: 0
    # whether options bound what an engine takes of a GPU that it shares
    bounds_gpu_memory: Callable[[BackendConfig, EngineConfig], bool] = lambda *_: False
    # how a query and a document go into an engine
    score_form: Callable[[BackendConfig, str], ScoreForm] = lambda *_: "pair"
    # whether a row may take the process of its engine along
    may_end_process: Callable[[BackendConfig], bool] = lambda _: True
    has_prices: Callable[[BackendConfig], bool] = lambda _: False
    # what is logged of engines on GPUs, for lack of proof
    gpu_warning: Callable[[], str] = lambda: ""
    # the engine runs elsewhere: it renders, tokenizes and fetches images by itself, and nothing is
    # computed here, so that one has room for hundreds of rows
    is_endpoint: bool = False
    # whether its engines read safetensors files in the folder of the model
    reads_safetensors: Callable[[BackendConfig], bool] = lambda _: True
    has_weights: bool = True  # it computes with those in the folder of the model
    forms_teams: bool = False  # some of its engines can compute the steps of others
    refuses_native_options: bool = False  # that only the native engine has
    obeys_engine_options: bool = False  # all of them, so memory
    chooses_way: bool = False  # its engines ask `raybatch.policy.choose_engine` how they run
    checks_grammars: bool = False  # as `raybatch.engine.sampling.grammars` does
    reads_images: bool = False
    has_adapters: bool = False  # rows may name some
    takes_vllm_options: bool = False  # in `engine_kwargs`
    # shares weights by tile too, and in rounds; else by layer, with copies alone
    shares_tiles: bool = False


def check_checkpoint(folder: Path, *, as_native: bool) -> None:
    """Raise ConfigError for a checkpoint that nobody can load.

    With `as_native` also for tensors that are missing or do not fit, where the native engine knows
    the model too.
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
