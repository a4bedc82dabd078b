"""What a job file does not say of the system that it runs on, and the sizes that follow from it."""

import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import NamedTuple

from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig

_SIZE = re.compile(r"([1-9]\d*)(Gi|Ti)")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_KEY = re.compile(r"[A-Za-z0-9._-]+")
_LABEL = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
# of an image, which a mount would hide
_SYSTEM_FOLDERS = re.compile(
    "/|/(bin|boot|etc|home|home/ray|lib|lib32|lib64|opt|root|run|sbin|srv|tmp|tmp/ray|usr|var)"
    "|/usr/(bin|lib|local|sbin)|/var/(run|tmp)|/(dev|proc|sys)(/.*)?"
)
# it may be empty, as that of node-role.kubernetes.io/gpu
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_CPUS_PER_GPU, _GIB_PER_GPU = 12, 96
_CPUS_WITHOUT_GPU, _GIB_WITHOUT_GPU = 4, 16


class SecretKey(NamedTuple):
    """A key of a Kubernetes secret that a variable is taken from."""

    secret: str
    key: str


class ModelVolume(NamedTuple):
    """A persistent volume claim, and where it is mounted."""

    claim: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestOptions:
    """What a job file does not say.

    Args:
        image: with raybatch, its engine and Ray in it.
        replicas: engines; None takes those of the job, else one, or as many as fill a pod.
        gpu_type: what the system calls the GPU, such as L4; None takes any.
        service_account: of Kubernetes, with the role that may read and write the data.
        gpus_per_pod: GPUs of a worker pod, whose engines share its memory and its copy of the
            model; None makes a pod of each engine.
        cpus_per_pod: CPUs of a worker pod; None takes some for each GPU.
        memory_per_pod: as Kubernetes writes it; None takes some for each GPU.
        spill_size: disk of a worker pod for objects that Ray's object store cannot hold, as
            Kubernetes writes it; None follows from the size of the source.
        queue: of Kueue, which then starts the job.
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
    gpus_per_pod: int | None = None
    cpus_per_pod: int | None = None
    memory_per_pod: str | None = None
    head_cpus: int = 4
    head_memory: str = "16Gi"
    secrets: Mapping[str, SecretKey] = field(default_factory=dict)
    model_volume: ModelVolume | None = None
    spill_size: str | None = None
    image_pull_secret: str | None = None
    queue: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("memory_per_pod", "head_memory", "spill_size"):
            if (size := getattr(self, name)) is not None:
                gib_of(size, flag=f"--{name.replace('_', '-')}")
        for name in ("service_account", "image_pull_secret", "queue"):
            given = getattr(self, name)
            if given is not None and not _OBJECT_NAME.fullmatch(given):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {given}: no name of an object of Kubernetes, "
                    "which has small letters, digits, '-' and '.'"
                )
        if twice := sorted(self.env_vars.keys() & self.secrets.keys()):
            raise ConfigError(f"--secret {twice[0]}: also given with --env; leave that one out")

    def required_image(self, kind: str) -> str:
        if not self.image:
            raise ConfigError(
                f"a manifest for {kind} needs --image: one with Ray, raybatch and its engine in "
                "it (deploy/Dockerfile builds one)"
            )
        return self.image


class WorkerShape(NamedTuple):
    """The hosts with engines, which are all alike; the shared memory is for Ray's object store."""

    num_engines: int
    num_hosts: int
    num_gpus: int
    num_cpus: int
    memory_gib: int
    shared_memory_gib: int


def worker_shape(job: JobConfig, options: ManifestOptions) -> WorkerShape:
    """Return how many hosts run a job's engines, and what each of them has.

    Raises:
        ConfigError: engines do not fit into pods of so many GPUs, or leave some of them idle.
    """
    stage, per_pod = job.stage, options.gpus_per_pod
    given = stage.pool.num_gpus_per_replica
    gpus = float(gpus_of_engine(stage.backend, stage.engine) if given is None else given)
    asked = options.replicas or stage.pool.replicas
    if per_pod is not None and not gpus:
        raise ConfigError("--gpus-per-pod: the job runs on CPUs; leave it out")
    if per_pod is None:
        num_engines = num_hosts = asked or 1
        num_gpus = math.ceil(gpus)
    else:
        num_ranks = type_of(stage.backend).num_actors(stage.backend, stage.engine)
        num_engines, num_hosts = _fill_pods(asked, gpus, per_pod, may_cross=num_ranks > per_pod)
        num_gpus = per_pod
    cpus = options.cpus_per_pod or num_gpus * _CPUS_PER_GPU or _CPUS_WITHOUT_GPU
    gib = num_gpus * _GIB_PER_GPU or _GIB_WITHOUT_GPU
    if options.memory_per_pod is not None:
        gib = gib_of(options.memory_per_pod, flag="--memory-per-pod")
    # a little less than the third that Ray's object store takes by default
    shared = max(1, gib * 5 // 16)
    return WorkerShape(num_engines, num_hosts, num_gpus, cpus, gib, shared)


def _fill_pods(asked: int | None, gpus: float, per_pod: int, *, may_cross: bool) -> tuple[int, int]:
    """Return engines and pods; as many engines as fill one where no number is asked for.

    Engines that `may_cross` from pod to pod are larger than one.
    """
    if may_cross:
        if gpus % per_pod:
            raise ConfigError(
                f"--gpus-per-pod {per_pod}: engines of {gpus:g} GPUs do not fill their pods; "
                "choose a divisor"
            )
        return asked or 1, int((asked or 1) * gpus / per_pod)
    # a third of a GPU is a little less
    in_a_pod = int(per_pod / gpus + 1e-6)
    if in_a_pod * gpus < per_pod - 1e-6:
        raise ConfigError(
            f"--gpus-per-pod {per_pod}: engines of {gpus:g} GPUs do not fill such a pod; choose a "
            f"multiple of {gpus:g}, or change tensor_parallel_size"
        )
    num_engines = asked or in_a_pod
    if num_engines % in_a_pod:
        raise ConfigError(
            f"--gpus-per-pod {per_pod}: {num_engines} engines leave GPUs idle; give --replicas, "
            f"or pool.replicas, a multiple of the {in_a_pod} that a pod has room for"
        )
    return num_engines, num_engines // in_a_pod


def gib_of(size: str, *, flag: str) -> int:
    """Return GiB of a size such as "400Gi" or "2Ti"; ConfigError: it is none."""
    found = _SIZE.fullmatch(size)
    if found is None:
        raise ConfigError(f"{flag} {size}: expected a size such as 400Gi or 2Ti")
    return int(found[1]) * (1024 if found[2] == "Ti" else 1)


_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def read_secrets(settings: Iterable[str]) -> dict[str, SecretKey]:
    """Return variables given as VARIABLE=NAME:KEY; ConfigError: one is malformed."""
    secrets: dict[str, SecretKey] = {}
    for setting in settings:
        name, equals, reference = setting.partition("=")
        secret, _, key = reference.partition(":")
        is_name = _ENV_NAME.fullmatch(name) is not None
        if not (is_name and _OBJECT_NAME.fullmatch(secret) and _KEY.fullmatch(key)):
            # a value that was given in place of its secret is not shown
            shown = name if is_name and equals else "..."
            raise ConfigError(
                f"--secret {shown}: expected VARIABLE=NAME:KEY, where NAME is a Kubernetes secret, "
                "made with 'kubectl create secret generic NAME', and KEY one of its keys"
            )
        if name in secrets:
            raise ConfigError(f"--secret {name}: given twice; leave one out")
        secrets[name] = SecretKey(secret, key)
    return secrets


def read_model_volume(setting: str | None) -> ModelVolume | None:
    """Return a volume given as CLAIM or CLAIM:/path; ConfigError: it is malformed."""
    if setting is None:
        return None
    claim, colon, path = setting.partition(":")
    path = path if colon else "/models"
    if not _OBJECT_NAME.fullmatch(claim) or not path.startswith("/"):
        raise ConfigError(
            f"--model-volume {setting}: expected CLAIM or CLAIM:/path, the name of a persistent "
            "volume claim and where to mount it"
        )
    path = "/" + posixpath.normpath(path).lstrip("/")
    if _SYSTEM_FOLDERS.fullmatch(path):
        raise ConfigError(
            f"--model-volume {setting}: a volume over {path} would hide files of the system; mount "
            "it at a folder of its own, such as /models"
        )
    return ModelVolume(claim, path)


def read_node_selector(settings: Iterable[str]) -> dict[str, str]:
    """Return labels given as KEY=VALUE; ConfigError: one is malformed."""
    selector: dict[str, str] = {}
    for setting in settings:
        key, value = read_label(setting, flag="--node-selector")
        if selector.setdefault(key, value) != value:
            raise ConfigError(f"--node-selector {setting}: no host has two values of a label")
    return selector


def read_label(setting: str, *, flag: str) -> tuple[str, str]:
    """Return a label given as LABEL=VALUE; ConfigError: Kubernetes would not take it."""
    key, equals, value = setting.partition("=")
    if not (equals and _LABEL.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
        raise ConfigError(f"{flag} {setting}: expected LABEL=VALUE, as Kubernetes writes labels")
    return key, value


def read_tolerations(settings: Iterable[str]) -> tuple[dict[str, str], ...]:
    """Return tolerations given as KEY[=VALUE][:EFFECT]; ConfigError: one is malformed."""
    tolerations = []
    for setting in settings:
        rest, colon, effect = setting.partition(":")
        key, equals, value = rest.partition("=")
        if not key or (colon and effect not in _EFFECTS):
            raise ConfigError(
                f"--toleration {setting}: expected KEY, KEY=VALUE or KEY=VALUE:EFFECT, where the "
                f"effect is one of {', '.join(_EFFECTS)}"
            )
        how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **how, **({"effect": effect} if effect else {})})
    return tuple(tolerations)
