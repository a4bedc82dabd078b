"""Checks of a job for a cluster: paths that every host has, and no secrets in clear text."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from raybatch.errors import ConfigError
from raybatch.inputs.tables import file_place
from raybatch.job.config import JobConfig
from raybatch.models.source import is_local_model

_ENDINGS = ("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
# suffix of a variable that names the place of a secret
_PLACES = ("PATH", "FILE", "DIR")
_VALUES = re.compile(r"(hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|AKIA|-----BEGIN )")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# problem of a relative path, and an alternative
_UNKNOWN = ", and the hosts of the cluster do not have it"
_LOST = ": it would be written into a temporary folder of the cluster and lost"
_IF_RELATIVE = {
    "source": (_UNKNOWN, ", or send the folder that holds it with raybatch submit --working-dir"),
    "sink": (_LOST, ""),
    "publish": (_LOST, ""),
    "model": (_UNKNOWN, ", or name one of the model hub"),
}
_WAY_OUT = (
    "give the hosts a role (instance profile, workload identity), mount a file with it and send "
    "its path, such as HF_TOKEN_PATH, or name a Kubernetes secret in a manifest for KubeRay with "
    "--secret VARIABLE=NAME:KEY"
)


def is_uri(path: str) -> bool:
    """Return whether `path` names its file system, so that it means the same on every host."""
    return "://" in path or "::" in path


def check_paths(job: JobConfig, *, working_dir: Path | None) -> None:
    """Raise ConfigError for paths that hosts lack, or that are lost on hosts.

    A relative source or model may be in `working_dir`, which is sent with the job.
    """
    if job.executor == "local":
        raise ConfigError(
            "executor=local runs engines only on the driver's host; leave it out, or run the job "
            "here with raybatch run"
        )
    for name, path in (*_local_paths(job), ("model", job.stage.model)):
        check_no_secret_in_uri(name, path)
    for name, path in _local_paths(job):
        is_sent = name in ("source", "model") and _lies_in(working_dir, path)
        if is_uri(path) or path.startswith("/") or is_sent:
            continue
        problem, way_out = _IF_RELATIVE[name]
        raise ConfigError(
            f"{name} {path!r} is relative{problem}; use a path that every host has, such as "
            f"{Path(path).expanduser().absolute().as_posix()!r}, or a URI such as "
            f"s3://bucket/folder{way_out}"
        )


def _local_paths(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield the local paths that the job reads and writes, with their options."""
    for name, address in (("source", job.source), ("publish", job.publish)):
        if address is not None and (place := file_place(address)):
            yield name, place
    yield "sink", job.sink
    if job.stage.model != "demo" and is_local_model(job.stage.model):
        yield "model", job.stage.model


def fixed_part(path: str) -> str:
    """Return the path itself, or for a glob the folder before the first wildcard."""
    wildcards = [path.index(sign) for sign in "*?[" if sign in path]
    return path[: min(wildcards)].rpartition("/")[0] if wildcards else path


def paths_on_hosts(job: JobConfig) -> list[tuple[str, str]]:
    """Return what must be mounted at the same path on every host, as ("source", "/data")."""
    return [(name, path) for name, path in _local_paths(job) if path.startswith("/")]


def _lies_in(folder: Path | None, path: str) -> bool:
    if folder is None or path.startswith("~"):
        return False
    root = folder.resolve()
    place = (root / fixed_part(path)).resolve()
    return place.is_relative_to(root) and place.exists()


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret, by the words in its name."""
    words = [word for word in name.upper().split("_") if word]
    if not words or words[-1] in _PLACES:
        return False
    return any(word.removesuffix("S").endswith(_ENDINGS) for word in words)


def read_env_vars(settings: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables given as NAME or NAME=value; ConfigError: one is not set, or a secret."""
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not ENV_NAME.fullmatch(name):
            raise ConfigError(f"--env {setting!r}: expected NAME or NAME=value")
        if is_secret_name(name):
            raise ConfigError(
                f"--env {name} is a secret by its name, and all users of the job server can read "
                f"the variables of a job; {_WAY_OUT}"
            )
        if not equals and name not in environment:
            raise ConfigError(f"--env {name}: not set here; set it, or write {name}=value")
        values[name] = value if equals else environment[name]
        if _VALUES.match(values[name]) or _has_password(values[name]):
            raise ConfigError(
                f"--env {name}: its value looks like a secret, and all users of the job server "
                f"can read the variables of a job; {_WAY_OUT}"
            )
    return values


def check_no_secret_in_uri(what: str, uri: str) -> None:
    if _has_password(uri):
        raise ConfigError(
            f"{what}: the URI contains a password, which would be sent in clear text with the job "
            f"file; {_WAY_OUT}"
        )


def _has_password(text: str) -> bool:
    try:
        return urlsplit(text).password is not None
    except ValueError:
        return False
