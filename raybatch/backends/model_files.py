"""What the driver can tell of a model's folder before any engine starts, for each backend."""

from pathlib import Path

from raybatch.backends.transformers.options import TransformersOptions
from raybatch.config import BackendConfig, from_mapping
from raybatch.errors import ConfigError
from raybatch.models.checkpoint_check import (
    StoredTensor,
    check_known_tensors,
    check_tensors,
    stored_tensors,
)
from raybatch.models.config import read_model_spec
from raybatch.models.json_files import read_json
from raybatch.text.text_files import check_template, check_tokenizer

# of vLLM, those that read the safetensors files of the folder
_READS_TENSORS = (None, "auto", "hf", "safetensors", "fastsafetensors")


def check_files(
    folder: Path, backend: BackendConfig, *, reads_template: bool, has_tools: bool = False
) -> None:
    """Refuse a folder that the engines of a backend cannot run, as far as its files tell.

    Of weights the headers are read, never the data. The native engine says which tensors it needs;
    other backends may run more than is known here, so they are refused only what nobody can load.

    Args:
        folder: of the checkpoint; for an endpoint that of a tokenizer.
        backend: that runs it.
        reads_template: rows are rendered with its chat template.
        has_tools: they are rendered with tools.

    Raises:
        ConfigError: names the file, the tensor or the line, and the way out.
    """
    kind = backend.kind
    if kind == "native":
        check_tensors(folder, read_model_spec(folder))
    elif kind == "transformers":
        _stored(folder)
        options = from_mapping(TransformersOptions, backend.options, where="backend.options")
        if not options.trust_remote_code:
            _check_known(folder)
    elif kind == "auto":
        # the native engine or vLLM, and both refuse what nobody can load
        _stored(folder)
        _check_known(folder)
    elif kind == "vllm":
        kwargs = backend.options.get("engine_kwargs") or {}
        if kwargs.get("load_format") in _READS_TENSORS:
            _stored(folder)
    check_tokenizer(folder)
    if reads_template:
        check_template(folder, has_tools=has_tools)


def _stored(folder: Path) -> dict[str, StoredTensor]:
    if read_json(folder / "config.json") is None:
        raise ConfigError(
            f"{folder} has no config.json; pass the folder of a Hugging Face checkpoint"
        )
    return stored_tensors(folder)


def _check_known(folder: Path) -> None:
    """Refuse tensors that lack or do not fit where the native engine knows the model too."""
    try:
        spec = read_model_spec(folder)
    except ConfigError:
        return
    check_known_tensors(folder, spec)
