"""What the config of any checkpoint of Hugging Face says, whether or not we have the model."""

import json
from pathlib import Path

from raybatch.errors import ConfigError, error_text


def read_max_positions(path: Path, *, trust_remote_code: bool = False) -> int | None:
    """Return the positions that a model was made for; None where its config sets no limit.

    Args:
        path: folder of the checkpoint.
        trust_remote_code: run the Python file that the config comes with.

    Raises:
        ConfigError: the installed transformers cannot read the config.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"transformers cannot read {path / 'config.json'}: {error_text(error)}"
        ) from error
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)
