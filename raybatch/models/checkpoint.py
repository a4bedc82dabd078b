"""The tensors of a Hugging Face checkpoint folder, one file or sharded, read one by one."""

import hashlib
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open

from raybatch.errors import ConfigError
from raybatch.models.json_files import read_json

if TYPE_CHECKING:
    import torch  # feeders read checkpoints' configs, and load no torch for it

_INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, by name.

    Raises:
        ConfigError: there are none; the message says so where only pickled weights exist.
    """
    if names := sorted(set(indexed_files(path).values())):
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise ConfigError(
                f"{path / _INDEX} names {missing[0]}, which is not in the folder; download it too"
            )
        return [path / name for name in names]
    if (path / "model.safetensors").exists():
        # some folders hold a second copy of the weights in another layout
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ConfigError(
            f"{path} has only pickled weights, which can run any code when loaded; convert them "
            "with transformers: from_pretrained(...).save_pretrained(..., safe_serialization=True)"
        )
    raise ConfigError(
        f"{path} has no *.safetensors file; pass the folder that holds the weights of the model"
    )


def indexed_files(path: Path) -> dict[str, str]:
    """Return the file of each tensor, by name, as the index of a checkpoint has it.

    Empty where there is no index.

    Raises:
        ConfigError: it is no index.
    """
    index = path / _INDEX
    raw = read_json(index)
    if raw is None:
        return {}
    weight_map = raw.get("weight_map")
    is_map = isinstance(weight_map, dict) and all(
        isinstance(file, str) for file in weight_map.values()
    )
    if not weight_map or not is_map:
        raise ConfigError(f"{index} is not a valid weight index; download the checkpoint again")
    return dict(weight_map)


class Checkpoint:
    """Open safetensors files; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file_path in weight_files(path):
            try:
                file = self._stack.enter_context(safe_open(file_path, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise ConfigError(
                    f"{file_path} is not a valid safetensors file: {error}"
                ) from error
            for name in file.keys():  # noqa: SIM118
                self._file_of[name] = file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._file_of.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> "torch.Tensor":
        """Return a tensor, mapped from its file.

        Raises:
            ConfigError: the checkpoint does not have it.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._path}: the checkpoint has no tensor {name!r}")
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def stat_key(path: Path, *parts: str) -> str:
    """Return a file name for data derived from the checkpoint at this place.

    Times of change are part of it as well as the fingerprint, which only samples large files.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for file in weight_files(path):
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]
