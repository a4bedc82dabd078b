"""A KubeRay RayJob, and the config map with its job file."""

from collections.abc import Mapping
from typing import Any

import yaml

from raybatch.job.config import JobConfig
from raybatch.submission.manifest import (
    ManifestOptions,
    WorkerShape,
    job_command,
    manifest_name,
    worker_shape,
)

_FOLDER = "/etc/raybatch"
_JOB_FILE = "job.yaml"
_HEAD = {"cpu": "4", "memory": "16Gi"}
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
    container = _container("ray-head", image, _HEAD, mount, options)
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
