"""From a job file to the file of a job system.

Systems run the same command again when it fails; what is done stays done, so that a retry goes
on.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import fsspec
import yaml

from raybatch.backends.choice import gpus_of_engine
from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch.submission.bundle import EXCLUDED_SUFFIXES
from raybatch.submission.checks import check_paths, paths_on_hosts

# KubeRay puts suffixes behind the name, and Kubernetes allows 63 characters
_MAX_NAME = 47
_FOLDER = "/etc/raybatch"
_JOB_FILE = "job.yaml"
_HEAD_CPUS, _HEAD_MEMORY = 4, "16Gi"
# between the notice that a spot host is taken and its end there are about two minutes
_GRACE_S = 120
_KEPT_S = 600
_SUBMITTER_RETRIES = 2
_LABELS = {"app.kubernetes.io/managed-by": "raybatch"}
_WITHOUT_EFFECT = {
    "anyscale": ("service_account",),
    "kuberay": ("compute_config",),
    "ray": (
        *("image", "gpu_type", "compute_config", "service_account"),
        *("max_retries", "timeout_s"),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestOptions:
    """What a job file does not say."""

    image: str | None = None
    """With raybatch, its engine and Ray in it."""
    ray_version: str = field(default_factory=lambda: metadata.version("ray"))
    replicas: int | None = None
    """Engines; None takes those of the job, else 1."""
    gpu_type: str | None = None
    """What the system calls the GPU, such as L4; None takes any."""
    max_retries: int = 3
    timeout_s: int = 172_800
    env_vars: Mapping[str, str] = field(default_factory=dict)
    compute_config: str | None = None
    service_account: str | None = None
    """Of Kubernetes, with the role that may read and write the data."""

    def required_image(self, kind: str) -> str:
        if not self.image:
            raise ConfigError(
                f"a manifest for {kind} needs --image: one with Ray, raybatch and its engine in "
                "it (docs/start/on-a-cluster.md has the Dockerfile)"
            )
        return self.image


class WorkerShape(NamedTuple):
    """One host with engines; the shared memory is for Ray's object store."""

    num_hosts: int
    num_gpus: int
    num_cpus: int
    memory_gib: int
    shared_memory_gib: int


def render_manifest(kind: str, job_file: str, options: ManifestOptions) -> tuple[str, list[str]]:
    """Return the file, and what its reader has to see to; ConfigError: it would not work."""
    defaults = {field.name: field.default for field in fields(options)}
    for name in _WITHOUT_EFFECT.get(kind, ()):
        if getattr(options, name) != defaults[name]:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect on a manifest for {kind}; leave it out")
    job = Job.from_yaml(job_file).config
    if options.gpu_type and not _worker_shape(job, options).num_gpus:
        raise ConfigError(f"{job_file}: the job runs on CPUs; leave --gpu-type out")
    check_paths(job, working_dir=None)
    if job.overwrite:
        raise ConfigError(
            "overwrite: true would remove at each retry what the try before it has written; take "
            "it out of the job file, and choose a new sink instead"
        )
    with fsspec.open(job_file, "r", encoding="utf-8") as file:
        job_text = file.read()
    if kind == "kuberay":
        text = _render_kuberay(job, job_text, job_file, options)
    elif kind == "anyscale":
        text = render_anyscale(job, job_file, options)
    elif kind == "ray":
        text = _render_ray(job_text, job_file, options)
    else:
        raise ConfigError(f"{kind!r} is none of anyscale, kuberay, ray")
    return text, [f"note: {path} must be there on every host" for path in paths_on_hosts(job)]


def _worker_shape(job: JobConfig, options: ManifestOptions) -> WorkerShape:
    stage = job.stage
    num_hosts = options.replicas or stage.pool.replicas or 1
    gpus = stage.pool.num_gpus_per_replica
    num_gpus = math.ceil(gpus_of_engine(stage.backend, stage.engine) if gpus is None else gpus)
    if not num_gpus:
        return WorkerShape(num_hosts, 0, num_cpus=4, memory_gib=16, shared_memory_gib=5)
    return WorkerShape(num_hosts, num_gpus, 12 * num_gpus, 96 * num_gpus, 30 * num_gpus)


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


def _render_kuberay(job: JobConfig, job_text: str, job_file: str, options: ManifestOptions) -> str:
    """Return two YAML documents: the config map and the RayJob (KubeRay 1.5.1 or newer)."""
    name, shape = manifest_name(job_file), _worker_shape(job, options)
    image = options.required_image("kuberay")
    about = {"name": name, "labels": _LABELS}
    head_size = {"cpu": str(_HEAD_CPUS), "memory": _HEAD_MEMORY}
    head_mount = {"name": "job", "mountPath": _FOLDER, "readOnly": True}
    head = _pod("ray-head", image, head_size, head_mount, {"configMap": {"name": name}}, options)
    cluster = {
        "rayVersion": options.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # engines and reading belong to the workers; the submitter comes from another pod
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": {"spec": head},
        },
        "workerGroupSpecs": [_workers(image, shape, options)],
    }
    spec = {
        "entrypoint": _job_command(f"{_FOLDER}/{_JOB_FILE}", shape.num_hosts),
        # each retry is a new cluster, and goes on where the one before it ended
        "backoffLimit": options.max_retries,
        "submitterConfig": {"backoffLimit": _SUBMITTER_RETRIES},
        "activeDeadlineSeconds": options.timeout_s,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_S,
        "rayClusterSpec": cluster,
    }
    data = {_JOB_FILE: job_text}
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data},
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec},
    ]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _workers(image: str, shape: WorkerShape, options: ManifestOptions) -> dict[str, Any]:
    size = {"cpu": str(shape.num_cpus), "memory": f"{shape.memory_gib}Gi"}
    choice: dict[str, Any] = {}
    if shape.num_gpus:
        size["nvidia.com/gpu"] = str(shape.num_gpus)
    if options.gpu_type and shape.num_gpus:
        # `KEY=VALUE`, or the product as NVIDIA's discovery labels it
        key, equals, value = options.gpu_type.partition("=")
        selector = {key: value} if equals else {"nvidia.com/gpu.product": options.gpu_type}
        tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        choice = {"nodeSelector": selector, "tolerations": [tolerated]}
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    memory = {"medium": "Memory", "sizeLimit": f"{shape.shared_memory_gib}Gi"}
    choice["terminationGracePeriodSeconds"] = _GRACE_S
    pod = _pod("ray-worker", image, size, mount, {"emptyDir": memory}, options, choice)
    return {
        "groupName": "gpu" if shape.num_gpus else "cpu",
        "replicas": shape.num_hosts,
        "minReplicas": shape.num_hosts,
        "maxReplicas": shape.num_hosts,
        "rayStartParams": {},
        "template": {"spec": pod},
    }


def _pod(
    name: str,
    image: str,
    size: Mapping[str, str],
    mount: Mapping[str, Any],
    volume: Mapping[str, Any],
    options: ManifestOptions,
    choice: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a pod with one container and one volume; `choice` says on which hosts it runs."""
    account = options.service_account
    env = [{"name": name, "value": value} for name, value in options.env_vars.items()]
    container = {
        "name": name,
        "image": image,
        "resources": {"limits": size, "requests": size},
        **({"env": env} if env else {}),
        "volumeMounts": [mount],
    }
    return {
        **({"serviceAccountName": account} if account else {}),
        **(choice or {}),
        "containers": [container],
        "volumes": [{"name": mount["name"], **volume}],
    }


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what Python shares."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def render_anyscale(job: JobConfig, job_file: str, options: ManifestOptions) -> str:
    """Return the YAML of an Anyscale job; it sends the folder with the job file along."""
    if PurePath(job_file).is_absolute() or ".." in PurePath(job_file).parts:
        raise ConfigError(
            f"{job_file}: Anyscale gets the folder from which it is submitted; go to the folder "
            "of the job file, and give the path from there"
        )
    shape = _worker_shape(job, options)
    config: dict[str, Any] = {
        "name": manifest_name(job_file),
        "entrypoint": _job_command(job_file, shape.num_hosts),
        "image_uri": options.required_image("anyscale"),
        "compute_config": options.compute_config or _compute_config(shape, options.gpu_type),
        "working_dir": ".",
        "excludes": [".git", ".env", ".venv", *(f"**/*{end}" for end in EXCLUDED_SUFFIXES)],
        "env_vars": dict(options.env_vars) or None,
        "max_retries": options.max_retries,
        "timeout_s": options.timeout_s,
    }
    given = {name: value for name, value in config.items() if value is not None}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=100)


def _compute_config(shape: WorkerShape, gpu_type: str | None) -> dict[str, Any] | None:
    """Return a compute config for a kind of GPU; None takes the default of Anyscale."""
    if gpu_type is None or not shape.num_gpus:
        return None
    resources = {
        "CPU": shape.num_cpus,
        "memory": f"{shape.memory_gib}Gi",
        "GPU": shape.num_gpus,
        "accelerator": gpu_type,
    }
    workers = {
        "required_resources": resources,
        "min_nodes": shape.num_hosts,
        "max_nodes": shape.num_hosts,
    }
    head = {"CPU": _HEAD_CPUS, "memory": _HEAD_MEMORY}
    return {"head_node": {"required_resources": head}, "worker_nodes": [workers]}


def _render_ray(job_text: str, job_file: str, options: ManifestOptions) -> str:
    """Return a script with the job file in it; run again, it goes on where the job has ended."""
    runtime_env = {"env_vars": dict(options.env_vars)} if options.env_vars else {}
    command = _job_command(_JOB_FILE, options.replicas)
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
