"""Turns what a user calls a model, or a LoRA adapter, into a local folder."""

import hashlib
import importlib.resources
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from raybatch.config import cache_dir, is_hub_offline
from raybatch.errors import ConfigError, UnreachableError, error_text
from raybatch.models.checkpoint import weight_files

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
_ADAPTER, _ADAPTER_PATTERNS = "adapter_config.json", ("*.safetensors", "*.bin", "*.json")
# what a file system knows of the content: a checksum, else a time of change
_VERSIONS = ("ETag", "etag", "md5Hash", "crc32c", "LastModified", "mtime", "updated", "created")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# models up to this size are hashed in full, of larger ones a sample is
_FULL_HASH_BYTES = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 1024, 4096


def resolve_model(source: str) -> Path:
    """Return the folder of the checkpoint that `source` names, downloading it where needed.

    Args:
        source: a local folder, "demo" (the small model inside this package), a URI that fsspec
            reads such as "s3://bucket/model", or an id of the Hugging Face hub.

    Raises:
        ConfigError: nothing is there, or it has no safetensors weights; the message says what to
            do instead.
    """
    path = fetch_folder(source) if "://" in source else _folder_of(source, _PATTERNS)
    if not path.is_dir():
        raise ConfigError(f"model {source!r} must be a folder with a Hugging Face checkpoint")
    weight_files(path)
    return path


def resolve_tokenizer(source: str) -> Path:
    """Return the folder of a model's tokenizer, downloading it where needed, without weights.

    Args:
        source: a local folder, "demo", or an id of the Hugging Face hub.

    Raises:
        ConfigError: nothing is there; the message says what to do instead.
    """
    return _folder_of(source, _TOKENIZER_PATTERNS)


def is_local_model(source: str) -> bool:
    """Return whether `resolve_model` would look for `source` on this host alone."""
    if source == "demo":
        return True
    if "://" in source:
        return False
    is_path = source.startswith((".", "~", "/")) or not _HUB_ID.fullmatch(source)
    return is_path or Path(source).exists()


def check_hub_model(source: str) -> None:
    """Raise ConfigError where neither the cache on this host nor the hub has a model of that id.

    Asks the hub at most once, and downloads nothing.
    """
    import huggingface_hub

    with _hub_errors(source):
        if isinstance(huggingface_hub.try_to_load_from_cache(source, "config.json"), str):
            return
        if is_hub_offline():
            raise _unreachable(source)
        url = huggingface_hub.hf_hub_url(source, "config.json")
        try:
            huggingface_hub.get_hf_file_metadata(url)
        except (OSError, ValueError):
            raise  # the answers of the hub are among them
        except Exception as error:  # the HTTP client below is not the same in every version
            raise _unreachable(source) from error


def _folder_of(source: str, patterns: Sequence[str]) -> Path:
    if source == "demo":
        path = Path(str(importlib.resources.files("raybatch"))) / "demo" / "checkpoint"
        if not path.is_dir():
            raise ConfigError(
                "the demo model is not part of this installation; install raybatch from its wheel, "
                "or pass a folder or a hub id"
            )
        return path
    if is_local_model(source):
        path = Path(source).expanduser()
        if not path.exists():
            raise ConfigError(
                f"model folder {source!r} does not exist; pass the folder of a checkpoint, a hub "
                'id such as "Qwen/Qwen3-0.6B", a URI such as "s3://bucket/model", or "demo"'
            )
        return path
    import huggingface_hub

    with _hub_errors(source):
        folder = huggingface_hub.snapshot_download(
            source,
            allow_patterns=list(patterns),
            # a second copy of the weights in another layout
            ignore_patterns=["consolidated*", "original/*"],
            local_files_only=is_hub_offline(),
        )
    return Path(folder)


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Turn what the hub's client raises into ConfigError with the way out."""
    from huggingface_hub import errors

    # of several that fit, the first
    reasons = {
        errors.HFValidationError: "is neither a local folder nor the form of a hub id",
        errors.GatedRepoError: "is gated: accept its licence on the hub, then `hf auth login`",
        errors.RepositoryNotFoundError: "is neither a local folder nor a model on the hub",
        errors.LocalEntryNotFoundError: None,
        errors.EntryNotFoundError: "on the hub has no config.json",
    }
    try:
        yield
    except (*reasons, OSError) as error:
        reason = next((reasons[kind] for kind in reasons if isinstance(error, kind)), None)
        if reason is None:
            raise _unreachable(source) from error
        raise ConfigError(f"model {source!r} {reason}") from error


def _unreachable(source: str) -> UnreachableError:
    return UnreachableError(
        f"model {source!r} is no folder here and not in the local hub cache, and "
        "the hub cannot be reached; pass a local folder, or pre-download it where there is a "
        f"network: hf download {source}"
    )


def fetch_folder(
    uri: str,
    *,
    what: str = "model",
    patterns: Sequence[str] = _PATTERNS,
    needed: str = "config.json",
) -> Path:
    """Copy the folder at `uri` into the cache once; it appears complete.

    `what` names it in errors; `needed` is the file without which it is no such folder.

    Raises:
        ConfigError: it cannot be read, or lacks that file.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
        if "file" in filesystem.protocol:
            return Path(root)
        listing = filesystem.ls(root, detail=True)
    except Exception as error:  # each file system has errors of its own
        raise UnreachableError(f"{what} {uri!r} cannot be read: {error_text(error)}") from error
    wanted = {
        PurePosixPath(entry["name"]).name: entry
        for entry in listing
        if entry["type"] == "file"
        and any(PurePosixPath(entry["name"]).match(pattern) for pattern in patterns)
    }
    if needed not in wanted:
        raise ConfigError(f"{what} {uri!r} has no {needed}; pass the folder that holds it")
    digest = hashlib.sha256(uri.rstrip("/").encode())
    for name, entry in sorted(wanted.items()):
        version = next((entry[key] for key in _VERSIONS if entry.get(key) is not None), "")
        digest.update(f"\0{name}\0{entry['size']}\0{version}".encode())
    target = cache_dir() / "models" / f"{PurePosixPath(root).name}-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        try:
            _copy(filesystem, wanted, target)
        except Exception as error:  # each file system has errors of its own
            raise UnreachableError(
                f"{what} {uri!r} cannot be downloaded: {error_text(error)}"
            ) from error
    return target


def _copy(filesystem: Any, entries: dict[str, Any], target: Path) -> None:  # noqa: ANN401
    """Copy files into the new folder `target`, which appears complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, suffix=".tmp"))
    try:
        for name, entry in entries.items():
            filesystem.get_file(entry["name"], str(temporary / name))
        os.replace(temporary, target)
    except OSError:
        # another process was faster where the target stands complete
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def model_fingerprint(path: Path) -> str:
    """Return a name of the model's content that is the same on every host and path.

    It covers config.json in full and the weights: all bytes of a small model; of a large one the
    list of tensors, the sizes, and 1,024 pieces per file spread evenly.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    files = weight_files(path)
    is_small = sum(file.stat().st_size for file in files) <= _FULL_HASH_BYTES
    for weights in files:
        size = weights.stat().st_size
        digest.update(f"\0{weights.name}\0{size}\0".encode())
        with weights.open("rb") as file:
            if is_small:
                digest.update(file.read())
                continue
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for i in range(_SAMPLES):
                file.seek(i * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


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
    return str(fetch_folder(source, what="adapter", patterns=_ADAPTER_PATTERNS, needed=_ADAPTER))
