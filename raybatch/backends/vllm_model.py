"""What the driver has to know of a model that only vLLM runs, read without vLLM."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raybatch.errors import ConfigError, error_text

__all__ = ["model_length"]

# where configs keep the length of the context; the smallest counts
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# kinds of rotary scaling whose configs name the scaled length already
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
# of models that name no length, as in vLLM
_DEFAULT_LENGTH = 2048


def model_length(model_dir: Path, *, trust_remote_code: bool = False) -> int:
    """Return the longest prompt plus output that vLLM takes of a model by itself.

    Args:
        model_dir: folder of the checkpoint.
        trust_remote_code: run the code in the folder where transformers lacks the architecture.

    Raises:
        ConfigError: there is no config that can be read.
    """
    config = _read_config(model_dir, trust_remote_code=trust_remote_code)
    if config.get("model_max_length"):
        length = float(config["model_max_length"])
    else:
        named = [config[name] for name in _LENGTHS if isinstance(config.get(name), int)]
        length = float(min(named, default=_DEFAULT_LENGTH))
    scalings = _rope_scalings(config)
    if any(_kind(scaling) == "longrope" for scaling in scalings):
        return int(config.get("original_max_position_embeddings") or length)
    if "gemma3" not in str(config.get("model_type")):
        factors = [s.get("factor") for s in scalings if _kind(s) not in _SCALED]
        length *= next((float(factor) for factor in reversed(factors) if factor), 1.0)
    return int(length)


def _read_config(model_dir: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the config of the text model: of transformers with its defaults, else as it lies."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error_text(error)}); pass the folder of a Hugging Face "
            "checkpoint"
        ) from error
    # slow to load, and other backends do without
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        config: dict[str, Any] = loaded.get_text_config().to_dict()
    except Exception:  # what transformers does not know, vLLM may
        config = raw.get("text_config") or raw
    return config


def _rope_scalings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary options: one for all layers, or one for each kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return [value for value in rope.values() if isinstance(value, Mapping)]
    return [rope]


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")
