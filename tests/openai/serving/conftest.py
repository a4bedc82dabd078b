"""A server on the fake backend, and the official client."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raybatch_openai.serving.server import BatchRunner
from tests.stages.support import make_tokenizer

KEY = "a key of the tests"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model") / "chat")


def job_of(model: Path, *, executor: str = "local", **fake: Any) -> dict[str, Any]:
    """Return the options of jobs on the fake backend."""
    return {
        "executor": executor,
        "stage": {
            "model": str(model),
            "backend": {"kind": "fake", "options": {"max_model_len": 64, **fake}},
            "pool": {"replicas": 1},
        },
        "plan": {"unit_rows": 4, "max_unit_rows": 4},
        "flush_every_s": 0.1,
    }


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(folder: Path, job: dict[str, Any], **options: Any) -> Iterator[None]:
    """Run the batches of a folder in a thread until the context ends."""
    ending = threading.Event()
    runner = BatchRunner(str(folder), job=job, names=("m",), is_ending=ending.is_set, **options)

    def run() -> None:
        while not ending.is_set():
            if not runner.step():
                ending.wait(0.1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Wait for something that another thread does."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, "it has not come"
        time.sleep(0.1)
