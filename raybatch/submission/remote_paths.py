"""Which paths of a job mean the same on every host."""

from collections.abc import Iterator
from pathlib import Path

from raybatch.errors import ConfigError
from raybatch.job.config import JobConfig
from raybatch.models.source import is_local_model
from raybatch.submission.secret_names import check_no_secret_in_uri


def is_uri(path: str) -> bool:
    """Return whether `path` names its file system, so that it means the same on every host."""
    return "://" in path or "::" in path


def check_paths(job: JobConfig, *, working_dir: Path | None) -> None:
    """Refuse what the hosts of a cluster would not find, or would do where nobody looks.

    Args:
        job: options of the job.
        working_dir: the folder that is sent along; a relative source may lie in it.

    Raises:
        ConfigError: a relative path, a URI with a password, or a job that uses no cluster.
    """
    if job.executor == "local":
        raise ConfigError(
            "executor=local runs engines beside the driver alone, on one host of the cluster; "
            "leave it out, or run the job here with raybatch run"
        )
    for name, path in (("source", job.source), ("sink", job.sink), ("model", job.stage.model)):
        check_no_secret_in_uri(name, path)
    if _is_relative(job.sink):
        raise ConfigError(
            f"sink {job.sink!r} is relative: it would be written into a temporary folder of the "
            f"cluster and lost; {_way_out(job.sink)}"
        )
    if _is_relative(job.source) and not _lies_in(working_dir, job.source):
        raise ConfigError(
            f"source {job.source!r} is relative, and the hosts of the cluster do not have it; "
            f"{_way_out(job.source)}, or send the folder that holds it with --working-dir"
        )
    model = job.stage.model
    is_here = model != "demo" and is_local_model(model)
    if is_here and _is_relative(model) and not _lies_in(working_dir, model):
        raise ConfigError(
            f"model {model!r} is relative, and the hosts of the cluster do not have it; "
            f"{_way_out(model)}, or name one of the model hub"
        )


def fixed_part(path: str) -> str:
    """Return the path itself, or of a glob the folder in front of the first wildcard."""
    wildcards = [path.index(sign) for sign in "*?[" if sign in path]
    return path[: min(wildcards)].rpartition("/")[0] if wildcards else path


def paths_on_hosts(job: JobConfig) -> Iterator[str]:
    """Yield what must be mounted at the same path on every host, as "source /data/prompts"."""
    model = job.stage.model
    is_model = model != "demo" and is_local_model(model)
    named = (("source", job.source), ("sink", job.sink), ("model", model if is_model else ""))
    for name, path in named:
        if path.startswith("/"):
            yield f"{name} {path}"


def _is_relative(path: str) -> bool:
    return not is_uri(path) and not path.startswith("/")


def _lies_in(folder: Path | None, path: str) -> bool:
    if folder is None or path.startswith("~"):
        return False
    root = folder.resolve()
    place = (root / fixed_part(path)).resolve()
    return place.is_relative_to(root) and place.exists()


def _way_out(path: str) -> str:
    return (
        "give a path that every host has, such as "
        f"{Path(path).expanduser().absolute().as_posix()!r}, or a URI such as s3://bucket/folder"
    )
