"""What the log of a worker shows, where the environment asks for it and where not."""

import asyncio
import logging
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from raybatch.actors.executors.ray_pools import RayRuntime
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.runtime import obey_log_level
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from tests.actors.pools import SAMPLING, generate, prompts_of, table_of, wait_until


@contextmanager
def as_in_a_worker():
    """The log of raybatch without any handler; a fixture would be given those of pytest."""
    found = logging.getLogger("raybatch")
    before = found.level, found.handlers[:], found.propagate
    found.propagate = False
    found.setLevel(logging.NOTSET)
    found.handlers[:] = []
    try:
        yield found
    finally:
        found.setLevel(before[0])
        found.handlers[:], found.propagate = before[1:]


def start():
    """Start an engine in this process; return why it did not start, if so."""
    spec = PoolSpec(
        model="none", backend=BackendConfig(kind="fake"), engine=EngineConfig(), pool=PoolConfig()
    )
    return asyncio.run(Replica(spec, 7, RayRuntime()).start(1))


def test_an_engine_shows_what_it_says_where_the_environment_asks(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAYBATCH_LOG_LEVEL", "info")
    with as_in_a_worker():
        assert start() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("INFO raybatch.actors.replica.replica: replica 7 is ready: Capacity(")


def test_an_engine_shows_warnings_alone_where_nothing_is_asked(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RAYBATCH_LOG_LEVEL", raising=False)
    with as_in_a_worker() as logger:
        assert start() is None
        found = logger.level, logger.handlers[:]
    assert capsys.readouterr().err == ""
    assert (logging.NOTSET, []) == found


def test_a_level_that_is_none_ends_the_start_for_good(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAYBATCH_LOG_LEVEL", "loud")
    with as_in_a_worker():
        failed = start()
    assert failed.is_final
    assert (
        "RAYBATCH_LOG_LEVEL must be one of DEBUG, INFO, WARNING, ERROR, got 'loud'" in failed.cause
    )


def test_secrets_are_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("RAYBATCH_LOG_LEVEL", "DEBUG")
    with as_in_a_worker():
        obey_log_level()
        logging.getLogger("raybatch.x").debug("token=%s", "Zq7RvW2kLx0TnB5y")
    assert capsys.readouterr().err == "DEBUG raybatch.x: token=***\n"


def test_lines_are_not_shown_twice(monkeypatch):
    monkeypatch.setenv("RAYBATCH_LOG_LEVEL", "WARNING")
    own = logging.NullHandler()
    with as_in_a_worker() as logger:
        logger.addHandler(own)
        obey_log_level()
        assert (logger.level, logger.handlers) == (logging.WARNING, [own])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_workers_of_a_pool_obey_the_environment_that_it_gives_them(own):
    requested = {"env_vars": {"RAYBATCH_LOG_LEVEL": "INFO"}}
    handle = own(pool={"replicas": 1, "runtime_env": requested})
    generate(handle, table_of(prompts_of(2)), (SAMPLING,))
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    message = "INFO raybatch.actors.replica.replica: replica "
    wait_until(lambda: any(message in path.read_text() for path in logs.glob("worker-*.err")))
