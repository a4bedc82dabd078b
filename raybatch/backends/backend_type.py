"""What raybatch knows of a kind of backend before any engine starts, as one record.

A backend is added by a folder next to this file with such a record, and a line in `registry.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raybatch.backends.base import Backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.records.types import Task

# a query and a document as one sequence with a border, as one without, or as two sequences
ScoreForm = Literal["pair", "joined", "apart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStart:
    """What one engine is started with.

    Args:
        model: checkpoint directory, hub id or URI; for an endpoint the name there.
        num_engines_on_host: engines that share the host's memory.
        num_replicas: of the pool, which share the budgets of an endpoint.
    """

    model: str
    backend: BackendConfig
    engine: EngineConfig
    num_engines_on_host: int = 1
    num_replicas: int = 1


def _takes_no_options(backend: BackendConfig, engine: EngineConfig) -> None:
    if backend.options:
        names = ", ".join(sorted(backend.options))
        raise ConfigError(f"backend.options: the {backend.kind} backend takes none, got {names}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendType:
    """A kind of backend; its functions import no engine but `create`.

    Args:
        kind: its name in `backend.kind`.
        create: starts an engine, ready for `submit`.
        max_model_len: longest prompt plus output of the model in a folder, None for the folder of
            an endpoint; returns None if nothing says it. Raises ConfigError for a model that the
            backend cannot run, as far as its config tells.
        package: that has to be installed where engines start, "" for none; `missing` is the error.
        tasks: that its engines have; `makes` is what they do, for the error of another one.
        check: raises ConfigError for options of backend or engine that it cannot take.
        check_files: refuses a folder that its engines cannot run, as far as headers tell.
        answering: of its options and the stage's model, what decides answers.
        parsed_columns: output columns in addition to the text.
        num_gpus: GPUs that one engine computes on, where it computes on any.
        num_actors: ranks of one engine that are actors of Ray; 0 where it has none of its own.
        bounds_gpu_memory: whether options bound what an engine takes of a GPU that it shares.
        score_form: how a query and a document go into an engine.
        may_end_process: whether a row may take the process of its engine along.
        has_prices: whether answers have prices of their own.
        gpu_warning: what is logged of engines on GPUs, for lack of proof.
        is_endpoint: the engine runs elsewhere. It renders, tokenizes and fetches images by
            itself, and nothing is computed here, so that one has room for hundreds of rows.
        has_weights: it computes with those in the folder of the model.
        refuses_native_options: an option that only the native engine has is an error.
        obeys_engine_options: all of `EngineConfig`, so memory and `engine.admission` among them.
        checks_grammars: as `raybatch.engine.sampling.grammars` does.
        reads_images: prompts may have images.
        has_adapters: rows may name some.
        takes_vllm_options: in `engine_kwargs`.
    """

    kind: str
    create: Callable[[EngineStart], Backend]
    max_model_len: Callable[[BackendConfig, EngineConfig, Path | None], int | None]
    package: str = ""
    missing: str = ""
    tasks: tuple[Task, ...] = ("generate",)
    makes: str = "generates text"
    check: Callable[[BackendConfig, EngineConfig], None] = _takes_no_options
    check_files: Callable[[Path, BackendConfig], None] = lambda *_: None
    answering: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda options, _: options
    parsed_columns: Callable[[BackendConfig, EngineConfig], tuple[str, ...]] = lambda *_: ()
    num_gpus: Callable[[BackendConfig, EngineConfig], int] = lambda *_: 1
    num_actors: Callable[[BackendConfig, EngineConfig], int] = lambda *_: 0
    bounds_gpu_memory: Callable[[BackendConfig, EngineConfig], bool] = lambda *_: False
    score_form: Callable[[BackendConfig, str], ScoreForm] = lambda *_: "pair"
    may_end_process: Callable[[BackendConfig], bool] = lambda _: True
    has_prices: Callable[[BackendConfig], bool] = lambda _: False
    gpu_warning: str = ""
    is_endpoint: bool = False
    has_weights: bool = True
    refuses_native_options: bool = False
    obeys_engine_options: bool = False
    checks_grammars: bool = False
    reads_images: bool = False
    has_adapters: bool = False
    takes_vllm_options: bool = False
