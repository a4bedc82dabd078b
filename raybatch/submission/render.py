"""From a job file to the file of a job system."""

import json
import shlex
from dataclasses import fields
from pathlib import PurePath
from typing import Any

import fsspec
import yaml

from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch.submission.bundle import EXCLUDED_SUFFIXES
from raybatch.submission.checks import check_paths, paths_on_hosts
from raybatch.submission.kuberay import render_kuberay
from raybatch.submission.manifest import (
    ManifestOptions,
    WorkerShape,
    check_retries,
    job_command,
    manifest_name,
    worker_shape,
)

_WITHOUT_EFFECT = {
    "anyscale": ("service_account",),
    "kuberay": ("compute_config",),
    "ray": (
        *("image", "gpu_type", "compute_config", "service_account"),
        *("max_retries", "timeout_s"),
    ),
}
_HEAD = {"CPU": 4, "memory": "16Gi"}


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
    check_retries(job)
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


def render_anyscale(job: JobConfig, job_file: str, options: ManifestOptions) -> str:
    """Return the YAML of an Anyscale job; it sends the folder with the job file along.

    Raises:
        ConfigError: there is no image, or the job file lies elsewhere.
    """
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


def render_ray(job: JobConfig, job_text: str, job_file: str, options: ManifestOptions) -> str:
    """Return a script with the job file in it; run again, it goes on where the job has ended."""
    runtime_env = {"env_vars": dict(options.env_vars)} if options.env_vars else {}
    command = job_command("job.yaml", options.replicas)
    end = "end-of-job"
    while end in job_text:
        end += "-"
    return f"""#!/bin/sh
# Sends {manifest_name(job_file)} to the cluster in RAY_API_SERVER_ADDRESS and follows it.
# Needs 'ray[default]' here, and an image with raybatch on the hosts.
set -eu
: "${{RAY_API_SERVER_ADDRESS:?set it to the address of the dashboard, such as http://HEAD:8265}}"
# the client sends the token of the cluster only with this set
export RAY_AUTH_MODE="${{RAY_AUTH_MODE:-token}}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/job.yaml" <<'{end}'
{job_text.rstrip()}
{end}
ray job submit --working-dir "$work" --entrypoint-num-cpus 0 \\
    --runtime-env-json {shlex.quote(json.dumps(runtime_env))} -- \\
    {command}
"""
