"""What a user calls a model, or a LoRA adapter, as a folder on this host: with weights or without.

Whoever does not compute with a model asks for its folder without them. The identity of its weights
tells a later run whether they are the same.
"""

import importlib.resources
import json
import socket
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from raybatch.errors import ConfigError, error_text
from raybatch.models.checkpoint import (
    WEIGHT_SUFFIXES,
    is_without_weights,
    model_fingerprint,
    weight_files,
    weight_names,
)
from raybatch.models.hub import (
    commit_of,
    has_form_of_hub_id,
    hub_file_names,
    hub_folder,
    split_revision,
)
from raybatch.models.store import StoreFolder, list_folder, local_path

TEXT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_PATTERNS = ("*.safetensors",)
_PATTERNS = (*_WEIGHT_PATTERNS, *TEXT_PATTERNS)
# that no engine reads, and whose presence errors tell
_PICKLES = ("*.bin", "*.pt", "*.pth")
# behind a URI, or a folder of this host: what its weights have to be
_CONTENT = "#content="
_ADAPTER, _ADAPTER_PATTERNS = "adapter_config.json", ("*.safetensors", "*.bin", "*.json")
# before what names the weights of a model that lies elsewhere
_COMMIT, _LISTING = "commit ", "listing "


def resolve_model(source: str) -> Path:
    """Return the folder of the checkpoint that `source` names, fetching it where needed.

    Args:
        source: a local folder, "demo" (the small model inside this package), a URI that fsspec
            reads such as "s3://bucket/model", or an id of the Hugging Face hub, also with a
            branch, tag or commit: "org/name@revision".

    Raises:
        ConfigError: nothing is there, or it has no safetensors weights; the message says what to
            do instead.
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
    """Return whether `resolve_model` would fetch nothing; ConfigError: there is no such model."""
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
    """Return a folder with config.json and tokenizer; of weights that lie elsewhere none is read.

    Args:
        source: as `resolve_model` takes it.

    Raises:
        ConfigError: nothing is there, or a part of the weights.
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
    """Bring a hub model to the hub's cache or to a folder, and return that.

    Of a commit nobody is asked for files that are here, once the client knows its list of files.
    """
    folder = hub_folder(source, _PATTERNS if with_weights else TEXT_PATTERNS, to=to)
    if with_weights:
        weight_files(folder)
    return folder


def check_weights_exist(source: str, folder: Path) -> None:
    """Refuse a model without weights, or without some of them; `folder` is of `resolve_config`.

    Asks the store or the hub for names alone.
    """
    if is_hub_model(source):
        weight_names(folder, hub_file_names(source, folder), where=plain_name(source))
    elif not is_local_model(source):
        weight_names(folder, list_model(source).files, where=plain_name(source))


def resolve_tokenizer(source: str) -> Path:
    """Return the folder of a tokenizer, which may lie alone; arguments are of `resolve_model`."""
    if (folder := _folder_here(source)) is not None:
        return folder
    if "://" not in source:
        return fetch_from_hub(source, with_weights=False)
    stored = list_folder(plain_name(source), what="tokenizer", patterns=TEXT_PATTERNS)
    stored.fetch(stored.files)
    return stored.cached_at


def list_model(uri: str) -> StoreFolder:
    """Ask a store for the files of a model.

    Raises:
        ConfigError: they cannot be listed, or are not those that the URI was pinned to.
    """
    uri, content = without_content(uri), content_in(uri)
    patterns = (*_PATTERNS, *_PICKLES)
    stored = list_folder(uri, what="model", patterns=patterns, needed="config.json")
    if content and content_of(stored) != content:
        raise ConfigError(
            f"the weights in {uri!r} have been replaced since this job was started, and answers of "
            "two models would be in one output; put the earlier files back"
        )
    return stored


def content_of(stored: StoreFolder) -> str:
    """Return what names the weights of a model, as far as its store tells."""
    return stored.digest({*stored.files} - {*text_names(stored)} | {"config.json"})


def pinned_to(source: str, content: str) -> str:
    """Return the name of a model, of a store or this host, whose weights must have this digest."""
    return f"{without_content(source)}{_CONTENT}{content}"


def content_in(source: str) -> str | None:
    """Return the digest that a model is pinned to, None where it is to none."""
    return source.partition(_CONTENT)[2] or None


def without_content(source: str) -> str:
    return source.partition(_CONTENT)[0]


def plain_name(source: str) -> str:
    """Return a model's name without what pins it."""
    return split_revision(without_content(source))[0]


def text_names(stored: StoreFolder) -> list[str]:
    return [name for name in stored.files if not name.endswith(WEIGHT_SUFFIXES)]


def is_local_model(source: str) -> bool:
    """Return whether `resolve_model` would look for `source` on this host alone."""
    if source == "demo":
        return True
    if "://" in source:
        return local_path(source) is not None
    is_path = source.startswith((".", "~", "/")) or not has_form_of_hub_id(source)
    return is_path or Path(source).exists()


def is_hub_model(source: str) -> bool:
    return "://" not in source and not is_local_model(source)


def lacks_weights(source: str) -> bool:
    """Return whether a model is a folder with its config on this host, and weights elsewhere."""
    folder = _folder_here(source)
    return folder is not None and is_without_weights(folder)


def _check_content(source: str, folder: Path) -> None:
    """Refuse weights of this host that are not those of the job."""
    wanted = content_in(source)
    if wanted is not None and (found := model_fingerprint(folder)) != wanted:
        raise ConfigError(
            f"the weights in {str(folder)!r} on host {socket.gethostname()} have the digest "
            f"{found}, and this job was begun with {wanted}: answers of two models would be in one "
            "output; put the same files on every host where engines run"
        )


def _folder_here(source: str) -> Path | None:
    """Return the folder of a model of this host alone; None for one that lies elsewhere."""
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
            f"model folder {source!r} does not exist on this host, and whoever plans a job reads "
            "config and tokenizer as well as its engines; pass the folder of a checkpoint, a hub "
            'id such as "Qwen/Qwen3-0.6B", a URI such as "s3://bucket/model", or "demo"'
        )
    if not path.is_dir():
        raise ConfigError(f"model {source!r} must be a folder with a Hugging Face checkpoint")
    return path


def adapter_source(name: str, root: str | None) -> str:
    """Return the folder or URI of an adapter.

    Args:
        name: as a row has it: a folder or URI, or with `root` the name of a folder below that.
        root: folder or URI; None takes names for folders and URIs.

    Raises:
        ConfigError: the name leads out of the root.
    """
    if root is None:
        return name
    parts = PurePosixPath(name)
    if "://" in name or parts.is_absolute() or name.startswith("~") or ".." in parts.parts:
        raise ConfigError(f"the adapter {name!r} must be the name of a folder in {root!r}")
    return f"{root.rstrip('/')}/{name}"


def check_adapter(source: str, *, max_rank: int | None = None) -> None:
    """Raise ConfigError unless an adapter is there and of no higher rank."""
    try:
        with fsspec.open(f"{source.rstrip('/')}/{_ADAPTER}", "rb") as file:
            config: Any = json.load(file)
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(f"no adapter in {source!r}: {error_text(error)}") from error
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int):
        raise ConfigError(f"the {_ADAPTER} in {source!r} names no rank (r), so it is none of LoRA")
    if max_rank is not None and rank > max_rank:
        raise ConfigError(
            f"the adapter in {source!r} has rank {rank}, and max_lora_rank is {max_rank}"
        )


def resolve_adapter(source: str) -> str:
    """Return the folder of an adapter on this host, copied once where it lies elsewhere.

    Raises:
        ConfigError: nothing is there, or it cannot be read.
    """
    if "://" not in source:
        return source
    if (folder := local_path(source)) is not None:
        return str(folder)
    stored = list_folder(source, what="adapter", patterns=_ADAPTER_PATTERNS, needed=_ADAPTER)
    stored.fetch(stored.files)
    return str(stored.cached_at)


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
