"""One job server: what is asked of it, and its errors in one line."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from raybatch.errors import ConfigError, MissingDependency, RaybatchError, error_text
from raybatch.submission.probe import Token

# Ray has one class for them, and different texts
_KNOWN_ERRORS = {
    "No available agent to submit job": (
        "the head node has no agent that could start the job: another Ray on that host holds the "
        "agent's port; start each with its own --dashboard-agent-listen-port"
    ),
    "Please use a different submission_id": (
        "there is a job with this --submission-id already, and an id is used once for the life of "
        "a cluster; give another, or none"
    ),
    "Authentication required": (
        "the cluster asks for a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the "
        "file with its token"
    ),
    "Authentication failed": (
        "the cluster has another token than the one sent; copy its token into ~/.ray/auth_token "
        "(mode 600), or name the file in RAY_AUTH_TOKEN_PATH"
    ),
    "Failed to connect": "no job server answers; see that the cluster runs and the tunnel is open",
}
_CHATTY_LOGGERS = (
    "ray._private.runtime_env.packaging",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
)
_NO_PYTHON = 127
_MAX_MESSAGE = 2000


class JobEnd(NamedTuple):
    exit_code: int
    """Of the job if that is 0, 1 or 2, else 1."""
    reason: str = ""
    """In words where the job itself could not say."""


class JobServer:
    """A job server that has answered; ConfigError: it does not, or not as a job server."""

    def __init__(self, address: str, token: Token | None) -> None:
        try:
            import aiohttp  # noqa: F401 - comes with ray[default]
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise MissingDependency(
                "the client of the job server is missing: pip install 'ray[default]'"
            ) from error
        # what they say of each upload and each end would stand between the lines of the job
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
        """Start a job under a name that no job of the cluster has had.

        Everyone who may ask the job server reads the metadata.
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
        """Pass on the log of a job until it ends; return how many characters there were in all.

        ConnectionError: the connection was lost, with the number as its argument.
        """
        progress = LogWriter(write, skip)

        async def follow() -> None:
            async for text in self._client.tail_job_logs(submission_id):
                progress.take(text)

        try:
            asyncio.run(follow())
        except Exception as error:  # aiohttp's, Ray's or the system's: all of them mean the same
            raise ConnectionError(progress.written) from error
        return progress.written

    @contextmanager
    def as_one_line(self) -> Iterator[None]:
        """Turn whatever the client raises into a ConfigError of one line with the way out."""
        try:
            yield
        except RaybatchError:
            raise
        except Exception as error:  # of requests, of Ray, of the system
            known = next((out for text, out in _KNOWN_ERRORS.items() if text in str(error)), None)
            first_line = error_text(error).partition("\n")[0]
            raise ConfigError(f"{self.address}: {known or first_line}") from error


class LogWriter:
    """Writes a text of which the beginning has been written."""

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
    """Return how a job of the job server has ended; None while it runs."""
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
