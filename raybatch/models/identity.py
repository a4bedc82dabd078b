"""What names the weights of a model, so that a later run can tell whether they are the same."""

from contextlib import suppress
from pathlib import Path

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import model_fingerprint
from raybatch.models.hub import commit_of, split_revision
from raybatch.models.source import (
    content_in,
    content_of,
    is_hub_model,
    is_local_model,
    list_model,
    pinned_to,
    resolve_config,
)

_COMMIT, _LISTING = "commit ", "listing "


def model_identity(source: str, folder: Path) -> str:
    """Return what names the weights of a model; bytes are read of those on this host alone.

    It is what the source is pinned to, a commit of the hub, a digest of what a store lists, or else
    that of the content. `folder` is what `resolve_config` returned.
    """
    if is_local_model(source):
        return content_in(source) or model_fingerprint(folder)
    if is_hub_model(source):
        return _COMMIT + commit_of(folder)
    return _LISTING + content_of(list_model(source))


def pin(source: str, commit: str | None = None) -> str:
    """Return the name of a model that lies elsewhere with what names its weights for good.

    A hub id without a revision of its own has `commit` behind it, where the model has that one.
    """
    if not is_hub_model(source):
        return pinned_to(source, content_of(list_model(source)))
    name, revision = split_revision(source)
    if revision is None and commit is not None:
        with suppress(ConfigError):
            return f"{name}@{commit_of(resolve_config(f'{name}@{commit}'))}"
    return f"{name}@{commit_of(resolve_config(source))}"


def names_content(identity: str) -> bool:
    """Return whether an identity is that of bytes, whichever place they came from."""
    return not identity.startswith((_COMMIT, _LISTING))


def commit_in(identity: str) -> str | None:
    """Return the commit of the hub that an identity names, if it names one."""
    return identity.removeprefix(_COMMIT) if identity.startswith(_COMMIT) else None
