"""The fake engine, as raybatch knows it before one starts."""

from pathlib import Path
from typing import get_args

from raybatch.backends.backend_type import BackendType, EngineStart
from raybatch.backends.base import Backend
from raybatch.backends.fake.options import FakeOptions
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.records.types import Task


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
