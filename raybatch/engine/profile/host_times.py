"""Times of ops of this host: taken once, kept, and the same for all its engines."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from raybatch.config import cache_dir
from raybatch.config.environment import kernel_vectors
from raybatch.engine.profile.cached_file import cpu_name, versions, write_cached
from raybatch.engine.weights.layout import exclusive
from raybatch.errors import error_text

Times = tuple[float, ...]

_logger = logging.getLogger(__name__)


def kept_times(
    names: Iterable[str], measure: Callable[[str], Times], *, kind: str, folder: Path | None = None
) -> Mapping[str, Times]:
    """Return the times of all names; those that the host does not know are measured.

    `kind` ("linear") names the file and its folder, by default one below the cache folder.
    """
    path = _path(folder or cache_dir() / f"{kind}-times")
    names = list(dict.fromkeys(names))
    known = _read(path)
    if any(name not in known for name in names):
        # engines of a host choose alike, as one of them times
        with ExitStack() as lock:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                lock.enter_context(exclusive(path.with_suffix(".lock")))
            known = _read(path)
            new = [name for name in names if name not in known]
            known = {**known, **{name: measure(name) for name in new}}
            write_cached(path, json.dumps(known), what=f"{kind} times")
    return known


def _path(folder: Path) -> Path:
    described = [
        cpu_name(),
        kernel_vectors(),
        torch.get_num_threads(),
        versions(("raybatch", "torch")),
    ]
    return folder / f"{hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> Mapping[str, Times]:
    try:
        found = json.loads(path.read_bytes())
        return {name: tuple(map(float, times)) for name, times in found.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _logger.warning("%s cannot be read and is made again: %s", path, error_text(error))
        return {}
