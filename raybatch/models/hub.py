"""Models of the Hugging Face hub: ids with revisions, commits, and files in the hub's cache.

The hub's client handles locks, partial files and checks.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from raybatch.config import is_hub_offline
from raybatch.errors import ConfigError, UnreachableError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+(/[\w.-]+)*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# a second copy of the weights in another layout
_OTHER_COPIES = ("consolidated*", "original/*")


def has_form_of_hub_id(source: str) -> bool:
    return _HUB_ID.fullmatch(source) is not None


def split_revision(source: str) -> tuple[str, str | None]:
    """Split a hub id and the branch, tag or commit after its "@".

    Example:
        >>> split_revision("org/name@main")
        ('org/name', 'main')
    """
    if "://" in source or not has_form_of_hub_id(source):
        return source, None
    name, _, revision = source.partition("@")
    return name, revision or None


def hub_folder(
    source: str, patterns: Sequence[str], *, to: Path | None = None, is_offline: bool = False
) -> Path:
    """Return the local folder of a hub model, after fetching its missing files.

    Only files whose names match one of `patterns` are fetched: into the folder `to`, or into the
    hub's cache. `is_offline`: fetch nothing, and use the cache only.

    Raises:
        ConfigError: there is no such model, or the hub is not reachable.
    """
    import huggingface_hub

    name, revision = split_revision(source)
    if name == "demo":
        raise ConfigError(
            f"model {source!r}: the demo model comes with raybatch, without revisions; pass 'demo'"
        )
    with _hub_errors(source):
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_OTHER_COPIES),
            local_files_only=is_offline or is_hub_offline(),
            local_dir=to,
        )
    return Path(folder)


def commit_of(folder: Path) -> str:
    """Return the commit of a hub model, by its folder in the hub's cache."""
    assert _COMMIT.fullmatch(folder.name), f"{folder} is no snapshot of the hub's cache"
    return folder.name


def hub_file_names(source: str, folder: Path) -> list[str]:
    """Return the file names of a hub model at the hub; in offline mode those in `folder`."""
    import huggingface_hub

    name, _ = split_revision(source)
    if is_hub_offline():
        return [path.name for path in folder.iterdir()]
    with _hub_errors(source):
        return list(huggingface_hub.HfApi().list_repo_files(name, revision=commit_of(folder)))


def cached_bytes(source: str) -> int:
    """Return the cached bytes of a hub model on this host, over all revisions."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    name, _ = split_revision(source)
    blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    # incomplete files are renamed later
    whole = (path for path in blobs.glob("*") if path.suffix != ".incomplete")
    return sum(path.stat().st_size for path in whole)


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Convert errors of the hub's client to ConfigError with a solution."""
    from huggingface_hub import errors

    # the first match counts
    reasons = {
        errors.HFValidationError: "is neither a local folder nor a valid hub id",
        errors.GatedRepoError: "is gated: accept its licence on the hub, then `hf auth login`",
        errors.RepositoryNotFoundError: "is neither a local folder nor a model on the hub",
        errors.RevisionNotFoundError: "has no such branch, tag or commit after the @",
        errors.LocalEntryNotFoundError: None,
        errors.EntryNotFoundError: "on the hub has no config.json",
    }
    try:
        yield
    except Exception as error:  # the HTTP client differs by version
        reason = next((reasons[kind] for kind in reasons if isinstance(error, kind)), None)
        if reason is None:
            raise _unreachable(source) from error
        raise ConfigError(f"model {source!r} {reason}") from error


def _unreachable(source: str) -> UnreachableError:
    name, revision = split_revision(source)
    option = "" if revision is None else f" --revision {revision}"
    return UnreachableError(
        f"model {source!r} is neither a local folder nor in the local hub cache, and the hub is "
        "not reachable; pass a local folder, or download it on a host with a network: "
        f"hf download {name}{option}"
    )
