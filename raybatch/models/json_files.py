"""JSON files of a checkpoint and their values; backends for unsupported architectures."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raybatch.errors import ConfigError

# for a text model with features that the native engine lacks
SAME_MODEL = (
    "set backend: vllm, or backend: transformers, which runs every causal language model of "
    "transformers and is slow"
)
_IMAGES = "set backend: vllm, which runs many models of text and images"
_NUMBERS = (
    "a model that generates no text may run with backend: vllm and task: embed, classify or score"
)


def backends_for(architectures: Sequence[str]) -> str:
    """Return advice on which options to set for a checkpoint that the native engine cannot run.

    `architectures` are those of its config.json. Whether vLLM supports them is only known on hosts
    that have it.

    Example:
        >>> backends_for(["Gemma2ForCausalLM"]).split(",")[0]
        'set backend: vllm'
    """
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return SAME_MODEL
    if any(name.endswith("ForConditionalGeneration") for name in architectures):
        return _IMAGES
    return _NUMBERS if architectures else SAME_MODEL


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no file.

    Raises:
        ConfigError: not JSON, or not an object.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must contain a JSON object, got {type(loaded).__name__}")
    return loaded


@dataclass(frozen=True, slots=True)
class JsonValues:
    """Reads values of a JSON object, with the file name in error messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - of JSON
        return self.values.get(key, default)

    def size(self, key: str, default: int | None = None, *, maximum: int | None = None) -> int:
        """Return the integer at `key`, 1 to `maximum`; raises ConfigError for any other value."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self.where}: {key} must be a whole number of at least 1, got {value!r}"
            )
        if maximum is not None and value > maximum:
            raise ConfigError(f"{self.where}: {key} must be at most {maximum}, got {value}")
        return value

    def number(self, key: str, default: float, *, may_be_zero: bool = False) -> float:
        """Return the finite number at `key`, above 0, or at least 0 with `may_be_zero`.

        Raises ConfigError for any other value.
        """
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf or not (value or may_be_zero):
            least = "of at least 0" if may_be_zero else "above 0"
            raise ConfigError(f"{self.where}: {key} must be a finite number {least}, got {value!r}")
        return float(value)
