"""What is sent with a job: the folder that it starts in, as a zip file, and a wheel of raybatch.

Without a working directory the folder is the job file alone. With one, data, models, hidden files
and whatever is named like a secret stay at home, except for a source that lies in it.

Ray installs a wheel of `py_modules` with pip into a folder of its own and with everything that it
requires, whatever the host has; it tells wheels apart by name alone. So requirements are left
out, and the name holds a hash of the content.
"""

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

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
_TAG = "py3-none-any"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A written zip file, and the files in it, the job file first."""

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

    Without `working_dir` the job file is sent alone. Files and folders in `kept` are sent whatever
    they are called, those in `left_out`, such as the sink, are not.

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
        chosen = _files(root, kept, out)
        files = {file.relative_to(root).as_posix(): file for file in chosen}
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
    listed = ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in largest)
    raise ConfigError(
        f"--working-dir {working_dir}: {sum(sizes.values()) >> 20} MiB, more than the "
        f"{_MAX_BYTES >> 20} MiB that a job server takes; the largest files are {listed}; keep "
        "data where every host can read it, and name it by a path or a URI"
    )


def _add(archive: ZipFile, name: str, data: bytes, *, mode: int) -> None:
    # equal content is equal bytes, and is not sent a second time
    entry = ZipInfo(name, date_time=_MOMENT)
    entry.compress_type = ZIP_DEFLATED
    entry.external_attr = mode << 16
    archive.writestr(entry, data)


def pack_wheel(package: Path, folder: Path) -> Path:
    """Write a wheel of the code in `package` and return its path.

    It is the code that runs here, from a source tree, an editable or a usual installation.

    Raises:
        ConfigError: the package has no folder, as in a zip file.
    """
    if not package.is_dir():
        raise ConfigError(
            f"{package} is no folder, so no wheel can be made of it; give one with --wheel PATH, "
            "or --wheel none where the hosts have the package"
        )
    files = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    return _write_wheel(package.name, _version(package.name), files, folder)


def repack_wheel(wheel: Path, folder: Path) -> Path:
    """Write the content of `wheel` without its requirements and return the path.

    Raises:
        ConfigError: there is no such wheel, or it can be installed on some hosts only.
    """
    try:
        with ZipFile(wheel) as archive:
            inside = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    except (OSError, BadZipFile) as error:
        raise ConfigError(f"--wheel {wheel}: not a wheel that can be read: {error}") from error
    about = next((name for name in inside if name.endswith(".dist-info/METADATA")), None)
    if about is None or wheel.suffix != ".whl":
        raise ConfigError(f"--wheel {wheel}: not a wheel; build one with 'pip wheel --no-deps .'")
    if not wheel.stem.endswith(_TAG):
        raise ConfigError(f"--wheel {wheel}: only {_TAG} wheels can be sent, put it into the image")
    fields = BytesParser().parsebytes(inside[about], headersonly=True)
    files = {name: data for name, data in inside.items() if ".dist-info/" not in name}
    return _write_wheel(fields["Name"].replace("-", "_"), fields["Version"], files, folder)


def _write_wheel(name: str, version: str, files: Mapping[str, bytes], folder: Path) -> Path:
    info = f"{name}-{version}.dist-info"
    described = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: raybatch\nRoot-Is-Purelib: true\n"
            f"Tag: {_TAG}\nBuild: {_build(files)}\n"
        ).encode(),
    }
    record = [f"{path},sha256={_record_hash(data)},{len(data)}" for path, data in described.items()]
    record.append(f"{info}/RECORD,,")
    described[f"{info}/RECORD"] = "\n".join([*record, ""]).encode()
    path = folder / f"{name}-{version}-{_build(files)}-{_TAG}.whl"
    with ZipFile(path, "w") as archive:
        for inner, data in described.items():
            _add(archive, inner, data, mode=0o644)
    return path


def _build(files: Mapping[str, bytes]) -> str:
    """Return a build tag, which has to begin with a digit, that names the content."""
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{len(data)}\0".encode())
        digest.update(data)
    return f"0h{digest.hexdigest()[:16]}"


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "0+source"
