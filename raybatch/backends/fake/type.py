"""The fake engine and its options, as raybatch knows them before one starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from raybatch.backends.backend_type import BackendType, EngineStart
from raybatch.backends.base import Backend
from raybatch.backends.fake.answers import Lengths
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.errors import ConfigError
from raybatch.records.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOptions:
    """Options of the fake backend.

    Args:
        step_s: seconds that one step takes.
        max_num_seqs: sequences that run at once.
        max_model_len: longest prompt plus output.
        lengths: "max" always generates `max_tokens`; "hash" from 1 to `max_tokens`.
        crashes: every prompt ends the process as soon as it runs.
        crash_on: a prompt with this token id ends the process as soon as it runs.
        raise_on: a prompt with this token id makes `poll` raise, as a broken engine does.
        error_on: a prompt with this token id becomes an error completion.
        start_s: seconds that a start takes.
        fail_start: every start raises.
        refuse_start: every start raises as for a wrong option.
        marks_dir: existing directory in which each start leaves a mark; needed by the next two.
        num_failing_starts: so many first starts raise.
        num_slow_starts: so many first started engines take `slow_step_s` per step.
        slow_step_s: see `num_slow_starts`.
        finished_log: a file that grows by one byte per finished sequence, over all engines.
        hold_file: an engine that has finished `hold_after` sequences takes no step while this file
            exists, so that what interrupts a run meets it at work.
        hold_after: see `hold_file`.
    """

    step_s: float = 0.0
    max_num_seqs: int = 64
    max_model_len: int = 32768
    lengths: Lengths = "max"
    crashes: bool = False
    crash_on: int | None = None
    raise_on: int | None = None
    error_on: int | None = None
    start_s: float = 0.0
    fail_start: bool = False
    refuse_start: bool = False
    marks_dir: str | None = None
    num_failing_starts: int = 0
    num_slow_starts: int = 0
    slow_step_s: float = 0.1
    finished_log: str | None = None
    hold_file: str | None = None
    hold_after: int = 0

    def __post_init__(self) -> None:
        if self.marks_dir is None and (self.num_failing_starts or self.num_slow_starts):
            raise ConfigError(
                "backend.options.marks_dir must name a directory when num_failing_starts or "
                "num_slow_starts is set"
            )


def _create(start: EngineStart) -> Backend:
    from raybatch.backends.fake.backend import FakeBackend

    return FakeBackend(_options(start.backend), start.backend.task)


def _options(backend: BackendConfig) -> FakeOptions:
    return from_mapping(FakeOptions, backend.options, where="backend.options")


def _check(backend: BackendConfig, engine: EngineConfig) -> None:
    _options(backend)


def _max_model_len(backend: BackendConfig, engine: EngineConfig, folder: Path | None) -> int | None:
    length: int | None = backend.options.get("max_model_len")
    return length


def _may_end_process(backend: BackendConfig) -> bool:
    return bool(backend.options.get("crashes")) or backend.options.get("crash_on") is not None


FAKE = BackendType(
    kind="fake",
    create=_create,
    max_model_len=_max_model_len,
    tasks=get_args(Task),
    check=_check,
    num_gpus=lambda *_: 0,
    may_end_process=_may_end_process,
    has_weights=False,
    has_adapters=True,
)
