"""What names the weights of a model, so that a later run can tell whether they are the same."""

import hashlib
from contextlib import suppress
from pathlib import Path

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import weight_files
from raybatch.models.hub import commit_of, split_revision
from raybatch.models.source import (
    content_of,
    is_hub_model,
    is_local_model,
    list_model,
    pin_uri,
    resolve_config,
)

# models up to this size are hashed in full, of larger ones a sample is
_FULL_HASH_BYTES = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 1024, 4096
_COMMIT, _LISTING = "commit ", "listing "


def model_identity(source: str, folder: Path) -> str:
    """Return what names the weights of a model; bytes are read of those on this host alone.

    It is a commit of the hub, a digest of what a store lists, or else that of the content. `folder`
    is what `resolve_config` returned.
    """
    if is_local_model(source):
        return model_fingerprint(folder)
    if is_hub_model(source):
        return _COMMIT + commit_of(folder)
    return _LISTING + content_of(list_model(source))


def pin(source: str, commit: str | None = None) -> str:
    """Return the name of a model that lies elsewhere with what names its weights for good.

    A hub id without a revision of its own has `commit` behind it, where the model has that one.
    """
    if not is_hub_model(source):
        return pin_uri(source)
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
