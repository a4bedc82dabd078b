"""The uploads of a job: its working directory as a zip file, and the folders of raybatch.

Without a working directory only the job file is sent. With one, data, models, hidden files and
files named like secrets are excluded, except for a source inside it.

A wheel is unpacked and its folders are sent: Ray would install the wheel with pip and all its
requirements, whatever the host has.
"""

import os
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
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
# marks a folder as an output of raybatch
_OUTPUT_MARK = "_raybatch"
# upload limit of the job server
_MAX_BYTES = 100 << 20
# oldest time of a zip file, so that equal content is equal bytes
_MOMENT = (1980, 1, 1, 0, 0, 0)
# tag of wheels for any host
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
    """Write the zip file of a job, and return the names of its files, the job file first.

    Without `working_dir` only the job file is sent. Files and folders in `kept` are always sent,
    those in `left_out`, such as the sink, never. ConfigError: the folder does not exist, or is
    larger than the job server accepts.
    """
    files: dict[str, Path] = {}
    if working_dir is not None:
        root = working_dir.resolve()
        if not root.is_dir():
            raise ConfigError(f"--working-dir {working_dir}: folder not found")
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
            f"--working-dir {working_dir}: {sum(sizes.values()) >> 20} MiB is above the upload "
            f"limit of {_MAX_BYTES >> 20} MiB; the largest files are {listed}; put data where "
            "every host can read it, and name it by a path or a URI"
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
            # symlinks out of the folder are not followed
            is_inside = target.is_file() and target.is_relative_to(root)
            name = file.name.lower()
            is_excluded = name in _KEY_FILES or name.endswith(EXCLUDED_SUFFIXES)
            is_sent = is_kept(file) or not (is_excluded or _is_hidden(file.name))
            if is_inside and file not in left_out and is_sent:
                yield file


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _EXCLUDED_NAMES


def _add(archive: ZipFile, name: str, data: bytes, *, mode: int) -> None:
    # equal content is equal bytes, and is not uploaded again
    entry = ZipInfo(name, date_time=_MOMENT)
    entry.compress_type = ZIP_DEFLATED
    entry.external_attr = mode << 16
    archive.writestr(entry, data)


def folders_of_package(package: Path, folder: Path) -> list[Path]:
    """Return the folder of the running code, and a metadata folder in `folder` with its version.

    ConfigError: the code is not in a folder but in a zip file.
    """
    if not package.is_dir():
        raise ConfigError(
            f"{package} is not a folder and cannot be sent; use --wheel PATH, or --wheel none if "
            "the hosts have the package"
        )
    return [package, _metadata_folder(folder, package.name, raybatch.__version__)]


def folders_of_distributions(kind: str, folder: Path) -> list[Path]:
    """Return what `folders_of_package` does for the distributions that engines may need.

    They are the one that adds a kind of backend, and raybatch-extensions if it is installed. [] for
    a kind of raybatch itself without extensions.
    """
    points = list(metadata.entry_points(group="raybatch.backends", name=kind))
    points += metadata.entry_points(group="raybatch.engine_extensions")
    folders: list[Path] = []
    packages = {point.module.partition(".")[0]: point.dist for point in points}
    for package, distribution in packages.items():
        found = find_spec(package)
        for place in (found and found.submodule_search_locations) or ():
            assert distribution is not None, "entry points of the environment have one"
            about = _metadata_folder(folder, package, distribution.version)
            named = distribution.read_text("entry_points.txt") or ""
            (about / "entry_points.txt").write_text(named, encoding="utf-8")
            folders += [Path(place), about]
    return folders


def _metadata_folder(folder: Path, name: str, version: str) -> Path:
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (about / "METADATA").write_text(described, encoding="utf-8")
    return about


def folders_of_wheel(wheel: Path, folder: Path) -> list[Path]:
    """Unpack a wheel into `folder` and return its folders; ConfigError: it is platform-specific."""
    try:
        with ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, BadZipFile) as error:
        raise ConfigError(f"--wheel {wheel}: cannot read the wheel: {error}") from error
    if wheel.suffix != ".whl" or not any(folder.glob("*.dist-info/METADATA")):
        raise ConfigError(f"--wheel {wheel}: not a wheel; build one with 'pip wheel --no-deps .'")
    if not wheel.stem.endswith(_TAG):
        raise ConfigError(
            f"--wheel {wheel}: only {_TAG} wheels can be sent; install it in the image"
        )
    return sorted(path for path in folder.iterdir() if path.is_dir())
