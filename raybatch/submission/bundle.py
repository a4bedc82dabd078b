"""What is sent with a job: the folder that it starts in, as a zip file, and folders of raybatch.

Without a working directory the folder is the job file alone. With one, data, models, hidden files
and whatever is named like a secret stay at home, except for a source that lies in it.

Of a wheel its folders are sent: Ray would install the wheel itself with pip and with everything
that it requires, whatever the host has.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import raybatch
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
# the oldest moment that a zip file can hold, so that equal content is equal bytes
_MOMENT = (1980, 1, 1, 0, 0, 0)
# of wheels for any host
_TAG = "py3-none-any"


def write_bundle(
    path: Path,
    *,
    job_name: str,
    job_text: str,
    working_dir: Path | None = None,
    kept: tuple[Path, ...] = (),
    left_out: tuple[Path, ...] = (),
) -> tuple[str, ...]:
    """Write the zip file of a job, and return the names of the files in it, the job file first.

    Without `working_dir` the job file is sent alone. Files and folders in `kept` are sent whatever
    they are called, those in `left_out`, such as the sink, are not. ConfigError: there is no such
    folder, or more in it than the job server takes.
    """
    files: dict[str, Path] = {}
    if working_dir is not None:
        root = working_dir.resolve()
        if not root.is_dir():
            raise ConfigError(f"--working-dir {working_dir}: there is no such folder")
        kept = tuple(each.resolve() for each in kept)
        out = tuple(each.resolve() for each in left_out)
        chosen = _files(root, kept, out)
        files = {file.relative_to(root).as_posix(): file for file in chosen}
    files.pop(job_name, None)
    sizes = {name: file.stat().st_size for name, file in files.items()}
    if sum(sizes.values()) > _MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        listed = ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in largest)
        raise ConfigError(
            f"--working-dir {working_dir}: {sum(sizes.values()) >> 20} MiB, more than the "
            f"{_MAX_BYTES >> 20} MiB that a job server takes; the largest files are {listed}; keep "
            "data where every host can read it, and name it by a path or a URI"
        )
    with ZipFile(path, "w") as archive:
        _add(archive, job_name, job_text.encode(), mode=0o644)
        for name, file in sorted(files.items()):
            _add(archive, name, file.read_bytes(), mode=file.stat().st_mode & 0o755)
    return (job_name, *sorted(files))


def _files(root: Path, kept: tuple[Path, ...], left_out: tuple[Path, ...]) -> Iterator[Path]:
    def is_kept(path: Path) -> bool:
        return any(path.is_relative_to(place) for place in kept)

    def is_entered(folder: Path) -> bool:
        if folder in left_out:
            return False
        if is_kept(folder) or any(each.is_relative_to(folder) for each in kept):
            return True
        return not (folder / _OUTPUT_MARK).is_dir() and not _is_hidden(folder.name)

    for path, folders, names in os.walk(root):
        here = Path(path)
        folders[:] = [name for name in folders if is_entered(here / name)]
        for file in (here / name for name in names):
            target = file.resolve()
            # a link out of the folder would send what nobody looked at
            is_inside = target.is_file() and target.is_relative_to(root)
            name = file.name.lower()
            is_excluded = name in _KEY_FILES or name.endswith(EXCLUDED_SUFFIXES)
            is_sent = is_kept(file) or not (is_excluded or _is_hidden(file.name))
            if is_inside and file not in left_out and is_sent:
                yield file


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _EXCLUDED_NAMES


def _add(archive: ZipFile, name: str, data: bytes, *, mode: int) -> None:
    # equal content is equal bytes, and is not sent a second time
    entry = ZipInfo(name, date_time=_MOMENT)
    entry.compress_type = ZIP_DEFLATED
    entry.external_attr = mode << 16
    archive.writestr(entry, data)


def folders_of_package(package: Path, folder: Path) -> list[Path]:
    """Return the folder of the code that runs here, and one in `folder` that tells its version.

    ConfigError: the code has no folder, as in a zip file.
    """
    if not package.is_dir():
        raise ConfigError(
            f"{package} is no folder, and only a folder can be sent; give a wheel with --wheel "
            "PATH, or --wheel none where the hosts have the package"
        )
    name, version = package.name, raybatch.__version__
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (about / "METADATA").write_text(described, encoding="utf-8")
    return [package, about]


def folders_of_wheel(wheel: Path, folder: Path) -> list[Path]:
    """Unpack a wheel into `folder` and return its folders; ConfigError: it is none for any host."""
    try:
        with ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, BadZipFile) as error:
        raise ConfigError(f"--wheel {wheel}: not a wheel that can be read: {error}") from error
    if wheel.suffix != ".whl" or not any(folder.glob("*.dist-info/METADATA")):
        raise ConfigError(f"--wheel {wheel}: not a wheel; build one with 'pip wheel --no-deps .'")
    if not wheel.stem.endswith(_TAG):
        raise ConfigError(f"--wheel {wheel}: only {_TAG} wheels can be sent, put it into the image")
    return sorted(path for path in folder.iterdir() if path.is_dir())
