"""Options of a job system that are not in a job file, and sizes derived from them."""

import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from importlib import metadata
from typing import NamedTuple

from pydantic.dataclasses import dataclass

from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import type_of
from raybatch.config.option import CHECKED, Hidden, NonNegative, Positive, Unchecked, options
from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig
from raybatch_submit.checks import ENV_NAME

_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_OBJECT_NAME = re.compile(_NAME)
_SIZE = re.compile(r"([1-9]\d*)(Gi|Ti)")
_SECRET = re.compile(rf"([A-Za-z_][A-Za-z0-9_]*)=({_NAME}):([A-Za-z0-9._-]+)")
_VOLUME = re.compile(rf"({_NAME})(?::(/.*))?", re.DOTALL)
# the value may be empty, as in node-role.kubernetes.io/gpu
_LABEL = re.compile(rf"((?:{_NAME}/)?{_LABEL_NAME})=((?:{_LABEL_NAME})?)")
_TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(?:=(?P<value>[^:]*))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
# folders of an image that a mount would hide
_SYSTEM_FOLDERS = re.compile(
    "/|/(bin|boot|etc|home|home/ray|lib|lib32|lib64|opt|root|run|sbin|srv|tmp|tmp/ray|usr|var)"
    "|/usr/(bin|lib|local|sbin)|/var/(run|tmp)|/(dev|proc|sys)(/.*)?"
)
_CPUS_PER_GPU, _GIB_PER_GPU = 12, 96
_CPUS_WITHOUT_GPU, _GIB_WITHOUT_GPU = 4, 16


class SecretKey(NamedTuple):
    """A key of a Kubernetes secret for an environment variable."""

    secret: str
    key: str


class ModelVolume(NamedTuple):
    """A persistent volume claim and its mount path."""

    claim: str
    path: str


# flags that have other names than their options
_FLAGS = {"secrets": "secret", "tolerations": "toleration", "env_vars": "env"}


@options("")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class ManifestOptions:
    """Options of a job system; their docstrings are the help of the flags."""

    image: str | None = None
    """Container image with Ray, raybatch and its engine."""
    replicas: Positive | None = None
    """Engines, each in its own pod or --gpus-per-pod."""
    gpu_type: str | None = None
    """NVIDIA-L4 or LABEL=VALUE for KubeRay, L4 for Anyscale."""
    compute_config: str | None = None
    """Compute config of Anyscale, by name."""
    service_account: str | None = None
    """Kubernetes service account with access to the data."""
    gpus_per_pod: Positive | None = None
    """GPUs of a worker pod; its engines share the model files."""
    cpus_per_pod: Positive | None = None
    """CPUs of a worker pod; default: 12 a GPU."""
    memory_per_pod: str | None = None
    """Of a worker pod; default: 96Gi a GPU."""
    head_cpus: Positive = 4
    """CPUs of the head pod."""
    head_memory: str = "16Gi"
    """Memory of the head pod."""
    secrets: Unchecked[Mapping[str, SecretKey]] = field(default_factory=dict)
    """Variable from a Kubernetes secret; repeatable."""
    model_volume: Unchecked[ModelVolume | None] = None
    """Volume claim that keeps models."""
    spill_size: str | None = None
    """Disk of a worker; default: from the input."""
    image_pull_secret: str | None = None
    """Kubernetes secret of a private image registry."""
    queue: str | None = None
    """Queue of Kueue that starts the job."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Of worker hosts; repeatable."""
    tolerations: tuple[Mapping[str, str], ...] = ()
    """Of worker pods; repeatable."""
    max_retries: NonNegative = 3
    """Most retries of the whole job."""
    timeout_s: Positive = 172_800
    """Seconds until it is stopped."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """For the job; no secrets."""
    ray_version: Hidden[str] = field(default_factory=lambda: metadata.version("ray"))

    def __post_init__(self) -> None:
        for name in ("memory_per_pod", "head_memory", "spill_size"):
            if (size := getattr(self, name)) is not None:
                gib_of(size, flag=flag_of(name))
        for name in ("service_account", "image_pull_secret", "queue"):
            given = getattr(self, name)
            if given is not None and not _OBJECT_NAME.fullmatch(given):
                raise ConfigError(
                    f"{flag_of(name)} {given}: not a Kubernetes object name, which has lower-case "
                    "letters, digits, '-' and '.'"
                )
        if twice := sorted(self.env_vars.keys() & self.secrets.keys()):
            raise ConfigError(f"--secret {twice[0]}: also set with --env; leave one out")

    def required_image(self, kind: str) -> str:
        if not self.image:
            raise ConfigError(
                f"a manifest for {kind} needs --image with Ray, raybatch and its engine "
                "(deploy/Dockerfile builds one)"
            )
        return self.image


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


class WorkerShape(NamedTuple):
    """Resources of the identical worker hosts; shared memory is for Ray's object store."""

    num_engines: int
    num_hosts: int
    num_gpus: int
    num_cpus: int
    memory_gib: int
    shared_memory_gib: int


def worker_shape(job: JobConfig, options: ManifestOptions) -> WorkerShape:
    """Return the number of hosts for a job's engines, and the resources of each.

    Raises:
        ConfigError: engines do not fit pods of this size, or leave GPUs idle.
    """
    stage, per_pod = job.stage, options.gpus_per_pod
    given = stage.pool.num_gpus_per_replica
    gpus = float(gpus_of_engine(stage.backend, stage.engine) if given is None else given)
    num_replicas = options.replicas or stage.pool.replicas
    if per_pod is not None and not gpus:
        raise ConfigError("--gpus-per-pod: the job runs on CPUs; leave it out")
    if per_pod is None:
        num_engines = num_hosts = num_replicas or 1
        num_gpus = math.ceil(gpus)
    else:
        num_ranks = type_of(stage.backend).num_actors(stage.backend, stage.engine)
        num_engines, num_hosts = _fill_pods(
            num_replicas, gpus, per_pod, may_cross=num_ranks > per_pod
        )
        num_gpus = per_pod
    cpus = options.cpus_per_pod or num_gpus * _CPUS_PER_GPU or _CPUS_WITHOUT_GPU
    gib = num_gpus * _GIB_PER_GPU or _GIB_WITHOUT_GPU
    if options.memory_per_pod is not None:
        gib = gib_of(options.memory_per_pod, flag="--memory-per-pod")
    # a little less than the default third for Ray's object store
    shared = max(1, gib * 5 // 16)
    return WorkerShape(num_engines, num_hosts, num_gpus, cpus, gib, shared)


def _fill_pods(
    num_replicas: int | None, gpus: float, per_pod: int, *, may_cross: bool
) -> tuple[int, int]:
    """Return the numbers of engines and pods; one full pod by default.

    Engines that `may_cross` pods are larger than one pod.
    """
    if may_cross:
        if gpus % per_pod:
            raise ConfigError(
                f"--gpus-per-pod {per_pod}: an engine of {gpus:g} GPUs does not fill whole pods; "
                f"choose a divisor of {gpus:g}"
            )
        return num_replicas or 1, int((num_replicas or 1) * gpus / per_pod)
    # tolerate rounding of fractions such as a third of a GPU
    in_a_pod = int(per_pod / gpus + 1e-6)
    if in_a_pod * gpus < per_pod - 1e-6:
        raise ConfigError(
            f"--gpus-per-pod {per_pod}: engines of {gpus:g} GPUs do not fill such a pod; choose a "
            f"multiple of {gpus:g}, or change tensor_parallel_size"
        )
    num_engines = num_replicas or in_a_pod
    if num_engines % in_a_pod:
        raise ConfigError(
            f"--gpus-per-pod {per_pod}: {num_engines} engines leave GPUs idle; set --replicas, or "
            f"pool.replicas, to a multiple of {in_a_pod}, the engines per pod"
        )
    return num_engines, num_engines // in_a_pod


def _parts(form: re.Pattern[str], setting: str, *, flag: str, expected: str) -> re.Match[str]:
    match = form.fullmatch(setting)
    if match is None:
        raise ConfigError(f"{flag} {setting}: expected {expected}")
    return match


def gib_of(size: str, *, flag: str) -> int:
    """Return GiB of a size such as "400Gi" or "2Ti"; ConfigError: it is malformed."""
    match = _parts(_SIZE, size, flag=flag, expected="a size such as 400Gi or 2Ti")
    return int(match[1]) * (1024 if match[2] == "Ti" else 1)


def read_secrets(settings: Iterable[str]) -> dict[str, SecretKey]:
    """Return variables given as VARIABLE=NAME:KEY; ConfigError: one is malformed."""
    secrets: dict[str, SecretKey] = {}
    for setting in settings:
        match = _SECRET.fullmatch(setting)
        if match is None:
            # do not show a secret value that was written instead of its name
            name, equals, _ = setting.partition("=")
            raise ConfigError(
                f"--secret {name if equals and ENV_NAME.fullmatch(name) else '...'}: expected "
                "VARIABLE=NAME:KEY, where NAME is a Kubernetes secret, made with 'kubectl create "
                "secret generic NAME', and KEY one of its keys"
            )
        if match[1] in secrets:
            raise ConfigError(f"--secret {match[1]}: set twice; leave one out")
        secrets[match[1]] = SecretKey(match[2], match[3])
    return secrets


def read_model_volume(setting: str) -> ModelVolume:
    """Return a volume given as CLAIM or CLAIM:/path; ConfigError: it is malformed."""
    expected = "CLAIM or CLAIM:/path, the name of a persistent volume claim and where to mount it"
    match = _parts(_VOLUME, setting, flag="--model-volume", expected=expected)
    path = "/" + posixpath.normpath(match[2] or "/models").lstrip("/")
    if _SYSTEM_FOLDERS.fullmatch(path):
        raise ConfigError(
            f"--model-volume {setting}: a volume over {path} would hide files of the system; mount "
            "it at a separate folder, such as /models"
        )
    return ModelVolume(match[1], path)


def read_node_selector(settings: Iterable[str]) -> dict[str, str]:
    """Return labels given as KEY=VALUE; ConfigError: one is malformed."""
    selector: dict[str, str] = {}
    for setting in settings:
        key, value = read_label(setting, flag="--node-selector")
        if selector.setdefault(key, value) != value:
            raise ConfigError(f"--node-selector {setting}: the label is set twice; leave one out")
    return selector


def read_label(setting: str, *, flag: str) -> tuple[str, str]:
    """Return a label written as LABEL=VALUE; ConfigError: Kubernetes would refuse it."""
    match = _parts(_LABEL, setting, flag=flag, expected="LABEL=VALUE, as Kubernetes writes labels")
    return match[1], match[2]


def read_tolerations(settings: Iterable[str]) -> tuple[dict[str, str], ...]:
    """Return tolerations given as KEY[=VALUE][:EFFECT]; ConfigError: one is malformed."""
    expected = (
        "KEY, KEY=VALUE or KEY=VALUE:EFFECT, where the effect is one of NoSchedule, "
        "PreferNoSchedule, NoExecute"
    )
    tolerations = []
    for setting in settings:
        match = _parts(_TOLERATION, setting, flag="--toleration", expected=expected)
        operator = "Exists" if match["value"] is None else "Equal"
        given = {name: part for name, part in match.groupdict().items() if part is not None}
        tolerations.append({"key": given.pop("key"), "operator": operator, **given})
    return tuple(tolerations)
