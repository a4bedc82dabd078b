"""What Ray reserves for the engines of a pool, as far as their backend decides it."""

from raybatch.backends.choice import VllmBuild
from raybatch.backends.registry import type_of
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError

# of Ray's names of accelerators, the beginnings of those that its resource "GPU" does not count
_OTHER_ACCELERATORS = ("TPU-", "aws-neuron", "Intel-GAUDI", "Ascend", "Apple-", "M1", "M2", "M3")


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
    """Return the GPUs that Ray is asked for with each replica.

    Args:
        backend: that replicas run; "auto" counts like the native one.
        may_grow: hosts with GPUs may come to the cluster.
    """
    if pool.num_gpus_per_replica is not None:
        return pool.num_gpus_per_replica
    if has_gpus or _means_gpus(pool, backend, engine, vllm, may_grow):
        return float(gpus_of_engine(backend, engine))
    return 0.0


def _means_gpus(
    pool: PoolConfig,
    backend: BackendConfig,
    engine: EngineConfig,
    vllm: VllmBuild | None,
    may_grow: bool,
) -> bool:
    """Return whether options ask for GPUs that the cluster is still to get."""
    kind = pool.accelerator_type
    if kind is not None and not kind.startswith(_OTHER_ACCELERATORS):
        return True
    # a driver without vLLM says nothing of the engines' hosts, where it is rarely one for CPUs
    has_replicas = pool.replicas is not None and may_grow and vllm != "cpu"
    return engine.device.startswith("cuda") or (
        type_of(backend).takes_vllm_options and has_replicas
    )


def check_pool(pool: PoolConfig, backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError where options of a pool do not fit the engines that run in it."""
    check_share(pool.num_gpus_per_replica or 0, backend, engine)
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
    warning = type_of(backend).gpu_warning
    return [warning] if warning else []
