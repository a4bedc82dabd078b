"""What was measured on a host, on disk: one file a measurement, named by all that it depends on.

Imports no torch: the driver looks such files up as well.
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
    # without a model name, the architecture has to do
    return names[0] if names else platform.machine()


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    installed = {}
    for package in packages:
        # a source tree that is not installed has no version
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def cached_path(kind: str, described: Mapping[str, Any], folder: Path | None) -> Path:
    """Return the file of a measurement; its name is a hash of `described`.

    `kind` ("cost-models") is the folder below the cache folder, where `folder` is None.
    """
    text = json.dumps(described, sort_keys=True, default=repr)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return (folder or cache_dir() / kind) / f"{name}.json"


def read_cached(cls: type[_Record], path: Path, *, what: str) -> _Record | None:
    """Read a record that `write_cached` wrote; None if there is none, or a broken one.

    A broken one is warned about, as what `what` says.
    """
    try:
        return from_plain(cls, json.loads(path.read_bytes()), where=path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        message = "the %s %s cannot be read and is measured again: %s"
        _logger.warning(message, what, path, error_text(error))
        return None


def write_cached(record: Any, path: Path, *, what: str) -> None:  # noqa: ANN401 - any dataclass
    """Write a record so that readers see all of it or nothing; a full disk only costs time.

    `what` names it in a warning.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a folder of its own goes away with what was not moved out of it
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as staged:
            whole = Path(staged) / path.name
            whole.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
            os.replace(whole, path)
    except OSError as error:
        _logger.warning("the %s could not be kept in %s: %s", what, path, error_text(error))
