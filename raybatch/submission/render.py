"""From a job file to the file of a job system."""

from dataclasses import fields

import fsspec

from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.submission.anyscale import render_anyscale
from raybatch.submission.kuberay import render_kuberay
from raybatch.submission.manifest import ManifestOptions, worker_shape
from raybatch.submission.ray_script import render_ray
from raybatch.submission.remote_paths import check_paths, paths_on_hosts

_WITHOUT_EFFECT = {
    "anyscale": ("service_account",),
    "kuberay": ("compute_config",),
    "ray": (
        *("image", "gpu_type", "compute_config", "service_account"),
        *("max_retries", "timeout_s"),
    ),
}


def render_manifest(kind: str, job_file: str, options: ManifestOptions) -> tuple[str, list[str]]:
    """Return the text of the file, and what its reader has to see to.

    Raises:
        ConfigError: the job file or an option is wrong, or would not work there.
    """
    _check_effect(kind, options)
    job = Job.from_yaml(job_file).config
    if options.gpu_type and not worker_shape(job, options).num_gpus:
        raise ConfigError(f"{job_file}: the job runs on CPUs; leave --gpu-type out")
    check_paths(job, working_dir=None)
    with fsspec.open(job_file, "r", encoding="utf-8") as file:
        job_text = file.read()
    if kind == "kuberay":
        text = render_kuberay(job, job_text, job_file, options)
    elif kind == "anyscale":
        text = render_anyscale(job, job_file, options)
    elif kind == "ray":
        text = render_ray(job, job_text, job_file, options)
    else:
        raise ConfigError(f"{kind!r} is none of anyscale, kuberay, ray")
    return text, [f"note: {path} must be there on every host" for path in paths_on_hosts(job)]


def _check_effect(kind: str, options: ManifestOptions) -> None:
    """Refuse options that the job system does not have."""
    defaults = {field.name: field.default for field in fields(options)}
    for name in _WITHOUT_EFFECT.get(kind, ()):
        if getattr(options, name) != defaults[name]:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect on a manifest for {kind}; leave it out")
