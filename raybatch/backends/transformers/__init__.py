"""The engine of transformers and its options, as raybatch knows them before one starts."""

import json
from pathlib import Path

from raybatch.backends.base import Backend, BackendType, EngineStart, check_checkpoint
from raybatch.backends.transformers.options import TransformersOptions
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.errors import ConfigError, error_text
from raybatch.installation import torch_command


def _create(start: EngineStart) -> Backend:
    from raybatch.backends.transformers.backend import create

    return create(start.model, _options(start.backend), start.engine)


def _options(backend: BackendConfig) -> TransformersOptions:
    return from_mapping(TransformersOptions, backend.options, where="backend.options")


def _max_model_len(backend: BackendConfig, engine: EngineConfig, folder: Path | None) -> int | None:
    """Return the positions that a model was made for; None where its config sets no limit."""
    assert folder is not None, "only an endpoint's model has no folder"
    from transformers import AutoConfig

    is_trusted = bool(backend.options.get("trust_remote_code"))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"transformers cannot read {folder / 'config.json'}: {error_text(error)}"
        ) from error
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


TRANSFORMERS = BackendType(
    kind="transformers",
    create=_create,
    max_model_len=_max_model_len,
    package="torch",
    packages=("raybatch", "torch", "transformers"),
    missing=lambda: (
        f"the transformers backend needs torch, which is not installed here: {torch_command()}"
    ),
    check=lambda backend, _: _options(backend),
    check_files=lambda folder, backend: check_checkpoint(
        folder, as_native=not _options(backend).trust_remote_code
    ),
    refuses_native_options=True,
    checks_grammars=True,
)
