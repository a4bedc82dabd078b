"""From a job file to the file of a job system."""

import json
import shlex
from collections.abc import Mapping
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
from raybatch.submission.manifest import (
    ManifestOptions,
    WorkerShape,
    check_retries,
    job_command,
    manifest_name,
    worker_shape,
)

_FOLDER = "/etc/raybatch"
_JOB_FILE = "job.yaml"
_RAY_HEAD = {"cpu": "4", "memory": "16Gi"}
# between the notice that a spot host is taken and its end there are about two minutes
_GRACE_S = 120
_KEPT_S = 600
_SUBMITTER_RETRIES = 2
_LABELS = {"app.kubernetes.io/managed-by": "raybatch"}


def render_kuberay(job: JobConfig, job_text: str, job_file: str, options: ManifestOptions) -> str:
    """Return two YAML documents: the config map and the RayJob (KubeRay 1.5.1 or newer).

    Raises:
        ConfigError: there is no image.
    """
    name = manifest_name(job_file)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": _LABELS},
        "data": {_JOB_FILE: job_text},
    }
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": _LABELS},
        "spec": _spec(name, worker_shape(job, options), options),
    }
    documents = [config_map, ray_job]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _spec(name: str, shape: WorkerShape, options: ManifestOptions) -> dict[str, Any]:
    image = options.required_image("kuberay")
    return {
        "entrypoint": job_command(f"{_FOLDER}/{_JOB_FILE}", shape.num_hosts),
        # each retry is a new cluster, and goes on where the one before it ended
        "backoffLimit": options.max_retries,
        "submitterConfig": {"backoffLimit": _SUBMITTER_RETRIES},
        "activeDeadlineSeconds": options.timeout_s,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_S,
        "rayClusterSpec": {
            "rayVersion": options.ray_version,
            "authOptions": {"mode": "token"},
            "headGroupSpec": _head(image, name, options),
            "workerGroupSpecs": [_workers(image, shape, options)],
        },
    }


def _head(image: str, name: str, options: ManifestOptions) -> dict[str, Any]:
    mount = {"name": "job", "mountPath": _FOLDER, "readOnly": True}
    container = _container("ray-head", image, _RAY_HEAD, mount, options)
    volume = {"name": "job", "configMap": {"name": name}}
    return {
        # engines and reading belong to the workers; the submitter comes from another pod
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": {"spec": {**_pod(options), "containers": [container], "volumes": [volume]}},
    }


def _workers(image: str, shape: WorkerShape, options: ManifestOptions) -> dict[str, Any]:
    requests = {"cpu": str(shape.num_cpus), "memory": f"{shape.memory_gib}Gi"}
    limits = {**requests, "nvidia.com/gpu": str(shape.num_gpus)} if shape.num_gpus else requests
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    container = _container("ray-worker", image, limits, mount, options)
    size = f"{shape.shared_memory_gib}Gi"
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    spec = {
        **_pod(options),
        **_gpu_choice(options, shape),
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [volume],
    }
    return {
        "groupName": "gpu" if shape.num_gpus else "cpu",
        "replicas": shape.num_hosts,
        "minReplicas": shape.num_hosts,
        "maxReplicas": shape.num_hosts,
        "rayStartParams": {},
        "template": {"spec": spec},
    }


def _pod(options: ManifestOptions) -> dict[str, Any]:
    return {"serviceAccountName": options.service_account} if options.service_account else {}


def _container(
    name: str,
    image: str,
    resources: Mapping[str, str],
    mount: Mapping[str, Any],
    options: ManifestOptions,
) -> dict[str, Any]:
    env = [{"name": name, "value": value} for name, value in options.env_vars.items()]
    return {
        "name": name,
        "image": image,
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        **({"env": env} if env else {}),
        "volumeMounts": [mount],
    }


def _gpu_choice(options: ManifestOptions, shape: WorkerShape) -> dict[str, Any]:
    """Return the node selector: `KEY=VALUE`, or the product as NVIDIA's discovery labels it."""
    if not options.gpu_type or not shape.num_gpus:
        return {}
    key, equals, value = options.gpu_type.partition("=")
    selector = {key: value} if equals else {"nvidia.com/gpu.product": options.gpu_type}
    tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    return {"nodeSelector": selector, "tolerations": [tolerated]}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what Python shares."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


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
