"""Sends a job to the job server of a cluster, follows its log and ends as the job does."""

import asyncio
import logging
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import raybatch
from raybatch.errors import ConfigError, MissingDependency, RaybatchError, error_text, shell_path
from raybatch.inputs.tables import file_place
from raybatch.installation import SUBMIT
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch_submit.bundle import (
    folders_of_distributions,
    folders_of_package,
    folders_of_wheel,
    write_bundle,
)
from raybatch_submit.checks import check_paths, fixed_part, is_uri, read_env_vars
from raybatch_submit.probe import Token, is_loopback, read_address, server_auth_mode, token_for

SINK_KEY = "raybatch_sink"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# waits between attempts to reconnect to a job server; about five minutes in total
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 60.0, 60.0)
_STATUS_PAUSE_S = 0.5
# Ray raises one class for these, with different texts
_KNOWN_ERRORS = {
    "No available agent to submit job": (
        "the head node has no agent to start the job: another Ray on that host uses the agent's "
        "port; start each with its own --dashboard-agent-listen-port"
    ),
    "Please use a different submission_id": (
        "a job with this --submission-id exists, and ids are unique for the life of a cluster; "
        "use another, or none"
    ),
    "Authentication required": (
        "the cluster requires a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the "
        "file with its token"
    ),
    "Authentication failed": (
        "the cluster refused the token; copy its token into ~/.ray/auth_token (mode 600), or name "
        "the file in RAY_AUTH_TOKEN_PATH"
    ),
    "Failed to connect": "no job server answers; check the cluster and the tunnel",
}
_CHATTY_LOGGERS = (
    "ray._private.runtime_env.packaging",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
)
_NO_PYTHON = 127
_MAX_MESSAGE = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Console:
    write: Callable[[str], None]
    """Write a piece of the job's log, unchanged."""
    note: Callable[[str], None]
    """Write a line that is not from the job."""
    confirm: Callable[[str], bool] | None = None
    """Ask for confirmation and return the answer; None without a terminal."""


class JobEnd(NamedTuple):
    exit_code: int
    """Exit code of the job if it is 0, 1 or 2, else 1."""
    reason: str = ""
    """Reason, if the job itself could not report one."""


class JobServer:
    """Client of a job server; ConfigError: no job server answers."""

    def __init__(self, address: str, token: Token | None) -> None:
        try:
            import aiohttp  # noqa: F401 - comes with ray[default]
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            why = error_text(error)
            raise MissingDependency(
                f"raybatch submit needs aiohttp and ray[default], which come with {SUBMIT} ({why})"
            ) from error
        # their logs of uploads and job ends would mix with the job's log
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        self.address = address
        self.has_token = token is not None
        headers = {} if token is None else {"Authorization": f"Bearer {token.value}"}
        with self.as_one_line():
            self._client = JobSubmissionClient(address, headers=headers)

    def submit(
        self,
        submission_id: str,
        entrypoint: str,
        *,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
    ) -> None:
        """Start a job with an id that is unique in the cluster.

        All users of the job server can read the metadata.
        """
        with self.as_one_line():
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env=runtime_env,
                metadata=metadata,
                entrypoint_num_cpus=0,
            )

    def running(self, key: str, value: str) -> list[str]:
        """Return the ids of the unfinished jobs with this metadata."""
        with self.as_one_line():
            jobs = self._client.list_jobs()
        return [
            str(job.submission_id)
            for job in jobs
            if not job.status.is_terminal() and (job.metadata or {}).get(key) == value
        ]

    def end(self, submission_id: str) -> JobEnd | None:
        with self.as_one_line():
            return read_end(self._client.get_job_info(submission_id))

    def tail(self, submission_id: str, write: Callable[[str], None], *, skip: int = 0) -> int:
        """Write the log of a job until it ends; return its total number of characters.

        ConnectionError: the connection was lost; its argument is the number so far.
        """
        progress = LogWriter(write, skip)

        async def follow() -> None:
            async for text in self._client.tail_job_logs(submission_id):
                progress.take(text)

        try:
            asyncio.run(follow())
        except Exception as error:  # of aiohttp, Ray or the system: the connection was lost
            raise ConnectionError(progress.written) from error
        return progress.written

    @contextmanager
    def as_one_line(self) -> Iterator[None]:
        """Turn exceptions of the client into a one-line ConfigError with what to do."""
        try:
            yield
        except RaybatchError:
            raise
        except Exception as error:  # of requests, of Ray, of the system
            known = next((out for text, out in _KNOWN_ERRORS.items() if text in str(error)), None)
            first_line = error_text(error).partition("\n")[0]
            raise ConfigError(f"{self.address}: {known or first_line}") from error


class LogWriter:
    """Writes a text that `take` gets in pieces, except for its first `skip` characters."""

    def __init__(self, write: Callable[[str], None], skip: int) -> None:
        self._write = write
        self._seen = 0
        self.written = skip

    def take(self, text: str) -> None:
        begin, self._seen = self._seen, self._seen + len(text)
        if self._seen > self.written:
            self._write(text[max(0, self.written - begin) :])
            self.written = self._seen


def read_end(job: Any) -> JobEnd | None:  # noqa: ANN401 - Ray has no types
    """Return how a job has ended; None while it runs."""
    if not job.status.is_terminal():
        return None
    code = job.driver_exit_code
    if code in (0, 1, 2):
        return JobEnd(code)
    if str(job.status) == "STOPPED":
        return JobEnd(1, "the job was stopped")
    if str(job.status) == "SUCCEEDED":
        return JobEnd(0)
    if code == _NO_PYTHON:
        return JobEnd(1, "the head node has no 'python' on its path; put one into the image")
    if code is not None:
        return JobEnd(1, f"the driver of the job ended with {code}")
    message = (job.message or "no reason given").strip()
    return JobEnd(1, f"the job did not start or lost its host: {message[:_MAX_MESSAGE]}")


def submit(
    mapping: Mapping[str, Any],
    console: Console,
    *,
    where: str,
    environment: MutableMapping[str, str],
    address: str | None = None,
    submission_id: str | None = None,
    is_followed: bool = True,
    working_dir: Path | None = None,
    wheel: str = "auto",
    env: Iterable[str] = (),
    allow_error_rows: bool = False,
) -> int:
    """Check a job, send it, follow it, and return its exit code.

    The address is set in `environment`, because Ray's client prefers it to its argument.
    ConfigError: the job or an option is wrong, or the cluster refuses it.

    Args:
        address: of the job server; None uses `read_address`.
        submission_id: None makes one from the job's name and the time.
        working_dir: folder to send; None sends only the job file.
        wheel: "auto" sends the running code, "none" uses that of the hosts, anything else is the
            path of a wheel.
        allow_error_rows: the job ends with 0, not 2, if rows failed.
    """
    job = Job.from_mapping(mapping, where=where).config
    check_paths(job, working_dir=working_dir)
    env_vars = read_env_vars(env, environment)
    submission_id = submission_id or new_submission_id(where)
    if not _ID.fullmatch(submission_id):
        raise ConfigError(f"--submission-id {submission_id!r}: use letters, digits, '-', '_', '.'")
    server = _connect(read_address(address, environment), environment, console)
    sink = job.sink.rstrip("/")
    if running := server.running(SINK_KEY, sink):
        console.note(
            f"warning: {', '.join(running)} already writes to {sink}; a second run loses nothing, "
            "but repeats its work"
        )
        if console.confirm is not None and not console.confirm("submit anyway?"):
            raise ConfigError("not submitted")
    # the name of the job file on the cluster, safe in a shell
    name = Path(where).name
    if not (_ID.fullmatch(name) and name.endswith((".yaml", ".yml"))):
        name = "job.yaml"
    with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
        runtime_env, sizes = _pack(
            mapping, job, Path(folder), job_name=name, root=working_dir, wheel=wheel
        )
        console.note(sizes)
        server.submit(
            submission_id,
            f"python -m raybatch run {name}{' --allow-error-rows' * allow_error_rows}",
            runtime_env={**runtime_env, "env_vars": env_vars},
            metadata={SINK_KEY: sink, "raybatch_version": raybatch.__version__},
        )
    return _attend(server, submission_id, console, is_followed=is_followed)


def follow(
    server: JobServer,
    submission_id: str,
    console: Console,
    *,
    pauses_s: Iterable[float] = _PAUSES_S,
) -> int:
    """Write the log of a job until it ends, and return its exit code.

    `pauses_s` are the waits between attempts to reconnect; each success resets them.
    ConnectionError: the server did not answer again.
    """
    pauses = tuple(pauses_s)
    written = tries = 0
    while True:
        try:
            written = server.tail(submission_id, console.write, skip=written)
        except ConnectionError as lost:
            written = max(written, int(lost.args[0]))
        try:
            end = server.end(submission_id)
        except ConfigError as error:
            if tries == len(pauses):
                raise ConnectionError(f"lost the job server: {error}") from error
            time.sleep(pauses[tries])
            tries += 1
            continue
        tries = 0
        if end is not None:
            if end.reason:
                console.note(end.reason)
            return end.exit_code
        time.sleep(_STATUS_PAUSE_S)


def new_submission_id(where: str) -> str:
    """Return an id from job name and time, such as "summaries-20260131-120000-3f2a"."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(where).stem).strip("-_") or "raybatch"
    return f"{stem}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _connect(address: str, environment: MutableMapping[str, str], console: Console) -> JobServer:
    token = token_for(server_auth_mode(address), environment, Path.home(), address=address)
    if token is not None:
        console.note(f"the cluster requires a token: sending the one from {token.origin}")
        if address.startswith("http://") and not is_loopback(address):
            console.note(
                "warning: the token is sent unencrypted; use https, or a tunnel to the head node"
            )
    environment["RAY_API_SERVER_ADDRESS"] = address
    return JobServer(address, token)


def _attend(server: JobServer, submission_id: str, console: Console, *, is_followed: bool) -> int:
    """Follow a submitted job, or print how to; the job does not depend on this process."""
    prefix = "RAY_AUTH_MODE=token " if server.has_token else ""
    end = f"--address {shell_path(server.address)} {shell_path(submission_id)}"
    commands = (
        f"follow it with `{prefix}ray job logs --follow {end}`, "
        f"stop it with `{prefix}ray job stop {end}`"
    )
    try:
        console.note(f"job {submission_id} is at {server.address}")
        if is_followed:
            return follow(server, submission_id, console)
        console.note(commands)
        console.write(f"{submission_id}\n")
        return 0
    except KeyboardInterrupt:
        console.note(f"\nthe job continues; {commands}")
        return 130
    except ConnectionError as error:
        raise ConfigError(f"{error}; the job may continue; {commands}") from error


def _pack(
    mapping: Mapping[str, Any],
    job: JobConfig,
    folder: Path,
    *,
    job_name: str,
    root: Path | None,
    wheel: str,
) -> tuple[dict[str, Any], str]:
    """Write the uploads into `folder`; return the runtime environment, and their sizes as text."""
    paths = filter(None, (file_place(job.source), job.stage.model))
    inside = [] if root is None else [root / fixed_part(p) for p in paths]
    bundle = folder / "working_dir.zip"
    names = write_bundle(
        bundle,
        job_name=job_name,
        job_text=yaml.safe_dump(dict(mapping), sort_keys=False, allow_unicode=True),
        working_dir=root,
        kept=tuple(path for path in inside if path.exists()),
        left_out=() if is_uri(job.sink) else (Path(job.sink),),
    )
    what = names[0] if len(names) == 1 else f"{len(names)} files"
    num_bytes = bundle.stat().st_size
    size = f"{num_bytes / 2**20:.1f} MiB" if num_bytes >> 20 else f"{-(-num_bytes // 1024)} KiB"
    sizes = f"sending {what} ({size})"
    runtime_env: dict[str, Any] = {"working_dir": str(bundle)}
    if wheel == "none":
        return runtime_env, sizes
    code = folder / "code"
    code.mkdir()
    if wheel == "auto":
        folders = folders_of_package(Path(raybatch.__file__).parent, code)
    else:
        folders = folders_of_wheel(Path(wheel), code)
    folders += folders_of_distributions(job.stage.backend.kind, code)
    runtime_env |= {"py_modules": [str(each) for each in folders], "excludes": ["__pycache__"]}
    sent = ", ".join(sorted(about.stem for about in code.glob("*.dist-info")))
    return runtime_env, f"{sizes} and {sent}"
