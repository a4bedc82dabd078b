"""The native engine, as raybatch knows it before one starts."""

from pathlib import Path

from raybatch.backends.backend_type import BackendType, EngineStart
from raybatch.backends.base import Backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.models.checkpoint import check_tensors
from raybatch.models.config import read_model_spec


def _create(start: EngineStart) -> Backend:
    from raybatch.backends.native.backend import create

    return create(start.model, start.engine, num_engines_on_host=start.num_engines_on_host)


def _max_model_len(backend: BackendConfig, engine: EngineConfig, folder: Path | None) -> int | None:
    assert folder is not None, "only an endpoint's model has no folder"
    return read_model_spec(folder).max_model_len


def _check_files(folder: Path, backend: BackendConfig) -> None:
    check_tensors(folder, read_model_spec(folder))


NATIVE = BackendType(
    kind="native",
    create=_create,
    max_model_len=_max_model_len,
    package="torch",
    missing=(
        "the native backend needs torch, which is not installed here: pip install "
        "'raybatch[cpu]', or 'raybatch[gpu]' on a host with GPUs"
    ),
    check_files=_check_files,
    gpu_warning=(
        "the native engine runs on GPUs here, and its CUDA path has never run on one: it may fail "
        "and will be slow. Install vLLM where the engines run (pip install 'raybatch[vllm]') and "
        "leave backend out, or set it to 'vllm'; engine.device='cpu' keeps engines off the GPUs"
    ),
    obeys_engine_options=True,
    checks_grammars=True,
)
