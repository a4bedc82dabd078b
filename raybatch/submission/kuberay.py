"""A job on Kubernetes: a RayJob of KubeRay, and a config map with the job file."""

from collections.abc import Mapping
from typing import Any

import yaml

from raybatch.submission.options import ManifestOptions, WorkerShape, read_label

FOLDER, JOB_FILE = "/etc/raybatch", "job.yaml"
_SPILL_FOLDER = "/spill"
# between the notice that a spot host is taken and its end there are about two minutes
_GRACE_S = 120
_KEPT_S = 600
_SUBMITTER_RETRIES = 2
_LABELS = {"app.kubernetes.io/managed-by": "raybatch"}
_GPU = "nvidia.com/gpu"
# volumes that are made of disks belong to root, and images do not run as root
_VOLUME_GROUP = 1000

Volume = tuple[str, str, Mapping[str, Any]]


def render_kuberay(
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
    leaves them where Ray writes them, on the disk of the image.
    """
    head_size = {"cpu": str(options.head_cpus), "memory": options.head_memory}
    file = ("job", FOLDER, {"configMap": {"name": name}})
    cluster = {
        "rayVersion": options.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # engines and reading belong to the workers; the submitter comes from another pod
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": {"spec": _pod("ray-head", head_size, [file], options)},
        },
        "workerGroupSpecs": [_workers(shape, options, spill_gib)],
    }
    spec = {
        # Kueue sets it to false when it is the job's turn
        **({"suspend": True} if options.queue else {}),
        "entrypoint": command,
        # each retry is a new cluster, and goes on where the one before it ended
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
    data = {JOB_FILE: job_text}
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
        # `KEY=VALUE`, or the product as NVIDIA's discovery labels it
        is_label = "=" in options.gpu_type
        label = options.gpu_type if is_label else f"{_GPU}.product={options.gpu_type}"
        key, value = read_label(label, flag="--gpu-type")
        selector[key] = value
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": f"{shape.shared_memory_gib}Gi"}}
    volumes: list[Volume] = [("shm", "/dev/shm", memory)]
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
        # No host with less free disk gets the pod. It is no limit: weights take disk as well.
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
    name: str, size: Mapping[str, str], volumes: list[Volume], options: ManifestOptions
) -> dict[str, Any]:
    """Return a pod with one container, and with what every pod of the job has."""
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
    """Writes texts of several lines as blocks, and repeats what Python shares."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
