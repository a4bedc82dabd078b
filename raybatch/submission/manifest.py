"""What the files for all job systems have in common: options, hosts, the command, a name.

Systems run the same command again when it fails; what is done stays done, so that a retry goes
on.
"""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from raybatch.backends.choice import gpus_of_engine
from raybatch.config import check_min
from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig

# KubeRay puts suffixes behind the name, and Kubernetes allows 63 characters
_MAX_NAME = 47


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestOptions:
    """What a job file does not say.

    Args:
        image: with raybatch, its engine and Ray in it.
        replicas: engines; None takes those of the job, else 1.
        gpu_type: what the system calls the GPU, such as L4; None takes any.
        service_account: of Kubernetes, with the role that may read and write the data.
    """

    image: str | None = None
    ray_version: str = field(default_factory=lambda: metadata.version("ray"))
    replicas: int | None = None
    gpu_type: str | None = None
    max_retries: int = 3
    timeout_s: int = 172_800
    env_vars: Mapping[str, str] = field(default_factory=dict)
    compute_config: str | None = None
    service_account: str | None = None

    def __post_init__(self) -> None:
        if self.replicas is not None:
            check_min(self, "replicas", 1)
        check_min(self, "max_retries", 0)
        check_min(self, "timeout_s", 1)

    def required_image(self, kind: str) -> str:
        """Return the image.

        Raises:
            ConfigError: there is none.
        """
        if not self.image:
            raise ConfigError(
                f"a manifest for {kind} needs --image: one with Ray, raybatch and its engine in "
                "it (docs/start/on-a-cluster.md has the Dockerfile)"
            )
        return self.image


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerShape:
    """One host with engines; the shared memory is for Ray's object store."""

    num_hosts: int
    num_gpus: int
    num_cpus: int
    memory_gib: int
    shared_memory_gib: int


def check_retries(job: JobConfig) -> None:
    """Raise ConfigError if a retry would remove what the try before it has written."""
    if job.overwrite:
        raise ConfigError(
            "overwrite: true would remove at each retry what the try before it has written; take "
            "it out of the job file, and choose a new sink instead"
        )


def worker_shape(job: JobConfig, options: ManifestOptions) -> WorkerShape:
    """Return the hosts that a job needs: one for each engine, with its GPUs."""
    stage = job.stage
    num_hosts = options.replicas or stage.pool.replicas or 1
    gpus = stage.pool.num_gpus_per_replica
    if gpus is None:
        gpus = gpus_of_engine(stage.backend, stage.engine)
    if not gpus:
        return WorkerShape(
            num_hosts=num_hosts, num_gpus=0, num_cpus=4, memory_gib=16, shared_memory_gib=5
        )
    num_gpus = math.ceil(gpus)
    return WorkerShape(
        num_hosts=num_hosts,
        num_gpus=num_gpus,
        num_cpus=12 * num_gpus,
        memory_gib=96 * num_gpus,
        shared_memory_gib=30 * num_gpus,
    )


def job_command(job_file: str, replicas: int | None) -> str:
    """Return the command of a job: error rows are no reason to run it again."""
    flags = "" if replicas is None else f"--replicas {replicas} "
    return f"python -m raybatch run {shlex.quote(job_file)} {flags}--allow-error-rows"


def manifest_name(job_file: str) -> str:
    """Return a name that every system takes, made of the job file's.

    Raises:
        ConfigError: nothing is left of it.
    """
    stem = Path(job_file).stem.lower()
    name = re.sub(r"[^a-z0-9]+", "-", f"raybatch-{stem}").strip("-")[:_MAX_NAME].strip("-")
    if name == "raybatch" and not re.search(r"[a-z0-9]", stem):
        raise ConfigError(f"{job_file}: the name of the job is made of the file's; rename it")
    return name
