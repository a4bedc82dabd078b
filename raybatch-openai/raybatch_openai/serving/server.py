"""The server: the HTTP API on Ray Serve, and a thread that runs the batches.

Batches run one after another; their status is written to the folder that both share.
"""

import hashlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import ray

from raybatch.actors.replicas.placement import is_connected
from raybatch.durable.storage import error_context, store_of
from raybatch.errors import CommitError, ConfigError, RaybatchError, error_text
from raybatch_openai.batch.conversion import Conversion
from raybatch_openai.batch.requests import endpoints_of
from raybatch_openai.batch.run import BatchOptions, BatchRun
from raybatch_openai.batch.writing import BatchCounts, BatchFiles
from raybatch_openai.serving.http_api import Api
from raybatch_openai.serving.stores import ENDED, Batch, BatchStore, FileStore

logger = logging.getLogger(__name__)

_APP = "raybatch"
# the name of Ray Serve's controller
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
_POLL_S = 1.0
_MAX_REQUESTS_AT_ONCE = 256
_MARKER = "server.json"
_WRITE_EVERY_S = 2.0
_CANCELLED, _EXPIRED = "cancelled", "expired"
_CODES = {_CANCELLED: "batch_cancelled", _EXPIRED: "batch_expired"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of `serve_batches`; raises ConfigError for an invalid one."""

    folder: str
    """Of files, batches and outputs, local or a URI. A server that starts with the folder of an
    earlier one continues its batches; only one at a time may use it."""
    job: Mapping[str, Any]
    """Options of the jobs, as in a job file."""
    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    key: str = ""
    """API key of clients; "" requires none."""
    max_file_bytes: int = 200 << 20
    max_requests: int = 50_000

    def __post_init__(self) -> None:
        # raises for an invalid option before anything starts
        BatchOptions(job=self.job, names=self.names, where="raybatch serve")
        if "limits" in self.job:
            raise ConfigError(
                "raybatch serve: remove limits, which end a run early; batches end by their "
                "completion window"
            )
        if not 0 < self.port < 1 << 16:
            raise ConfigError(f"port must be from 1 to 65535, got {self.port!r}")


def serve_batches(options: ServeOptions, *, start_ray: Callable[[], None]) -> None:
    """Serve the Files and Batches API until SIGTERM or Ctrl-C; a second signal ends at once.

    After the first signal it saves the finished rows of the running batch. Raises ConfigError if
    the address is in use, or the folder or the model cannot be used: before Ray starts, if
    possible.
    """
    api = api_of(options)
    # on a cluster a killed server's Ray Serve may have the port until `served` ends it
    if not is_connected():
        _check_free(options.host, options.port)
    start_ray()
    ending = threading.Event()
    runner = BatchRunner(
        options.folder, options.job, options.names, ending.is_set, options.max_requests
    )

    def run() -> None:
        while not ending.is_set():
            try:
                is_idle = not runner.step()
            except Exception:  # the folder may be available again later
                logger.exception("cannot read the batches, will try again")
                is_idle = True
            if is_idle:
                ending.wait(_POLL_S)

    thread = threading.Thread(target=run, name="batches", daemon=True)
    with _signals(ending), served(options, api):
        logger.info("serving http://%s:%d/v1", options.host, options.port)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)


def api_of(options: ServeOptions) -> Api:
    """Return the API of a server; raise ConfigError if its model or folder cannot be used."""
    rules = BatchOptions(job=options.job).rules
    with error_context(f"--folder {options.folder!r} cannot be used; choose one that is writable"):
        store_of(options.folder).create(_MARKER, b'{"layout": 1}')
    return Api(
        folder=options.folder,
        # the last path component only: clients must not see paths of this host
        models=options.names or rules.names[-1:],
        endpoints=endpoints_of(rules.task),
        key_digest=hashlib.sha256(options.key.encode()).hexdigest() if options.key else "",
        max_file_bytes=options.max_file_bytes,
        created_at=int(time.time()),
    )


@contextmanager
def served(options: ServeOptions, api: Api) -> Iterator[None]:
    """Serve HTTP on Ray Serve during the context; raises what `serve_batches` raises."""
    from ray import serve

    _end_leftovers(serve)
    _check_free(options.host, options.port)
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    where = {"host": options.host, "port": options.port}
    serve.start(proxy_location="HeadOnly", http_options=where, logging_config=quiet)
    deployment = serve.deployment(
        name="api",
        num_replicas=1,
        max_ongoing_requests=_MAX_REQUESTS_AT_ONCE,
        ray_actor_options={"num_cpus": 0, "resources": _this_host()},
        logging_config=quiet,
    )(serve.ingress(api.app())(type("Api", (), {})))
    try:
        serve.run(deployment.bind(), name=_APP, route_prefix="/")
        yield
    finally:
        serve.shutdown()


@contextmanager
def _signals(ending: threading.Event) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if ending.is_set():
            raise KeyboardInterrupt
        ending.set()
        logger.warning(
            "the server is stopping, which may take a minute; its next start resumes the batch"
        )

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end_leftovers(serve: Any) -> None:  # noqa: ANN401 - the module of Ray Serve
    """End the Ray Serve of a killed server; raise ConfigError if it has other applications."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    if _CONTROLLER not in {actor["name"] for actor in actors}:
        return
    if others := sorted(set(serve.status().applications) - {_APP}):
        raise ConfigError(
            f"Ray Serve already runs {', '.join(others)} on this cluster; start the server on "
            "another cluster, such as a local one by RAY_ADDRESS=local"
        )
    serve.shutdown()


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error}; choose another --port, or set "
                "RAY_ADDRESS=auto if a killed server's Ray still runs on this host"
            ) from error


def _this_host() -> dict[str, float]:
    """Return a resource that only this host has: the folder may be local to it."""
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            names = [n for n in node["Resources"] if n.startswith("node:") and "__" not in n]
            return dict.fromkeys(names[:1], 0.001)
    return {}


@dataclass(slots=True)
class BatchRunner:
    """Runs the batches below the folder of a server."""

    folder: str
    job: Mapping[str, Any]
    """Options of every job, as in a job file."""
    names: tuple[str, ...]
    is_ending: Callable[[], bool]
    """Whether the server is stopping: the running batch then stops, to be resumed later."""
    max_requests: int = 50_000
    # ids of ended batches, whose status does not change again
    _ended: set[str] = field(default_factory=set)

    def step(self) -> bool:
        """Run the oldest batch that has not ended; return whether there was one."""
        store = BatchStore(self.folder)
        for batch_id in store.ids():
            if self.is_ending():
                return False
            if batch_id in self._ended:
                continue
            batch = store.get(batch_id)
            if batch.status.status not in ENDED:
                _OneBatch(self, store, batch).run()
                return True
            self._ended.add(batch_id)
        return False


class _OneBatch:
    def __init__(self, runner: BatchRunner, store: BatchStore, batch: Batch) -> None:
        self._runner = runner
        self._store = store
        self._files = FileStore(runner.folder)
        self._request = batch.request
        self._status = batch.status
        self._written_s = 0.0

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # must not keep other batches from running
            is_known = isinstance(error, RaybatchError)
            logger.warning(
                "batch %s failed: %s", self._request.id, error_text(error), exc_info=not is_known
            )
            self._enter("failed", problem=str(error) if is_known else error_text(error))

    def _run(self) -> None:
        if not self._status.output_file_id:
            self._keep(output_file_id=self._files.new_id(), error_file_id=self._files.new_id())
        batch = self._batch()
        conversion = batch.convert()
        if not conversion.num_lines:
            raise ConfigError("the input file has no requests")
        if conversion.num_lines > self._runner.max_requests:
            raise ConfigError(
                f"the input file has {conversion.num_lines} requests, at most "
                f"{self._runner.max_requests} are allowed; split it into several batches"
            )
        if self._status.status == "validating":
            counts = BatchCounts(
                num_requests=conversion.num_lines, num_failed=conversion.num_refused
            )
            self._enter("in_progress", counts=counts)
        reason = self._reason() or batch.answer(
            conversion, ending=self._reason, watch=lambda *rows: self._watch(conversion, *rows)
        )
        if reason in _CODES:
            self._end(reason, batch.close(_CODES[reason]))
        elif reason and self._runner.is_ending():
            logger.warning("batch %s will resume when the server starts again", self._request.id)
        elif reason:
            raise CommitError(reason)
        else:
            self._enter("finalizing")
            self._end("completed", batch.finish(conversion))

    def _batch(self) -> BatchRun:
        runner, request, status = self._runner, self._request, self._status
        files = BatchFiles(
            source=self._files.path(request.input_file_id),
            output=self._files.path(status.output_file_id),
            errors=self._files.path(status.error_file_id),
            folder=self._store.run_folder(request.id),
        )
        options = BatchOptions(
            job=runner.job, names=runner.names, endpoint=request.endpoint, where="raybatch serve"
        )
        return BatchRun(files=files, options=options)

    def _reason(self) -> str | None:
        """Return why the batch has to end early."""
        if self._store.is_cancelled(self._request.id):
            return _CANCELLED
        if time.time() >= self._request.expires_at:
            return _EXPIRED
        return "the server is stopping" if self._runner.is_ending() else None

    def _watch(self, conversion: Conversion, num_answered: int, num_failed: int) -> None:
        now_s = time.monotonic()
        if now_s - self._written_s < _WRITE_EVERY_S:
            return
        self._written_s = now_s
        # these are rows, and a request may have several: count no more than there are requests
        failed = min(conversion.num_refused + max(0, num_failed), conversion.num_lines)
        completed = min(max(0, num_answered), conversion.num_lines - failed)
        counts = replace(self._status.counts, num_completed=completed, num_failed=failed)
        self._keep(counts=counts)

    def _end(self, state: str, counts: BatchCounts) -> None:
        status = self._status
        for file_id, count, what in (
            (status.output_file_id, counts.num_completed, "output"),
            (status.error_file_id, counts.num_failed, "error"),
        ):
            if count:
                name = f"{self._request.id}_{what}.jsonl"
                self._files.register(file_id, filename=name, purpose="batch_output")
            else:
                self._files.remove(file_id)
        self._enter(state, counts=counts)

    def _enter(self, state: str, **changes: Any) -> None:  # noqa: ANN401
        logger.info("batch %s: %s", self._request.id, state)
        times = {**self._status.times, f"{state}_at": int(time.time())}
        self._keep(status=state, times=times, **changes)

    def _keep(self, **changes: Any) -> None:  # noqa: ANN401
        self._status = replace(self._status, **changes)
        self._store.write(self._request.id, self._status)
