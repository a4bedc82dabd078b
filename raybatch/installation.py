"""Commands that install extras and other distributions, and loading of their entry points."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from raybatch.errors import MissingDependency
from raybatch.redaction import redacted

logger = logging.getLogger(__name__)

_IN_A_CLONE = "which is not part of the raybatch wheel; in a clone of raybatch run: pip install -e"
# message ends that name the distribution to install
EXTENSIONS = f"raybatch-extensions, {_IN_A_CLONE} ./raybatch-extensions"
LAB = f"raybatch-lab, {_IN_A_CLONE} ./raybatch-extensions -e ./lab"
OPENAI = f"raybatch-openai, {_IN_A_CLONE} ./raybatch-openai"
SUBMIT = f"raybatch-submit, {_IN_A_CLONE} ./raybatch-submit"
TABLES = f"raybatch-tables, {_IN_A_CLONE} './raybatch-tables[all]'"


def install_command(extra: str) -> str:
    """Return the shell command that adds an extra to this installation.

    It names the clone, wheel or repository that raybatch was installed from. If that is unknown,
    deleted or contains a secret, the command is for a clone. No index is used: the package of this
    name at PyPI is another project's.

    Example:
        >>> install_command("vllm")  # doctest: +SKIP
        "pip install -e '/src/raybatch[vllm]'"

    Source: PEP 610, which defines `direct_url.json`.
    """
    for distribution in metadata.distributions(name="raybatch"):
        # metadata that a build leaves in a clone has no such file
        if record := distribution.read_text("direct_url.json"):
            if (source := _source(record, extra)) is None:
                break
            by_uv = (distribution.read_text("INSTALLER") or "").strip() == "uv"
            return f"{_installer(by_uv=by_uv)} {source}"
    return f"in a clone of raybatch, {_installer(by_uv=False)} '.[{extra}]'"


def torch_command() -> str:
    """Return the command that adds torch, with the extra for CPUs or for GPUs."""
    return f"{install_command('cpu')}, with gpu in place of cpu on a host with GPUs"


def engine_extension(name: str) -> Any | None:  # noqa: ANN401 - what another distribution made
    """Return what makes the engine extension `name`; None as in `pool_extension`."""
    return _loaded(metadata.entry_points(group="raybatch.engine_extensions", name=name)).get(name)


def weight_sharing() -> Any:  # noqa: ANN401
    """Return the module of raybatch-extensions for weights that replicas share.

    Raises MissingDependency: it is missing or incompatible with this version.
    """
    if (found := _loaded(metadata.entry_points(group="raybatch.sharing")).get("sharing")) is None:
        raise MissingDependency(f'leave engine.weights out: "shared" and "auto" need {EXTENSIONS}')
    return found


def pool_extension(name: str) -> Any | None:  # noqa: ANN401
    """Return what makes the pool extension `name`, of a distribution such as raybatch-extensions.

    None if it is missing or incompatible with this version. Loads no other extension.
    """
    return _loaded(metadata.entry_points(group="raybatch.pool_extensions", name=name)).get(name)


def table_library() -> Any | None:  # noqa: ANN401
    """Return what raybatch-tables does for jobs; None if it is missing or incompatible."""
    return _loaded(metadata.entry_points(group="raybatch.tables")).get("tables")


def installed_commands() -> dict[str, Any]:
    """Return the commands that installed distributions add, by the name of their entry point.

    Commands that cannot be loaded are left out.
    """
    return _loaded(metadata.entry_points(group="raybatch.commands"))


def added_backends(kind: str | None = None) -> dict[str, Any]:
    """Return the backend types of installed distributions, by kind: one kind, or all of them.

    Those that cannot be loaded are left out.
    """
    points = metadata.entry_points(group="raybatch.backends")
    return _loaded(points if kind is None else points.select(name=kind))


def _loaded(points: Iterable[metadata.EntryPoint]) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    for point in points:
        try:
            loaded.setdefault(point.name, point.load())
        except Exception as error:  # code of another version may raise anything
            what = redacted(f"{type(error).__name__}: {error}")
            logger.warning(
                "cannot load the extension %s (%s); reinstall the package that it is from",
                point.value,
                what,
            )
    return loaded


def _installer(*, by_uv: bool) -> str:
    """Return the install command for this interpreter, whose environment may be inactive."""
    is_default = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    python = shlex.quote(sys.executable)
    if by_uv:
        return "uv pip install" if is_default else f"uv pip install --python {python}"
    return "pip install" if is_default else f"{python} -m pip install"


def _source(record: str, extra: str) -> str | None:
    """Return the requirement for pip; None if the record names no source."""
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
    # a redacted secret would be missing in the command
    return source if redacted(source) == source else None
