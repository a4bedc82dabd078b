"""An Anyscale job file, for `anyscale job submit -f FILE` in the folder of the job file."""

from pathlib import PurePath
from typing import Any

import yaml

from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig
from raybatch.submission.bundle import EXCLUDED_SUFFIXES
from raybatch.submission.manifest import (
    ManifestOptions,
    WorkerShape,
    check_retries,
    job_command,
    manifest_name,
    worker_shape,
)

_HEAD = {"CPU": 4, "memory": "16Gi"}


def render_anyscale(job: JobConfig, job_file: str, options: ManifestOptions) -> str:
    """Return the YAML of an Anyscale job; it sends the folder with the job file along.

    Args:
        job: the checked options.
        job_file: its path below the folder from which the job is submitted.
        options: what the job file does not say.

    Raises:
        ConfigError: there is no image, a retry would start over, or the job file lies elsewhere.
    """
    check_retries(job)
    if PurePath(job_file).is_absolute() or ".." in PurePath(job_file).parts:
        raise ConfigError(
            f"{job_file}: Anyscale gets the folder from which it is submitted; go to the folder "
            "of the job file, and give the path from there"
        )
    shape = worker_shape(job, options)
    config: dict[str, Any] = {
        "name": manifest_name(job_file),
        "entrypoint": job_command(job_file, shape.num_hosts),
        "image_uri": options.required_image("anyscale"),
    }
    compute = _compute_config(shape, options)
    if compute:
        config["compute_config"] = compute
    config |= {
        "working_dir": ".",
        "excludes": [".git", ".env", ".venv", *(f"**/*{end}" for end in EXCLUDED_SUFFIXES)],
    }
    if options.env_vars:
        config["env_vars"] = dict(options.env_vars)
    config |= {"max_retries": options.max_retries, "timeout_s": options.timeout_s}
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)


def _compute_config(shape: WorkerShape, options: ManifestOptions) -> str | dict[str, Any] | None:
    """Return the name of a compute config, one made for a kind of GPU, or none for the default."""
    if options.compute_config is not None:
        return options.compute_config
    if options.gpu_type is None or not shape.num_gpus:
        return None
    resources = {
        "CPU": shape.num_cpus,
        "memory": f"{shape.memory_gib}Gi",
        "GPU": shape.num_gpus,
        "accelerator": options.gpu_type,
    }
    workers = {
        "required_resources": resources,
        "min_nodes": shape.num_hosts,
        "max_nodes": shape.num_hosts,
    }
    return {"head_node": {"required_resources": dict(_HEAD)}, "worker_nodes": [workers]}
