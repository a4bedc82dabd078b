"""A server: the HTTP API on Ray Serve, and the runner of its batches in a thread beside it."""

import hashlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray

from raybatch.durable.storage import store_of
from raybatch.errors import ConfigError, MissingDependency
from raybatch.openai_batch.batch_options import BatchOptions, model_names
from raybatch.openai_batch.requests import endpoints_of
from raybatch.serving.runner import BatchRunner

logger = logging.getLogger(__name__)

_APP = "raybatch"
# as Ray Serve calls it
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
_POLL_S = 1.0
_MAX_REQUESTS_AT_ONCE = 256
_MARKER = "server.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    folder: str
    """For files, batches and outputs, local or a URI; a server that is started with the same one
    goes on there. One server at a time works on it."""
    job: Mapping[str, Any]
    """Options of the jobs, as in a job file."""
    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    key: str = ""
    """That clients must bring; "" lets everyone in."""
    max_file_bytes: int = 200 << 20
    max_requests: int = 50_000

    def __post_init__(self) -> None:
        # a wrong option is reported before anything starts
        BatchOptions(job=self.job, names=self.names, where="raybatch serve")
        if "limits" in self.job:
            raise ConfigError(
                "raybatch serve: limits end a run early, and a batch has its completion window for "
                "that; leave them out"
            )
        if not 0 < self.port < 1 << 16:
            raise ConfigError(f"port must be from 1 to 65535, got {self.port!r}")


def serve_batches(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C; a second one does not wait for the batch at work.

    Ray runs already.

    Raises:
        ConfigError: the address is taken, or the folder cannot be used.
        MissingDependency: Ray Serve is not installed.
    """
    ending = threading.Event()
    runner = BatchRunner(
        options.folder, options.job, options.names, ending.is_set, options.max_requests
    )

    def run() -> None:
        while not ending.is_set():
            try:
                is_idle = not runner.step()
            except Exception:  # of the folder, which may be there again later
                logger.exception("the batches cannot be read")
                is_idle = True
            if is_idle:
                ending.wait(_POLL_S)

    thread = threading.Thread(target=run, name="batches", daemon=True)
    with _signals(ending), served(options):
        logger.info("serving http://%s:%d/v1", options.host, options.port)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)


@contextmanager
def served(options: ServeOptions) -> Iterator[None]:
    """Answer HTTP on Ray Serve while the context lasts; errors are those of `serve_batches`."""
    try:
        from ray import serve

        from raybatch.serving.http_api import Api
    except ImportError as error:
        raise MissingDependency(
            "raybatch serve needs Ray Serve: pip install 'raybatch[serve]'"
        ) from error
    _end_leftovers(serve)
    _check_free(options.host, options.port)
    store_of(options.folder).create(_MARKER, b'{"layout": 1}')
    digest = hashlib.sha256(options.key.encode()).hexdigest() if options.key else ""
    stage = BatchOptions(job=options.job).stage
    api = Api(
        folder=options.folder,
        # a path of this host is nobody's business
        models=options.names or model_names(stage.model, ())[-1:],
        endpoints=endpoints_of(stage.task),
        key_digest=digest,
        max_file_bytes=options.max_file_bytes,
        created_at=int(time.time()),
    )
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
        logger.warning("the server ends; the batch at work keeps what is done and goes on later")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end_leftovers(serve: Any) -> None:  # noqa: ANN401 - the module of Ray Serve
    """End what a dead server has left on this Ray; ConfigError: others serve there."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    if _CONTROLLER not in {actor["name"] for actor in actors}:
        return
    if others := sorted(set(serve.status().applications) - {_APP}):
        raise ConfigError(
            f"Ray Serve runs on this Ray already, with {', '.join(others)}; start the server on a "
            "Ray of its own, as with RAY_ADDRESS=local"
        )
    serve.shutdown()


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be listened on: {error}") from error


def _this_host() -> dict[str, float]:
    """Return a resource that only the host of this process has, because the folder may be local."""
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            names = [n for n in node["Resources"] if n.startswith("node:") and "__" not in n]
            return dict.fromkeys(names[:1], 0.001)
    return {}
