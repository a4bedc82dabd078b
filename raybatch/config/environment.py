"""Reads the environment variables of the process; no other module does."""

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

from raybatch.errors import ConfigError

_KERNEL_VECTORS = ("avx512", "avx2", "plain")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def is_hub_offline() -> bool:
    """Return whether the environment forbids the model hub (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def environment() -> MutableMapping[str, str]:
    """Return all environment variables, including those that hold secrets."""
    return os.environ


def log_level() -> int | None:
    """Return the log level (RAYBATCH_LOG_LEVEL); None if unset."""
    name = _one_of("RAYBATCH_LOG_LEVEL", _LOG_LEVELS)
    return None if name is None else logging.getLevelNamesMapping()[name]


def kernel_vectors() -> str | None:
    """Return RAYBATCH_KERNEL_VECTORS: "avx512", "avx2" or "plain" for compiled kernels, or None."""
    return _one_of("RAYBATCH_KERNEL_VECTORS", _KERNEL_VECTORS)


def checks_engines() -> bool:
    """Return whether idle engines check their invariants (RAYBATCH_CHECK_ENGINE)."""
    return _one_of("RAYBATCH_CHECK_ENGINE", ("0", "1")) == "1"


def _one_of(variable: str, known: tuple[str, ...]) -> str | None:
    """Return the value of a variable in the case of `known`; None if unset."""
    name = secret_of(variable)
    names = {each.lower(): each for each in known}
    if name and name.lower() not in names:
        raise ConfigError(f"{variable} must be one of {', '.join(known)}, got {name!r}")
    return names.get(name.lower())


def armed_fault() -> str | None:
    """Return the fault point at which this process dies (RAYBATCH_FAULT), for recovery tests."""
    return os.environ.get("RAYBATCH_FAULT") or None


def secret_of(variable: str) -> str:
    """Return the value of an environment variable, "" if unset."""
    return os.environ.get(variable, "").strip()


def cache_dir() -> Path:
    """Return the folder for files that can be recreated: downloads and prepared weights.

    RAYBATCH_CACHE_DIR wins, then XDG_CACHE_HOME/raybatch, then ~/.cache/raybatch.
    """
    folder = os.environ.get("RAYBATCH_CACHE_DIR")
    if folder:
        return Path(folder).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path("~/.cache").expanduser()) / "raybatch"
