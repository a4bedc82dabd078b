"""What the driver knows of a backend before any engine starts; imports none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raybatch.backends.openai_options import decisive_options
from raybatch.backends.vllm_args import answer_options, gpus_per_engine, vllm_options
from raybatch.backends.vllm_model import model_length
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.hub_config import read_max_positions
from raybatch.engine.model_config import read_model_spec

__all__ = ["answering_options", "gpus_of_engine", "length_of_model"]


def gpus_of_engine(backend: BackendConfig, engine: EngineConfig) -> int:
    """Return the GPUs that one engine computes on, where there are any."""
    if backend.kind in ("fake", "openai") or engine.device == "cpu":
        return 0
    if backend.kind == "vllm":
        return gpus_per_engine(vllm_options(backend, engine))
    return 1


def length_of_model(
    backend: BackendConfig, engine: EngineConfig, model_dir: Path | None
) -> int | None:
    """Return the longest prompt plus output of a model; None if nothing says it.

    Args:
        backend: that runs it.
        engine: options of the engine.
        model_dir: its folder; None where the model is somebody else's.

    Raises:
        ConfigError: the backend cannot run the model, as far as its config tells.
    """
    if model_dir is None or backend.kind in ("fake", "openai"):
        length: int | None = backend.options.get("max_model_len")
        return length
    if backend.kind == "native":
        return read_model_spec(model_dir).max_model_len
    if backend.kind == "vllm":
        kwargs = vllm_options(backend, engine).engine_kwargs
        is_trusted = bool(kwargs.get("trust_remote_code", False))
        return model_length(model_dir, trust_remote_code=is_trusted)
    is_trusted = bool(backend.options.get("trust_remote_code"))
    return read_max_positions(model_dir, trust_remote_code=is_trusted)


def answering_options(backend: BackendConfig, model: str) -> Mapping[str, Any]:
    """Return kind and options of a backend as far as they decide answers.

    Args:
        backend: that answers.
        model: of the stage, which an endpoint is asked for where its options name no other.
    """
    options = backend.options
    if backend.kind == "vllm":
        options = answer_options(options)
    elif backend.kind == "openai":
        options = decisive_options(options, model)
    return {"kind": backend.kind, "options": dict(options)}
