"""Says how the packages of an extra get into the environment that runs raybatch."""

import json
import os
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from raybatch.redaction import redacted

# what is asked for where it is needed
LAB = (
    "raybatch-lab, which is in the repository of raybatch and no part of its wheel; in a clone "
    "run: pip install -e ./lab"
)


def install_command(extra: str) -> str:
    """Return the command that adds an extra to the installation at hand, as a shell takes it.

    It names the clone, wheel or repository that raybatch was installed from. Where that is not
    known, is gone, or holds a secret, the answer says what to run in a clone. An index is never
    asked: the package of this name at PyPI is another project's.

    Example:
        >>> install_command("vllm")  # doctest: +SKIP
        "pip install -e '/src/raybatch[vllm]'"

    Source: PEP 610, which defines `direct_url.json`.
    """
    for distribution in metadata.distributions(name="raybatch"):
        # what a build leaves in a clone is found too, and has no such file
        if record := distribution.read_text("direct_url.json"):
            if (source := _source(record, extra)) is None:
                break
            by_uv = (distribution.read_text("INSTALLER") or "").strip() == "uv"
            return f"{_installer(by_uv=by_uv)} {source}"
    return f"in a clone of raybatch, {_installer(by_uv=False)} '.[{extra}]'"


def torch_command() -> str:
    """Return the command that adds torch, by the extra for CPUs or by the one for GPUs."""
    return f"{install_command('cpu')}, with gpu in place of cpu on a host with GPUs"


def pool_extension(name: str) -> Any | None:  # noqa: ANN401 - what another distribution made
    """Return what an installed distribution, such as raybatch-lab, has under a name for pools.

    None where none has it, or it is older than this raybatch. Nothing else of it is loaded.
    """
    for found in metadata.entry_points(group="raybatch.pool_extensions", name=name):
        with suppress(ImportError, AttributeError):
            return found.load()
    return None


def _installer(*, by_uv: bool) -> str:
    """Return the command that installs where this runs, which a shell may not have activated."""
    is_default = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    python = shlex.quote(sys.executable)
    if by_uv:
        return "uv pip install" if is_default else f"uv pip install --python {python}"
    return "pip install" if is_default else f"{python} -m pip install"


def _source(record: str, extra: str) -> str | None:
    """Return what pip is told to install, None where the record names nothing to install from."""
    try:
        fields = json.loads(record)
        url = fields["url"]
        path = unquote(urlsplit(url).path)
        if url.startswith("file:") and not Path(path).exists():
            return None
        if "dir_info" in fields:
            option = "-e " if fields["dir_info"].get("editable") else ""
            source = option + shlex.quote(f"{path}[{extra}]")
        else:
            if vcs := fields.get("vcs_info"):
                url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
            if folder := fields.get("subdirectory"):
                url += f"#subdirectory={folder}"
            source = shlex.quote(f"raybatch[{extra}] @ {url}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    # what has to be hidden would be missing in the command
    return source if redacted(source) == source else None
