"""Cache of measurements on disk: one file each, named by a hash of everything it depends on.

Imports no torch, as the driver reads these files too.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from raybatch.config import cache_dir, from_plain
from raybatch.errors import error_text

_Record = TypeVar("_Record")

_logger = logging.getLogger(__name__)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # fall back to the architecture
    return names[0] if names else platform.machine()


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    installed = {}
    for package in packages:
        # a source tree without installation has no version
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def cached_path(kind: str, described: Mapping[str, Any], folder: Path | None) -> Path:
    """Return the file of a measurement; its name is a hash of `described`.

    `folder` None is the folder named `kind`, such as "cost-models", below the cache folder.
    """
    text = json.dumps(described, sort_keys=True, default=repr)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return (folder or cache_dir() / kind) / f"{name}.json"


def read_cached(cls: type[_Record], path: Path, *, what: str) -> _Record | None:
    """Read a record of class `cls` that `write_cached` wrote; None if it is missing or invalid.

    If it is invalid, a warning names it `what`.
    """
    try:
        return from_plain(cls, json.loads(path.read_bytes()), where=path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        message = "could not read the %s %s, measuring again: %s"
        _logger.warning(message, what, path, error_text(error))
        return None


def write_cached(record: Any, path: Path, *, what: str) -> None:  # noqa: ANN401 - any dataclass
    """Write a record, a dataclass, atomically; if that fails, a warning names it `what`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a temporary folder is removed with everything that was not moved
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as staged:
            whole = Path(staged) / path.name
            whole.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
            os.replace(whole, path)
    except OSError as error:
        _logger.warning("could not cache the %s in %s: %s", what, path, error_text(error))
