"""A wheel of raybatch for the hosts of a cluster: the code that runs here, and no requirements.

Ray installs a wheel of `py_modules` with pip into a folder of its own and with everything that it
requires, whatever the host has; it tells wheels apart by name alone. So requirements are left
out, and the name holds a hash of the content.
"""

import base64
import hashlib
from collections.abc import Mapping
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from raybatch.errors import ConfigError

_TAG = "py3-none-any"
# the oldest moment that a zip file can hold, so that equal content is equal bytes
_MOMENT = (1980, 1, 1, 0, 0, 0)


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
    return _write(package.name, _version(package.name), files, folder)


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
    return _write(fields["Name"].replace("-", "_"), fields["Version"], files, folder)


def _write(name: str, version: str, files: Mapping[str, bytes], folder: Path) -> Path:
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
            entry = ZipInfo(inner, date_time=_MOMENT)
            entry.compress_type = ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
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
