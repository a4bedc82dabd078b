"""What every backend asks of the files of a checkpoint before an engine starts."""

from pathlib import Path

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import StoredTensor, check_tensors, stored_tensors
from raybatch.models.config import read_model_spec
from raybatch.models.json_files import read_json


def checked_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint; raise ConfigError where nobody can load them."""
    if read_json(folder / "config.json") is None:
        raise ConfigError(
            f"{folder} has no config.json; pass the folder of a Hugging Face checkpoint"
        )
    return stored_tensors(folder)


def check_known_model(folder: Path) -> None:
    """Refuse tensors that are missing or do not fit where the native engine knows the model too."""
    try:
        spec = read_model_spec(folder)
    except ConfigError:
        return
    check_tensors(folder, spec, is_native=False)
