"""LoRA adapters by name: where one lies, whether it can be used, and its folder on this host."""

import json
from pathlib import PurePosixPath
from typing import Any

import fsspec

from raybatch.errors import ConfigError, error_text
from raybatch.models.source import fetch_folder

_CONFIG = "adapter_config.json"
_PATTERNS = ("*.safetensors", "*.bin", "*.json")


def adapter_source(name: str, root: str | None) -> str:
    """Return the folder or URI of an adapter.

    Args:
        name: as a row has it: a folder or URI, or with `root` the name of a folder below that.
        root: folder or URI; None takes names for folders and URIs.

    Raises:
        ConfigError: the name leads out of the root.
    """
    if root is None:
        return name
    parts = PurePosixPath(name)
    if "://" in name or parts.is_absolute() or name.startswith("~") or ".." in parts.parts:
        raise ConfigError(f"the adapter {name!r} must be the name of a folder in {root!r}")
    return f"{root.rstrip('/')}/{name}"


def check_adapter(source: str, *, max_rank: int | None = None) -> None:
    """Raise ConfigError unless an adapter is there and of no higher rank."""
    try:
        with fsspec.open(f"{source.rstrip('/')}/{_CONFIG}", "rb") as file:
            config: Any = json.load(file)
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(f"no adapter in {source!r}: {error_text(error)}") from error
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int):
        raise ConfigError(f"the {_CONFIG} in {source!r} names no rank (r), so it is none of LoRA")
    if max_rank is not None and rank > max_rank:
        raise ConfigError(
            f"the adapter in {source!r} has rank {rank}, and max_lora_rank is {max_rank}"
        )


def resolve_adapter(source: str) -> str:
    """Return the folder of an adapter on this host, copied once where it lies elsewhere.

    Raises:
        ConfigError: nothing is there, or it cannot be read.
    """
    if "://" not in source:
        return source
    return str(fetch_folder(source, what="adapter", patterns=_PATTERNS, needed=_CONFIG))
