"""JSON files of a checkpoint, each of which holds one object."""

import json
from pathlib import Path
from typing import Any

from raybatch.errors import ConfigError

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None where there is no file.

    Raises:
        ConfigError: it is not JSON, or no object.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(loaded).__name__}")
    return loaded
