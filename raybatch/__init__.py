"""raybatch: run an LLM over a whole dataset on Ray.

The public names are resolved when they are first used, so that importing raybatch loads neither
ray nor torch nor transformers.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING

from raybatch.errors import (
    CapacityError,
    CommitError,
    ConfigError,
    MissingDependency,
    RaybatchError,
    ReplicaError,
    RowError,
)

if TYPE_CHECKING:
    from raybatch.compat.options import ProcessorConfig, vLLMEngineProcessorConfig
    from raybatch.compat.processor import build_processor
    from raybatch.config import (
        BackendConfig,
        EngineConfig,
        LimitConfig,
        PlanConfig,
        PoolConfig,
        WaveConfig,
    )
    from raybatch.explanation.record import Explanation
    from raybatch.job.composed import read_parquet, write_parquet
    from raybatch.job.job import Job
    from raybatch.job.preview import Preview
    from raybatch.outputs.verify import Verification, verify
    from raybatch.records.types import Sampling
    from raybatch.report import RunReport
    from raybatch.stages.feeder import LLMStage
    from raybatch.stages.planned import plan

__all__ = [
    "BackendConfig",
    "CapacityError",
    "CommitError",
    "ConfigError",
    "EngineConfig",
    "Explanation",
    "Job",
    "LLMStage",
    "LimitConfig",
    "MissingDependency",
    "PlanConfig",
    "PoolConfig",
    "Preview",
    "ProcessorConfig",
    "RaybatchError",
    "ReplicaError",
    "RowError",
    "RunReport",
    "Sampling",
    "Verification",
    "WaveConfig",
    "__version__",
    "build_processor",
    "plan",
    "read_parquet",
    "vLLMEngineProcessorConfig",
    "verify",
    "write_parquet",
]

__version__: str

_NAMES = {
    "compat.options": "ProcessorConfig vLLMEngineProcessorConfig",
    "compat.processor": "build_processor",
    "config": "BackendConfig EngineConfig LimitConfig PlanConfig PoolConfig WaveConfig",
    "explanation.record": "Explanation",
    "job.composed": "read_parquet write_parquet",
    "job.job": "Job",
    "job.preview": "Preview",
    "outputs.verify": "Verification verify",
    "records.types": "Sampling",
    "report": "RunReport",
    "stages.feeder": "LLMStage",
    "stages.planned": "plan",
}
_HOMES = {name: f"raybatch.{home}" for home, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # hidden from type checkers, which would take any name for public

    def __getattr__(name: str) -> object:
        if name == "__version__":
            try:
                value: object = metadata.version("raybatch")
            except metadata.PackageNotFoundError:  # a source tree that is not installed
                value = "0+source"
        elif name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module 'raybatch' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
