"""From a job file to the file of a job system.

Systems run the same command again when it fails; what is done stays done, so that a retry goes
on.
"""

import json
import re
import shlex
from pathlib import Path, PurePath
from typing import Any

import fsspec
import yaml

from raybatch.config.option import fields_of, is_default
from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch.submission.bundle import EXCLUDED_SUFFIXES
from raybatch.submission.checks import check_paths, paths_on_hosts
from raybatch.submission.kuberay import FOLDER, JOB_FILE, render_kuberay
from raybatch.submission.options import ManifestOptions, WorkerShape, flag_of, gib_of, worker_shape
from raybatch.submission.spilling import source_bytes, spill_gib_of

# KubeRay puts suffixes behind the name, and Kubernetes allows 63 characters
_MAX_NAME = 47
_OF_ALL = ("replicas", "env_vars", "ray_version")
# options that have an effect, by the kind of manifest
_TAKEN = {
    "anyscale": (*_OF_ALL, "image", "gpu_type", "compute_config", "max_retries", "timeout_s"),
    "kuberay": tuple(name for name in fields_of(ManifestOptions) if name != "compute_config"),
    "ray": _OF_ALL,
}


def render_manifest(kind: str, job_file: str, options: ManifestOptions) -> tuple[str, list[str]]:
    """Return the file, and what its reader has to see to; ConfigError: it would not work."""
    if kind not in _TAKEN:
        raise ConfigError(f"{kind!r} is none of {', '.join(_TAKEN)}")
    for name in fields_of(ManifestOptions):
        if name not in _TAKEN[kind] and not is_default(options, name):
            raise ConfigError(
                f"{flag_of(name)} has no effect on a manifest for {kind}; leave it out"
            )
    job = Job.from_yaml(job_file).config
    if options.gpu_type and not worker_shape(job, options).num_gpus:
        raise ConfigError(f"{job_file}: the job runs on CPUs; leave --gpu-type out")
    check_paths(job, working_dir=None)
    if job.overwrite:
        raise ConfigError(
            "overwrite: true would remove at each retry what the try before it has written; take "
            "it out of the job file, and choose a new sink instead"
        )
    with fsspec.open(job_file, "r", encoding="utf-8") as file:
        job_text = file.read()
    notes = _paths_to_mount(job, options)
    if kind == "kuberay":
        shape = worker_shape(job, options)
        spill_gib, why_not = _spill_gib(job, options, shape)
        text = render_kuberay(
            job_text,
            options,
            shape,
            name=manifest_name(job_file),
            command=_job_command(f"{FOLDER}/{JOB_FILE}", shape.num_engines),
            spill_gib=spill_gib,
        )
        notes += why_not
    elif kind == "anyscale":
        text = render_anyscale(job, job_file, options)
    else:
        text = _render_ray(job_text, job_file, options)
    return text, [f"note: {note}" for note in notes]


def _paths_to_mount(job: JobConfig, options: ManifestOptions) -> list[str]:
    """Return what the hosts must have and the model volume does not hold."""
    volume = options.model_volume
    return [
        f"{what} {path} must be there on every host"
        for what, path in paths_on_hosts(job)
        if volume is None or not path.startswith(f"{volume.path}/")
    ]


def _spill_gib(
    job: JobConfig, options: ManifestOptions, shape: WorkerShape
) -> tuple[int | None, list[str]]:
    """Return the disk of a worker for objects of Ray, and what to say where it is not known."""
    if options.spill_size is not None:
        return gib_of(options.spill_size, flag="--spill-size"), []
    if job.plan.mode == "off":
        # rows are not sorted
        return None, []
    try:
        return spill_gib_of(source_bytes(job), shape), []
    except ConfigError as error:
        return None, [
            f"{error}; so the disk that sorting takes is not known, and Ray writes to that of the "
            "image; give --spill-size, such as three times the rows' size in memory"
        ]


def _job_command(job_file: str, replicas: int | None) -> str:
    """Return the command of a job: error rows are no reason to run it again."""
    flags = "" if replicas is None else f"--replicas {replicas} "
    return f"python -m raybatch run {shlex.quote(job_file)} {flags}--allow-error-rows"


def manifest_name(job_file: str) -> str:
    """Return a name for every system, made of the job file's; ConfigError: nothing is left."""
    stem = Path(job_file).stem.lower()
    name = re.sub(r"[^a-z0-9]+", "-", f"raybatch-{stem}").strip("-")[:_MAX_NAME].strip("-")
    if name == "raybatch" and not re.search(r"[a-z0-9]", stem):
        raise ConfigError(f"{job_file}: the name of the job is made of the file's; rename it")
    return name


def render_anyscale(job: JobConfig, job_file: str, options: ManifestOptions) -> str:
    """Return the YAML of an Anyscale job; it sends the folder with the job file along."""
    if PurePath(job_file).is_absolute() or ".." in PurePath(job_file).parts:
        raise ConfigError(
            f"{job_file}: Anyscale gets the folder from which it is submitted; go to the folder "
            "of the job file, and give the path from there"
        )
    shape = worker_shape(job, options)
    config: dict[str, Any] = {
        "name": manifest_name(job_file),
        "entrypoint": _job_command(job_file, shape.num_engines),
        "image_uri": options.required_image("anyscale"),
        "compute_config": options.compute_config or _compute_config(shape, options),
        "working_dir": ".",
        "excludes": [".git", ".env", ".venv", *(f"**/*{end}" for end in EXCLUDED_SUFFIXES)],
        "env_vars": dict(options.env_vars) or None,
        "max_retries": options.max_retries,
        "timeout_s": options.timeout_s,
    }
    given = {name: value for name, value in config.items() if value is not None}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=100)


def _compute_config(shape: WorkerShape, options: ManifestOptions) -> dict[str, Any] | None:
    """Return a compute config for a kind of GPU; None takes the default of Anyscale."""
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
    head = {"CPU": options.head_cpus, "memory": options.head_memory}
    return {"head_node": {"required_resources": head}, "worker_nodes": [workers]}


def _render_ray(job_text: str, job_file: str, options: ManifestOptions) -> str:
    """Return a script with the job file in it; run again, it goes on where the job has ended."""
    runtime_env = {"env_vars": dict(options.env_vars)} if options.env_vars else {}
    command = _job_command(JOB_FILE, options.replicas)
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
