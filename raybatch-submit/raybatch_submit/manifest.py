"""Renders a job file as the manifest of a job system.

Job systems rerun the command when it fails; a job is resumed by its command.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import fsspec
import yaml

from raybatch.config.option import fields_of, is_default
from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.inputs.listing import ListedFile, list_files
from raybatch.inputs.parquet_files import sampled
from raybatch.inputs.source import scan_source
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch_submit.bundle import EXCLUDED_SUFFIXES
from raybatch_submit.checks import check_paths, paths_on_hosts
from raybatch_submit.options import (
    ManifestOptions,
    WorkerShape,
    flag_of,
    gib_of,
    read_label,
    worker_shape,
)

_FOLDER, _JOB_FILE = "/etc/raybatch", "job.yaml"
_SPILL_FOLDER = "/spill"
# spot hosts get about two minutes of notice
_GRACE_S = 120
_KEPT_S = 600
_SUBMITTER_RETRIES = 2
_LABELS = {"app.kubernetes.io/managed-by": "raybatch"}
_GPU = "nvidia.com/gpu"
# volumes on disks belong to root, but images do not run as root
_VOLUME_GROUP = 1000
# KubeRay appends suffixes to the name, and Kubernetes allows 63 characters
_MAX_NAME = 47
_OF_ALL = ("replicas", "env_vars", "ray_version")
# options with an effect, by kind of manifest
_TAKEN = {
    "anyscale": (*_OF_ALL, "image", "gpu_type", "compute_config", "max_retries", "timeout_s"),
    "kuberay": tuple(name for name in fields_of(ManifestOptions) if name != "compute_config"),
    "ray": _OF_ALL,
}

# disk per byte of rows: sorting into the order of the plan writes rows as read, as cut, and as
# sorted; this was the largest share on disk at a time (docs/how-to/sizing.md)
_COPIES = 3
# margin for unequal shares of pods
_UNEVEN = 1.5
_LEAST_GIB = 10
_COMPRESSED, _TEXT_GROWTH = (".gz", ".zst"), 5.0

_Volume = tuple[str, str, Mapping[str, Any]]


def render_manifest(kind: str, job_file: str, options: ManifestOptions) -> tuple[str, list[str]]:
    """Return the manifest, and notes for the user; ConfigError: it would not work."""
    if kind not in _TAKEN:
        raise ConfigError(f"kind must be one of {', '.join(_TAKEN)}, got {kind!r}")
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
            "overwrite: true would remove the output at each retry; remove it from the job file, "
            "and choose a new sink instead"
        )
    with fsspec.open(job_file, "r", encoding="utf-8") as file:
        job_text = file.read()
    notes = _paths_to_mount(job, options)
    if kind == "kuberay":
        shape = worker_shape(job, options)
        spill_gib, why_not = _spill_gib(job, options, shape)
        text = _render_kuberay(
            job_text,
            options,
            shape,
            name=manifest_name(job_file),
            command=_job_command(f"{_FOLDER}/{_JOB_FILE}", shape.num_engines),
            spill_gib=spill_gib,
        )
        notes += why_not
    elif kind == "anyscale":
        text = render_anyscale(job, job_file, options)
    else:
        text = _render_ray(job_text, job_file, options)
    return text, [f"note: {note}" for note in notes]


def _paths_to_mount(job: JobConfig, options: ManifestOptions) -> list[str]:
    """Return the paths that hosts need and that are not on the model volume."""
    volume = options.model_volume
    return [
        f"{what} {path} must exist on every host"
        for what, path in paths_on_hosts(job)
        if volume is None or not path.startswith(f"{volume.path}/")
    ]


def _spill_gib(
    job: JobConfig, options: ManifestOptions, shape: WorkerShape
) -> tuple[int | None, list[str]]:
    """Return the disk of a worker for Ray's object spilling, and a note if it is unknown."""
    if options.spill_size is not None:
        return gib_of(options.spill_size, flag="--spill-size"), []
    if job.plan.mode == "off":
        # rows are not sorted
        return None, []
    try:
        return spill_gib_of(source_bytes(job), shape), []
    except ConfigError as error:
        return None, [
            f"{error}; so the disk space for sorting is unknown, and Ray spills to the disk of "
            "the image; set --spill-size, such as three times the rows' size in memory"
        ]


def _job_command(job_file: str, replicas: int | None) -> str:
    """Return the command of a job; error rows do not make it fail."""
    flags = "" if replicas is None else f"--replicas {replicas} "
    return f"python -m raybatch run {shlex.quote(job_file)} {flags}--allow-error-rows"


def manifest_name(job_file: str) -> str:
    """Return a job name valid in every system, from the file name; ConfigError: none is left."""
    stem = Path(job_file).stem.lower()
    name = re.sub(r"[^a-z0-9]+", "-", f"raybatch-{stem}").strip("-")[:_MAX_NAME].strip("-")
    if name == "raybatch" and not re.search(r"[a-z0-9]", stem):
        raise ConfigError(f"{job_file}: cannot derive a job name from the file name; rename it")
    return name


def render_anyscale(job: JobConfig, job_file: str, options: ManifestOptions) -> str:
    """Return the YAML of an Anyscale job; it uploads the folder of the job file."""
    if PurePath(job_file).is_absolute() or ".." in PurePath(job_file).parts:
        raise ConfigError(
            f"{job_file}: Anyscale uploads the current folder; change to the folder of the job "
            "file, and use a path relative to it"
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
    """Return a compute config for a kind of GPU; None for Anyscale's default."""
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
    """Return a script that contains the job file; run it again to resume."""
    runtime_env = {"env_vars": dict(options.env_vars)} if options.env_vars else {}
    command = _job_command(_JOB_FILE, options.replicas)
    end = "end-of-job"
    while end in job_text:
        end += "-"
    return f"""#!/bin/sh
# Sends {manifest_name(job_file)} to the cluster in RAY_API_SERVER_ADDRESS and follows it.
# Needs 'ray[default]' here, and an image with raybatch, and what the job needs of it, on the hosts.
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


def _render_kuberay(
    job_text: str,
    options: ManifestOptions,
    shape: WorkerShape,
    *,
    name: str,
    command: str,
    spill_gib: int | None,
) -> str:
    """Return two YAML documents: the config map and the RayJob (KubeRay 1.5.1 or newer).

    `spill_gib` is the disk of each worker pod for objects that do not fit into shared memory; None
    uses the disk of the image.
    """
    head_size = {"cpu": str(options.head_cpus), "memory": options.head_memory}
    file = ("job", _FOLDER, {"configMap": {"name": name}})
    cluster = {
        "rayVersion": options.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # engines and read tasks run on workers; the submitter is another pod
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": {"spec": _pod("ray-head", head_size, [file], options)},
        },
        "workerGroupSpecs": [_workers(shape, options, spill_gib)],
    }
    spec = {
        # Kueue sets it to false when it is the job's turn
        **({"suspend": True} if options.queue else {}),
        "entrypoint": command,
        # each retry is a new cluster that resumes the job
        "backoffLimit": options.max_retries,
        "submitterConfig": {"backoffLimit": _SUBMITTER_RETRIES},
        "activeDeadlineSeconds": options.timeout_s,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_S,
        "rayClusterSpec": cluster,
    }
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    about = {"name": name, "labels": _LABELS}
    about_job = {"name": name, "labels": {**_LABELS, **queue}}
    data = {_JOB_FILE: job_text}
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data},
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about_job, "spec": spec},
    ]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _workers(shape: WorkerShape, options: ManifestOptions, spill_gib: int | None) -> dict[str, Any]:
    size = {"cpu": str(shape.num_cpus), "memory": f"{shape.memory_gib}Gi"}
    selector, tolerations = dict(options.node_selector), list(options.tolerations)
    if shape.num_gpus:
        size[_GPU] = str(shape.num_gpus)
        tolerations.append({"key": _GPU, "operator": "Exists", "effect": "NoSchedule"})
    if options.gpu_type:
        # LABEL=VALUE, or the product name in the labels of NVIDIA's GPU discovery
        is_label = "=" in options.gpu_type
        label = options.gpu_type if is_label else f"{_GPU}.product={options.gpu_type}"
        key, value = read_label(label, flag="--gpu-type")
        selector[key] = value
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": f"{shape.shared_memory_gib}Gi"}}
    volumes: list[_Volume] = [("shm", "/dev/shm", memory)]
    start_params = {}
    if spill_gib is not None:
        volumes.append(("spill", _SPILL_FOLDER, {"emptyDir": {"sizeLimit": f"{spill_gib}Gi"}}))
        start_params["object-spilling-directory"] = _SPILL_FOLDER
    choice = {
        **({"nodeSelector": selector} if selector else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        "terminationGracePeriodSeconds": _GRACE_S,
    }
    pod = _pod("ray-worker", size, volumes, options)
    if spill_gib is not None:
        # a request, so that the host has this free disk; no limit, since weights use disk too
        requests = {**size, "ephemeral-storage": f"{spill_gib}Gi"}
        pod["containers"][0]["resources"]["requests"] = requests
    return {
        "groupName": "gpu" if shape.num_gpus else "cpu",
        "replicas": shape.num_hosts,
        "minReplicas": shape.num_hosts,
        "maxReplicas": shape.num_hosts,
        "rayStartParams": start_params,
        "template": {"spec": {**choice, **pod}},
    }


def _pod(
    name: str, size: Mapping[str, str], volumes: list[_Volume], options: ManifestOptions
) -> dict[str, Any]:
    """Return a pod with one container and the settings common to all pods."""
    env: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in options.env_vars.items()
    ]
    env += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": source.secret, "key": source.key}}}
        for name, source in options.secrets.items()
    ]
    if (models := options.model_volume) is not None:
        volumes = [
            *volumes,
            ("models", models.path, {"persistentVolumeClaim": {"claimName": models.claim}}),
        ]
        folders = {"HF_HUB_CACHE": "hub", "RAYBATCH_CACHE_DIR": "raybatch"}
        env += [
            {"name": name, "value": f"{models.path}/{folder}"}
            for name, folder in folders.items()
            if name not in options.env_vars
        ]
    container = {
        "name": name,
        "image": options.required_image("kuberay"),
        "resources": {"limits": size, "requests": size},
        **({"env": env} if env else {}),
        "volumeMounts": [
            {"name": name, "mountPath": path, **({"readOnly": True} if "configMap" in kind else {})}
            for name, path, kind in volumes
        ],
    }
    group = {"fsGroup": _VOLUME_GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    account, secret = options.service_account, options.image_pull_secret
    return {
        **({"serviceAccountName": account} if account else {}),
        **({"imagePullSecrets": [{"name": secret}]} if secret else {}),
        **({"securityContext": group} if models is not None else {}),
        "containers": [container],
        "volumes": [{"name": name, **kind} for name, _, kind in volumes],
    }


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, and no YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def spill_gib_of(num_bytes: int, shape: WorkerShape) -> int | None:
    """Return GiB of disk per host for spilling `num_bytes` of rows; None if memory suffices."""
    needed = num_bytes * _COPIES * _UNEVEN / shape.num_hosts / (1 << 30)
    # the other half is for rows in transit to and from engines
    return None if needed <= shape.shared_memory_gib / 2 else max(_LEAST_GIB, math.ceil(needed))


def source_bytes(job: JobConfig) -> int:
    """Return the approximate size of a source's rows in memory, from a few of its files.

    Raises:
        ConfigError: it cannot be read here.
    """
    with error_context(f"source {job.source!r} cannot be listed"):
        files = list_files(job.source, has_columns=job.columns is not None)
        sizes = {file.path: _stored_bytes(file.path) for file in files}
    parquet = [file for file in files if file.kind == "parquet"]
    growth = 1.0
    if few := sampled(parquet):
        scans = [scan_source(file.path, columns=_own_columns(file, job.columns)) for file in few]
        in_memory = sum(part.num_bytes for scan in scans for part in scan.slices)
        growth = in_memory / max(1, sum(sizes[file.path] for file in few))
    stored = sum(sizes[file.path] for file in parquet)
    others = sum(sizes.values()) - stored
    compressed = sum(size for path, size in sizes.items() if path.endswith(_COMPRESSED))
    return round(stored * growth + others + compressed * (_TEXT_GROWTH - 1))


def _own_columns(file: ListedFile, columns: Sequence[str] | None) -> list[str] | None:
    of_folders = dict(file.folder_columns)
    return None if columns is None else [name for name in columns if name not in of_folders]


def _stored_bytes(path: str) -> int:
    filesystem, inner = fsspec.core.url_to_fs(path)
    return int(filesystem.size(inner) or 0)
