"""The folder that a job starts in, as a zip file: the job file, and what else is asked for.

Without a working directory it is the job file alone. With one, data, models, hidden files and
whatever is named like a secret stay at home, except for a source that lies in it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from raybatch.errors import ConfigError

EXCLUDED_SUFFIXES = (
    *(".parquet", ".pq", ".arrow", ".feather", ".npy", ".npz"),
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx"),
    *(".pem", ".key", ".p12", ".pfx"),
)
_EXCLUDED_NAMES = ("__pycache__", "node_modules", "venv", "env", "credentials", "credentials.json")
_KEY_FILES = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")
# what an output of raybatch has in its folder
_OUTPUT_MARK = "_raybatch"
# the job server takes no larger body
_MAX_BYTES = 100 << 20
_MOMENT = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A written zip file.

    Args:
        names: of the files in it, the job file first.
    """

    path: Path
    names: tuple[str, ...]


def write_bundle(
    path: Path,
    *,
    job_name: str,
    job_text: str,
    working_dir: Path | None = None,
    kept: tuple[Path, ...] = (),
    left_out: tuple[Path, ...] = (),
) -> Bundle:
    """Write the zip file of a job.

    Args:
        path: of the zip file.
        job_name: name of the job file in it.
        job_text: content of the job file.
        working_dir: folder whose files are sent along; None sends the job file alone.
        kept: files and folders that are sent whatever they are called.
        left_out: files and folders that are not sent, such as the sink.

    Raises:
        ConfigError: there is no such folder, or more in it than the job server takes.
    """
    files: dict[str, Path] = {}
    if working_dir is not None:
        root = working_dir.resolve()
        if not root.is_dir():
            raise ConfigError(f"--working-dir {working_dir}: there is no such folder")
        kept = tuple(each.resolve() for each in kept)
        out = tuple(each.resolve() for each in left_out)
        found = _files(root, kept, out)
        files = {file.relative_to(root).as_posix(): file for file in found}
    files.pop(job_name, None)
    _check_size(working_dir, files)
    with ZipFile(path, "w") as archive:
        _add(archive, job_name, job_text.encode(), mode=0o644)
        for name, file in sorted(files.items()):
            _add(archive, name, file.read_bytes(), mode=file.stat().st_mode & 0o755)
    return Bundle(path=path, names=(job_name, *sorted(files)))


def _files(root: Path, kept: tuple[Path, ...], left_out: tuple[Path, ...]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [name for name in folders if _is_entered(here / name, kept, left_out)]
        for name in names:
            file = here / name
            target = file.resolve()
            # a link out of the folder would send what nobody looked at
            is_inside = target.is_file() and target.is_relative_to(root)
            if is_inside and file not in left_out and (_is_below(file, kept) or _is_sent(file)):
                yield file


def _is_entered(folder: Path, kept: tuple[Path, ...], left_out: tuple[Path, ...]) -> bool:
    if folder in left_out:
        return False
    if _is_below(folder, kept) or any(each.is_relative_to(folder) for each in kept):
        return True
    is_output = (folder / _OUTPUT_MARK).is_dir()
    return not is_output and not _is_hidden(folder.name)


def _is_sent(file: Path) -> bool:
    name = file.name.lower()
    is_key = name in _KEY_FILES or name.endswith(EXCLUDED_SUFFIXES)
    return not is_key and not _is_hidden(file.name)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _EXCLUDED_NAMES


def _is_below(path: Path, places: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(place) for place in places)


def _check_size(working_dir: Path | None, files: dict[str, Path]) -> None:
    sizes = {name: file.stat().st_size for name, file in files.items()}
    if sum(sizes.values()) <= _MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    told = ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in largest)
    raise ConfigError(
        f"--working-dir {working_dir}: {sum(sizes.values()) >> 20} MiB, more than the "
        f"{_MAX_BYTES >> 20} MiB that a job server takes; the largest files are {told}; keep data "
        "where every host can read it, and name it by a path or a URI"
    )


def _add(archive: ZipFile, name: str, data: bytes, *, mode: int) -> None:
    # equal content is equal bytes, and is not sent a second time
    entry = ZipInfo(name, date_time=_MOMENT)
    entry.compress_type = ZIP_DEFLATED
    entry.external_attr = mode << 16
    archive.writestr(entry, data)
