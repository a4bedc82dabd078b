"""The engine of transformers and its options, as raybatch knows them before one starts."""

import json
from pathlib import Path

from raybatch.backends.base import Backend, BackendType, EngineStart, check_checkpoint
from raybatch.config import BackendConfig, EngineConfig, from_mapping
from raybatch.config.checked import dataclass
from raybatch.config.option import CHECKED, Answers, Positive, Speed, options
from raybatch.errors import ConfigError, error_text
from raybatch.installation import torch_command


@options("backend.options.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class TransformersOptions:
    """How transformers loads and runs the model."""

    attn_implementation: Answers[str | None] = None
    """As in transformers, such as "sdpa" or "eager"; None: its choice."""
    trust_remote_code: Answers[bool] = False
    """Run the Python files that come with the model."""
    max_num_seqs: Speed[Positive] = 4
    """Running sequences; each is computed alone, so more only takes more memory."""


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
