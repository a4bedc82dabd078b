"""Cached measurements of a host: what identifies the host, and atomic writes.

Imports no torch: the driver looks such files up as well.
"""

import logging
import os
import platform
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from raybatch.errors import error_text

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


def write_cached(path: Path, text: str, *, what: str) -> None:
    """Write a file so that readers see all of it or nothing; a full disk only costs time.

    `what` names it in a warning.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a folder of its own goes away with what was not moved out of it
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as staged:
            whole = Path(staged) / path.name
            whole.write_text(text + "\n", encoding="utf-8")
            os.replace(whole, path)
    except OSError as error:
        _logger.warning("the %s could not be kept in %s: %s", what, path, error_text(error))
