"""Resolves the name of a model or LoRA adapter to a folder on this host, with or without weights.

Processes that do not run a model resolve it without weights. The identity of the weights lets a
later run check that they are the same.
"""

import importlib.resources
import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from raybatch.config import is_hub_offline
from raybatch.errors import ConfigError, UnreachableError, error_text
from raybatch.models.checkpoint import (
    WEIGHT_SUFFIXES,
    is_without_weights,
    model_fingerprint,
    weight_files,
    weight_names,
)
from raybatch.models.store import StoreFolder, list_folder, local_path

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+(/[\w.-]+)*)?")
_COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
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
    assert _COMMIT_HASH.fullmatch(folder.name), f"{folder} is no snapshot of the hub's cache"
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


TEXT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_PATTERNS = ("*.safetensors",)
_PATTERNS = (*_WEIGHT_PATTERNS, *TEXT_PATTERNS)
# files that no engine reads, mentioned in errors
_PICKLES = ("*.bin", "*.pt", "*.pth")
# suffix of a URI or local folder: the required content of its weights
_CONTENT = "#content="
_ADAPTER, _ADAPTER_PATTERNS = "adapter_config.json", ("*.safetensors", "*.bin", "*.json")
# prefixes of identities of remote models
_COMMIT, _LISTING = "commit ", "listing "


def resolve_model(source: str) -> Path:
    """Return the checkpoint folder of `source`, fetching it if needed.

    Args:
        source: a local folder, "demo" (the small model inside this package), a URI for fsspec such
            as "s3://bucket/model", or an id of the Hugging Face hub, optionally with a branch, tag
            or commit: "org/name@revision".

    Raises:
        ConfigError: not found, or without safetensors weights; the message says what to do.
    """
    if (folder := _folder_here(source)) is not None:
        weight_files(folder)
        _check_content(source, folder)
        return folder
    if "://" in source:
        stored = list_model(source)
        stored.fetch(text_names(stored))
        stored.fetch(weight_names(stored.cached_at, stored.files, where=plain_name(source)))
        return stored.cached_at
    return fetch_from_hub(source, with_weights=True)


def has_weights_here(source: str) -> bool:
    """Return whether all files of a model are on this host, so that `resolve_model` fetches none.

    Raises ConfigError if the model is not found.
    """
    if is_local_model(source):
        return not lacks_weights(source)
    if "://" in source:
        stored = list_model(source)
        folder = stored.cached_at
        return (folder / "config.json").exists() and stored.has(
            weight_names(folder, stored.files, where=plain_name(source))
        )
    with suppress(ConfigError):
        weight_files(hub_folder(source, _PATTERNS, is_offline=True))
        return True
    return False


def resolve_config(source: str) -> Path:
    """Return a folder with config.json and tokenizer, without fetching remote weights.

    Args:
        source: as in `resolve_model`.

    Raises:
        ConfigError: not found, or local weights are incomplete.
    """
    if (folder := _folder_here(source)) is not None:
        if not is_without_weights(folder):
            weight_files(folder)
        return folder
    if "://" in source:
        stored = list_model(source)
        stored.fetch(text_names(stored))
        return stored.cached_at
    return fetch_from_hub(source, with_weights=False)


def fetch_from_hub(source: str, *, with_weights: bool, to: Path | None = None) -> Path:
    """Fetch a hub model into the folder `to` or, if None, the hub's cache; return its folder.

    If `source` names a commit, no network is needed once all files are cached.
    """
    folder = hub_folder(source, _PATTERNS if with_weights else TEXT_PATTERNS, to=to)
    if with_weights:
        weight_files(folder)
    return folder


def check_weights_exist(source: str, folder: Path) -> None:
    """Raise ConfigError if a remote model has no weights, or not all files of its index.

    It only lists file names at the store or the hub. `folder` is the result of `resolve_config`.
    """
    if is_hub_model(source):
        weight_names(folder, hub_file_names(source, folder), where=plain_name(source))
    elif not is_local_model(source):
        weight_names(folder, list_model(source).files, where=plain_name(source))


def resolve_tokenizer(source: str) -> Path:
    """Return the folder of a tokenizer, which may have no model; `source` as in `resolve_model`."""
    if (folder := _folder_here(source)) is not None:
        return folder
    if "://" not in source:
        return fetch_from_hub(source, with_weights=False)
    stored = list_folder(plain_name(source), what="tokenizer", patterns=TEXT_PATTERNS)
    stored.fetch(stored.files)
    return stored.cached_at


def list_model(uri: str) -> StoreFolder:
    """Return the listing of a model's files in a store.

    Raises:
        ConfigError: listing failed, or the files differ from those that the URI is pinned to.
    """
    uri, content = without_content(uri), content_in(uri)
    patterns = (*_PATTERNS, *_PICKLES)
    stored = list_folder(uri, what="model", patterns=patterns, needed="config.json")
    if content and content_of(stored) != content:
        raise ConfigError(
            f"the weights in {uri!r} were replaced since this job started, which would mix answers "
            "of two models in one output; restore the earlier files"
        )
    return stored


def content_of(stored: StoreFolder) -> str:
    """Return a digest of the versions of a model's weights and config, as its store lists them."""
    return stored.digest({*stored.files} - {*text_names(stored)} | {"config.json"})


def pinned_to(source: str, content: str) -> str:
    """Return the name of a model that is pinned to `content`, the digest of its weights.

    `source` is a URI or a local folder. A pinned model is refused if its weights change.
    """
    return f"{without_content(source)}{_CONTENT}{content}"


def content_in(source: str) -> str | None:
    """Return the digest of weights that a name is pinned to; None if it is not pinned."""
    return source.partition(_CONTENT)[2] or None


def without_content(source: str) -> str:
    return source.partition(_CONTENT)[0]


def plain_name(source: str) -> str:
    """Return a model's name without its pinned digest and without a hub revision."""
    return split_revision(without_content(source))[0]


def text_names(stored: StoreFolder) -> list[str]:
    return [name for name in stored.files if not name.endswith(WEIGHT_SUFFIXES)]


def is_local_model(source: str) -> bool:
    """Return whether `resolve_model` would look for `source` only on this host."""
    if source == "demo":
        return True
    if "://" in source:
        return local_path(source) is not None
    is_path = source.startswith((".", "~", "/")) or not has_form_of_hub_id(source)
    return is_path or Path(source).exists()


def is_hub_model(source: str) -> bool:
    return "://" not in source and not is_local_model(source)


def lacks_weights(source: str) -> bool:
    """Return whether a model is a local folder with a config.json but no weights."""
    folder = _folder_here(source)
    return folder is not None and is_without_weights(folder)


def _check_content(source: str, folder: Path) -> None:
    """Raise ConfigError if the local weights differ from those of the job."""
    wanted = content_in(source)
    if wanted is not None and (found := model_fingerprint(folder)) != wanted:
        raise ConfigError(
            f"the weights in {str(folder)!r} on host {socket.gethostname()} have the digest "
            f"{found}, but this job started with {wanted}, which would mix answers of two models "
            "in one output; put the same files on every host that runs engines"
        )


def _folder_here(source: str) -> Path | None:
    """Return the folder of a local model; None for a remote one."""
    source = without_content(source)
    if not is_local_model(source):
        return None
    if source == "demo":
        path = Path(str(importlib.resources.files("raybatch"))) / "demo" / "checkpoint"
        if not path.is_dir():
            raise ConfigError(
                "the demo model is not part of this installation; install raybatch from its wheel, "
                "or pass a folder or a hub id"
            )
        return path
    path = local_path(source) or Path(source).expanduser()
    if not path.exists():
        raise ConfigError(
            f"model folder {source!r} does not exist on this host, which needs config and "
            "tokenizer as the engines do; pass a checkpoint folder, a hub id such as "
            '"Qwen/Qwen3-0.6B", a URI such as "s3://bucket/model", or "demo"'
        )
    if not path.is_dir():
        raise ConfigError(f"model {source!r} must be a folder with a Hugging Face checkpoint")
    return path


def adapter_source(name: str, root: str | None) -> str:
    """Return the folder or URI of an adapter.

    Args:
        name: value of a row: a folder or URI, or with `root` the name of a folder in it.
        root: folder or URI that holds the folders of all adapters; None if names are folders or
            URIs themselves.

    Raises:
        ConfigError: the name is not that of a folder directly in `root`.
    """
    if root is None:
        return name
    parts = PurePosixPath(name)
    if "://" in name or parts.is_absolute() or name.startswith("~") or ".." in parts.parts:
        raise ConfigError(f"the adapter name {name!r} must be the name of a folder in {root!r}")
    return f"{root.rstrip('/')}/{name}"


def check_adapter(source: str, *, max_rank: int | None = None) -> None:
    """Raise ConfigError if an adapter is missing or its rank exceeds `max_rank`."""
    try:
        with fsspec.open(f"{source.rstrip('/')}/{_ADAPTER}", "rb") as file:
            config: Any = json.load(file)
    except Exception as error:  # file systems raise various errors
        raise ConfigError(f"no adapter in {source!r}: {error_text(error)}") from error
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int):
        raise ConfigError(f"the {_ADAPTER} in {source!r} has no rank (r): not a LoRA adapter")
    if max_rank is not None and rank > max_rank:
        raise ConfigError(
            f"the adapter in {source!r} has rank {rank}, but max_lora_rank is {max_rank}"
        )


def resolve_adapter(source: str) -> str:
    """Return the local folder of an adapter; copies a remote one once.

    Raises:
        ConfigError: not found, or unreadable.
    """
    if "://" not in source:
        return source
    if (folder := local_path(source)) is not None:
        return str(folder)
    stored = list_folder(source, what="adapter", patterns=_ADAPTER_PATTERNS, needed=_ADAPTER)
    stored.fetch(stored.files)
    return str(stored.cached_at)


def model_identity(source: str, folder: Path) -> str:
    """Return a text that identifies a model's weights; it changes if they do.

    For a hub model it has the commit, for a URI a digest of the store's listing, for a local folder
    the digest that it is pinned to, or else a digest of the content. `folder` is the result of
    `resolve_config`.
    """
    if is_local_model(source):
        return content_in(source) or model_fingerprint(folder)
    if is_hub_model(source):
        return _COMMIT + commit_of(folder)
    return _LISTING + content_of(list_model(source))


def pin(source: str, commit: str | None = None) -> str:
    """Return the name of a remote model, pinned to its current weights.

    A hub id is pinned to a commit: to `commit` if it has no revision and the hub has that commit,
    else to the current one. A URI is pinned to a digest of the listing.
    """
    if not is_hub_model(source):
        return pinned_to(source, content_of(list_model(source)))
    name, revision = split_revision(source)
    if revision is None and commit is not None:
        with suppress(ConfigError):
            return f"{name}@{commit_of(resolve_config(f'{name}@{commit}'))}"
    return f"{name}@{commit_of(resolve_config(source))}"


def names_content(identity: str) -> bool:
    """Return whether a result of `model_identity` is a digest of content, wherever that is."""
    return not identity.startswith((_COMMIT, _LISTING))


def commit_in(identity: str) -> str | None:
    """Return the hub commit in a result of `model_identity`; None if it has none."""
    return identity.removeprefix(_COMMIT) if identity.startswith(_COMMIT) else None
